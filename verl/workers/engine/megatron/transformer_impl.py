# SPDX-License-Identifier: Apache-2.0
"""The megatron-core engine: one model over tensor, pipeline, context, expert and data parallel ranks.

Section numbers in comments are those of docs/objective.md.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.models.mcore import mtp_patch
from verl.utils import tensordict_utils as tu
from verl.utils.device import DEVICE_NAMES, get_device_id, get_device_name
from verl.utils.megatron import cpu_backend, offload
from verl.utils.megatron.context_parallel import gather_with_own_gradient
from verl.utils.megatron.optimizer import build_lr_scheduler, build_optimizer, step_if_finite
from verl.utils.megatron.tensor_parallel import vocab_parallel_token_columns
from verl.utils.metric import Metric, all_reduce_metrics, merge_metrics
from verl.workers.engine.base import BaseEngine, EngineRegistry, LossFunction
from verl.workers.engine.megatron.loss_scale import (
    LossScale,
    _routed_num_tokens,
    check_per_token_loss_guards,
    count_step,
)
from verl.workers.engine.megatron.parallel import initialize_model_parallel
from verl.workers.engine.utils import micro_batches_on_device, restore_order, row_lengths, split_micro_batches

__all__ = ["MegatronEngine", "MegatronEngineWithLMHead", "_routed_num_tokens"]

_DTYPES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


class MegatronEngine(BaseEngine):
    """Model, optimizer and step of the Megatron backend, whatever the head.

    Args:
        model_config: ``HFModelConfig``: the Hugging Face folder and how it is run.
        engine_config: ``McoreEngineConfig``: layout, dtype, overrides.
        optimizer_config: ``McoreOptimizerConfig``, or None for a model that is only evaluated.
        checkpoint_config: ``McoreCheckpointConfig``.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any = None, checkpoint_config: Any = None
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.dtype = _DTYPES[engine_config.dtype]
        self.module: list[Any] = []
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self._scale: LossScale | None = None
        self._export_tasks: Any = None
        if self.trains and engine_config.use_distributed_optimizer and self.dtype == torch.float64:
            raise ValueError(
                "megatron.use_distributed_optimizer=True keeps its gradients in float32; "
                "with dtype=float64 set it to False"
            )
        cpu_backend.install()
        from verl.models.mcore.patch import apply_patches

        apply_patches()

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer; without one the model is not wrapped for gradient reduction."""
        return self.optimizer_config is not None and not self.engine_config.forward_only

    # ------------------------------------------------------------------ building
    def initialize(self) -> None:
        """Build everything; see :meth:`BaseEngine.initialize`."""
        from megatron.core.utils import get_model_config

        from verl.models.mcore.bridge import build_provider, load_bridge

        initialize_model_parallel(self.engine_config)
        model = self.model_config
        self.bridge = load_bridge(
            model.path,
            model.trust_remote_code,
            config_path=model.hf_config_path,
            override_config=model.override_config,
        )
        self.vocab_size = self.bridge.hf_pretrained.config.get_text_config().vocab_size
        mtp = self.model_config.mtp if self.trains else None  # a model that is only evaluated does without
        provider = build_provider(self.bridge, self.engine_config, self.dtype, mtp)
        self.module = self._build_modules(provider)
        self.tf_config = get_model_config(self.module[0])
        check_per_token_loss_guards(
            self.per_token_loss,
            self.engine_config.per_token_loss_guards,
            use_remove_padding=self.model_config.use_remove_padding,
        )
        self._wire_step()
        if self.trains:
            distributed = self.engine_config.use_distributed_optimizer
            self.optimizer = build_optimizer(self.optimizer_config, self.module, self.dtype, distributed)
            self.lr_scheduler = build_lr_scheduler(self.optimizer_config, self.optimizer)
        self.offload_as_configured()

    def _build_modules(self, provider: Any) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallelConfig

        from verl.models.mcore.bridge import build_modules, load_weights

        config = self.engine_config

        def load(models: list[Any]) -> None:
            model = self.model_config
            load_weights(self.bridge, models, model.path, model.mtp.enable_train, config.dist_checkpoint)
            self._after_loading(models)

        ddp_config = None
        if self.trains:
            settings = {
                "use_distributed_optimizer": config.use_distributed_optimizer,
                # Sums of bfloat16 gradients lose bits with every micro-batch.
                "grad_reduce_in_fp32": self.dtype == torch.bfloat16,
                **dict(config.override_ddp_config or {}),
            }
            ddp_config = DistributedDataParallelConfig(**settings)
        return build_modules(provider, self.dtype, load, ddp_config)

    def _after_loading(self, models: list[Any]) -> None:
        """Change the loaded model before it is wrapped; a language model is left as it is."""

    def _wire_step(self) -> None:
        """Hooks on the very configuration object that Megatron's schedule reads (sections 3 and 4)."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.moe.router import TopKRouter

        config = self.tf_config
        if self.trains:
            config.finalize_model_grads_func = finalize_model_grads
            if self.module[0].ddp_config.overlap_grad_reduce:
                hooks = [module.no_sync for module in self.module]
                config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
        config.moe_grad_scale_func = self._router_scale
        config.mtp_grad_scale_func = self._mtp_scale
        if config.mtp_num_layers:
            mtp_patch.apply()
        for module in self.module:
            for part in module.modules():
                if isinstance(part, TopKRouter):
                    # A mean over each micro-batch and shard would depend on the split; a sum over tokens does not.
                    part.calculate_per_token_loss = True

    def _router_scale(self) -> torch.Tensor:
        return torch.tensor(self._scale.router if self._scale is not None else 0.0, dtype=torch.float64)

    def _mtp_scale(self) -> torch.Tensor:
        return torch.tensor(self._scale.mtp if self._scale is not None else 0.0, dtype=torch.float64)

    @property
    def mtp_depths(self) -> int:
        """Depths of multi-token prediction that are trained."""
        return (self.tf_config.mtp_num_layers or 0) if self.model_config.mtp.enable_train else 0

    @property
    def per_token_loss(self) -> bool:
        """The finished model's ``calculate_per_token_loss``, whoever set it."""
        return bool(self.tf_config.calculate_per_token_loss)

    # ------------------------------------------------------------------ modes and devices
    @contextlib.contextmanager
    def train_mode(self, disable_auto_offload: bool = False, **kwargs: Any) -> Iterator[None]:
        """Train within the context; parameters and optimizer are on the device meanwhile."""
        yield from self._mode(True, disable_auto_offload)

    @contextlib.contextmanager
    def eval_mode(self, disable_auto_offload: bool = False, **kwargs: Any) -> Iterator[None]:
        """Evaluate within the context; parameters are on the device meanwhile."""
        yield from self._mode(False, disable_auto_offload)

    def _mode(self, training: bool, disable_auto_offload: bool) -> Iterator[None]:
        moves = self.engine_config.param_offload and not disable_auto_offload
        moves_optimizer = self.engine_config.optimizer_offload and not disable_auto_offload and training
        if moves or moves_optimizer:
            self.to("device", model=moves, optimizer=moves_optimizer, grad=moves and training)
        for module in self.module:
            module.train(training)
        try:
            yield
        finally:
            if moves or moves_optimizer:
                self.to("cpu", model=moves, optimizer=moves_optimizer, grad=moves and training)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts of the state; nothing to do on a machine without an accelerator."""
        if device not in ("cpu", "device"):
            raise ValueError(f"device={device!r}: use 'cpu' or 'device'")
        if not offload.has_device_memory():
            return
        optimizer = optimizer and self.optimizer is not None
        if device == "device":
            if model:
                offload.load_params(self.module)
            if grad:
                offload.load_grads(self.module)
            if optimizer:
                offload.load_optimizer(self.optimizer, get_device_id())
            return
        if model:
            offload.offload_params(self.module)
        if grad:
            offload.free_grads(self.module)
        if optimizer:
            offload.offload_optimizer(self.optimizer)

    def offload_as_configured(self, optimizer: bool = True) -> None:
        """Put parameters and optimizer state back to the host where they are kept between steps; gradients go."""
        if self.engine_config.param_offload:
            self.to("cpu", model=True, optimizer=False, grad=True)
        if optimizer and self.engine_config.optimizer_offload:
            self.to("cpu", model=False, optimizer=True, grad=False)

    # ------------------------------------------------------------------ groups
    def get_data_parallel_rank(self) -> int:
        """Rank among the groups that hold different data (context-parallel ranks share theirs)."""
        from megatron.core import parallel_state as mpu

        return mpu.get_data_parallel_rank()

    def get_data_parallel_size(self) -> int:
        """Number of groups that hold different data."""
        from megatron.core import parallel_state as mpu

        return mpu.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Process group over which data differs, context parallelism left out."""
        from megatron.core import parallel_state as mpu

        return mpu.get_data_parallel_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        """True on the last pipeline stage for tensor rank 0 and context rank 0."""
        from megatron.core import parallel_state as mpu

        first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
        return first and mpu.is_pipeline_last_stage(ignore_virtual=True)

    # ------------------------------------------------------------------ step
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a batch; see :meth:`BaseEngine.forward_backward_batch`.

        Non-tensor entries of ``data`` that steer it: ``use_dynamic_bsz`` with ``max_token_len_per_gpu``, or
        ``micro_batch_size_per_gpu``; ``temperature``; ``calculate_entropy``.

        Raises:
            ValueError: for what section 5 refuses under ``calculate_per_token_loss``, and for a sequence above the
                token budget.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        dp_group = self.get_data_parallel_group()
        config = getattr(loss_function, "keywords", {}).get("config")
        check_per_token_loss_guards(
            self.per_token_loss,
            self.engine_config.per_token_loss_guards,
            use_remove_padding=self.model_config.use_remove_padding,
            loss_agg_mode=getattr(config, "loss_agg_mode", None),
        )
        data = data.copy()  # stays where it is, which is the host: what is cut and counted there makes no one wait
        if loss_function is not None:
            counts = count_step(data, dp_group, get_device_name(), 0 if forward_only else self.mtp_depths)
            tu.assign_non_tensor(
                data,
                dp_size=dp_group.size(),
                batch_num_tokens=counts.loss_tokens,
                global_batch_size=counts.sequences,
                routed_num_tokens=counts.routed_tokens,
            )
        micro_batches, indices = split_micro_batches(
            data,
            dp_group,
            budget_factor=self.engine_config.context_parallel_size,
            divisor=self.engine_config.pipeline_model_parallel_size if len(self.module) > 1 else 1,
        )
        micro_batches = micro_batches_on_device(micro_batches, get_device_name())
        if loss_function is not None:
            self._scale = LossScale(
                self.per_token_loss,
                len(micro_batches),
                dp_group.size(),
                counts.routed_tokens,
                cp_size=self.engine_config.context_parallel_size,
                mtp_targets=counts.mtp_targets,
                mtp_factor=self.model_config.mtp.mtp_loss_scaling_factor,
            )
        iterators = [iter(micro_batches) for _ in self.module]
        outputs = get_forward_backward_func()(
            forward_step_func=partial(self.forward_step, loss_function=loss_function, forward_only=forward_only),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.module if len(self.module) > 1 else self.module[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # real shapes travel with the messages (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )
        result = self._collect(outputs, indices, loss_function is not None, forward_only)
        return result | {"loss_tokens": counts.loss_tokens if loss_function is not None else 0}

    def _collect(
        self, outputs: list[dict], indices: list[list[int]], has_loss: bool, forward_only: bool
    ) -> dict[str, Any]:
        from megatron.core import parallel_state as mpu

        result: dict[str, Any] = {"model_output": {}, "metrics": {}, "loss": None}
        last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
        if forward_only and last_stage:
            names = outputs[0]["model_output"]
            result["model_output"] = {
                name: restore_order([out["model_output"][name] for out in outputs], indices) for name in names
            }
        if has_loss:
            metrics = merge_metrics([out["metrics"] for out in outputs]) if last_stage else {}
            if last_stage:
                # Context-parallel ranks compute the whole main loss each, but only their share of the depths' losses.
                shares = {name: metrics.pop(name) for name in list(metrics) if name.startswith("mtp/")}
                metrics = all_reduce_metrics(metrics, mpu.get_data_parallel_group())
                metrics |= all_reduce_metrics(shares, mpu.get_data_parallel_group(with_context_parallel=True))
            if mpu.get_pipeline_model_parallel_world_size() > 1:
                box = [metrics]
                dist.broadcast_object_list(
                    box, src=mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group()
                )
                metrics = box[0]
            result["metrics"] = metrics
            result["loss"] = metrics["loss"].value
        return result

    def forward_step(
        self, batches: Iterator[TensorDict], model: Any, loss_function: LossFunction | None, forward_only: bool
    ) -> tuple[torch.Tensor, Any]:
        """Megatron's forward step: the model's output and what turns it into a loss."""
        raise NotImplementedError

    def optimizer_zero_grad(self) -> None:
        """Zero the gradient buffers."""
        for module in self.module:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip and apply; a gradient norm that is not finite applies nothing and is returned for the caller to see."""
        return step_if_finite(self.optimizer)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one training step; returns the learning rate that now holds."""
        self.lr_scheduler.step(1)
        return self.current_lr

    @property
    def current_lr(self) -> float:
        """Learning rate of the next optimiser step."""
        return float(self.optimizer.param_groups[0]["lr"])

    # ------------------------------------------------------------------ weights and checkpoints
    def get_per_tensor_param(self, with_mtp: bool = True, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Stream hub-named weights, those of multi-token prediction ``with_mtp`` only; tensors may be views."""
        from verl.models.mcore.bridge import is_mtp_task, stream_hf_weights

        if self.engine_config.param_offload:
            self.to("device", model=True, optimizer=False, grad=False)
        if self._export_tasks is None:
            self._export_tasks = self.bridge.get_conversion_tasks(self.module)
        tasks = self._export_tasks if with_mtp else [t for t in self._export_tasks if not is_mtp_task(t)]

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                yield from stream_hf_weights(self.bridge, self.module, tasks)
            finally:
                self.offload_as_configured(optimizer=False)

        return stream(), None

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face folder: weights, config, tokenizer, generation config. Collective; rank 0 writes."""
        from verl.utils.checkpoint.hf_export import save_hf_folder

        model = self.model_config
        save_hf_folder(
            self.get_per_tensor_param()[0],
            source=model.path,
            target=path,
            is_writer=dist.get_rank() == 0,
            config=self.bridge.hf_pretrained.config if model.override_config or model.hf_config_path else None,
            tokenizer_source=model.tokenizer_path,
            without_mtp=not self.tf_config.mtp_num_layers,
        )

    def save_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        """Write model, optimizer, schedule and random state as the checkpoint configuration says. Collective."""
        from verl.utils.checkpoint.megatron_checkpoint import save_checkpoint

        save_checkpoint(self, local_path)

    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        """Read what :meth:`save_checkpoint` wrote, in this or another layout. Collective."""
        from verl.utils.checkpoint.megatron_checkpoint import load_checkpoint

        load_checkpoint(self, local_path)


@EngineRegistry.register(model_type="language_model", backend="megatron", device=DEVICE_NAMES)
class MegatronEngineWithLMHead(MegatronEngine):
    """A language model: its outputs are log-probabilities of the tokens and, if asked for, entropies."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> dict[str, Any]:
        """Pack, pad, split over context parallelism (section 6).

        Returns:
            ``layout``, ``labels`` ([t_local] next tokens, rolled before the split), and ``model``: the model's
            keywords.
        """
        from megatron.core import parallel_state as mpu
        from megatron.core.packed_seq_params import PackedSeqParams

        from verl.models.mcore.attention import make_plan
        from verl.models.mcore.bridge import has_transformer_engine
        from verl.models.mcore.packing import make_layout, roll_left_within_sequences

        tokens = micro_batch["input_ids"].values()
        lengths, on_host = row_lengths(micro_batch)
        dense = not self.model_config.use_remove_padding
        layout = make_layout(
            lengths,
            on_host=on_host,
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            cp_size=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            dense=dense,
        )
        packed = None
        if not dense:
            cu_seqlens, longest = layout.cu_seqlens_padded, layout.max_padded_length
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                cu_seqlens_q_padded=cu_seqlens,
                cu_seqlens_kv_padded=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
            if not has_transformer_engine():
                packed.plan = make_plan(layout)
        model = {
            "input_ids": layout.pack(tokens),
            "position_ids": layout.position_ids,
            "attention_mask": None,
            "packed_seq_params": packed,
        }
        if self.tf_config.num_moe_experts:
            model["padding_mask"] = layout.padding_mask
        if self.dtype == torch.bfloat16:
            model["fp32_output"] = False  # the log-probs are float32 anyway, a chunk at a time
        labels = layout.pack(roll_left_within_sequences(tokens, lengths)).flatten()
        return {"layout": layout, "labels": labels, "model": model}

    def forward_step(
        self, batches: Iterator[TensorDict], model: Any, loss_function: LossFunction | None, forward_only: bool
    ) -> tuple[torch.Tensor, Any]:
        """Run the model on the next micro-batch."""
        micro_batch = next(batches)
        inputs = self.prepare_model_inputs(micro_batch)
        if loss_function is not None and not forward_only and self.mtp_depths:
            inputs["mtp"] = mtp_patch.prepare(
                inputs["model"]["input_ids"],
                tokens=micro_batch["input_ids"].values(),
                loss_mask=micro_batch["loss_mask"].values(),
                layout=inputs["layout"],
                weights=self._scale.mtp_weights,
                detach_encoder=self.model_config.mtp.detach_encoder,
                vocab_size=self.vocab_size,
            )
        output = model(**inputs["model"])
        finish = partial(
            self.postprocess_micro_batch_func,
            data=micro_batch,
            inputs=inputs,
            loss_function=loss_function,
            forward_only=forward_only,
        )
        return output, finish

    def prepare_model_outputs(
        self, logits: torch.Tensor, data: TensorDict, inputs: dict[str, Any], forward_only: bool
    ) -> dict[str, torch.Tensor]:
        """Log-probs, and entropies and sums of squared probabilities if asked for, jagged [B, j] like ``input_ids``.

        Every context-parallel rank gets the whole sequences. Gradients flow into its own part only: the loss is
        computed alike on all of them, so that the sum of their gradients is that of one loss, for sequence losses too.
        """
        from megatron.core import parallel_state as mpu

        columns = vocab_parallel_token_columns(
            logits.flatten(0, 1),
            inputs["labels"],
            temperature=tu.get_non_tensor_data(data, "temperature", 1.0),
            group=mpu.get_tensor_model_parallel_group(),
            vocab_size=self.vocab_size,
            calculate_entropy=tu.get_non_tensor_data(data, "calculate_entropy", False),
            calculate_sum_pi_squared=tu.get_non_tensor_data(data, "calculate_sum_pi_squared", False),
            overwrite_logits=not forward_only,
        )
        stacked = torch.stack(list(columns.values()), dim=1)
        gathered = gather_with_own_gradient(stacked, mpu.get_context_parallel_group())
        offsets = data["input_ids"].offsets()
        values = inputs["layout"].unpack(gathered).unbind(1)
        jagged = [torch.nested.nested_tensor_from_jagged(column, offsets=offsets) for column in values]
        return dict(zip(columns, jagged, strict=True))

    def postprocess_micro_batch_func(
        self,
        output: torch.Tensor,
        data: TensorDict,
        inputs: dict[str, Any],
        loss_function: LossFunction | None,
        forward_only: bool,
    ) -> tuple:
        """From logits to what Megatron's schedule takes.

        Returns:
            ``(loss, output)``, or ``(loss, local_num_tokens, output)`` under ``calculate_per_token_loss``: the tokens
            that this rank's share of the micro-batch really holds, counted from the pack. Their sum over micro-batches,
            data- and context-parallel ranks is ``routed_num_tokens`` to the last token.
        """
        model_output = self.prepare_model_outputs(output, data, inputs, forward_only)
        result: dict[str, Any] = {}
        if forward_only:
            result["model_output"] = {name: value.detach() for name, value in model_output.items()}
        if loss_function is None:
            loss = output.new_zeros(())
        else:
            loss, metrics = loss_function(model_output=model_output, data=data, dp_group=self.get_data_parallel_group())
            dp_size = self._scale.dp_size
            result["metrics"] = {"loss": Metric.sum(loss.detach() / dp_size), **metrics}
            if "mtp" in inputs:
                result["metrics"] |= mtp_patch.loss_metrics(inputs["mtp"], self._scale.mtp_targets)
            loss = loss * self._scale.loss
        if not self.per_token_loss:
            return loss, result
        return loss, inputs["layout"].num_local_tokens.to(torch.int32), result
