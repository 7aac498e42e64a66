# SPDX-License-Identifier: Apache-2.0
"""The critic's engine: a language model whose vocabulary head gave way to one number for each position."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.utils.device import DEVICE_NAMES
from verl.utils.megatron.context_parallel import gather_with_own_gradient
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

__all__ = ["MegatronEngineWithValueHead", "ValueHead"]

# Names of the head in a Hugging Face folder: those of transformers' token classification models.
HEAD_NAMES = {"weight": "score.weight", "bias": "score.bias"}


class ValueHead(torch.nn.Module):
    """A linear map from hidden states to values, called like Megatron's output layer.

    Every tensor-parallel rank holds all of it. Under sequence parallelism each maps its own part of the sequence and
    the values are gathered, which costs one number a token instead of a hidden state; its parameters then carry
    Megatron's ``sequence_parallel`` mark, by which their partial gradients are summed over the tensor ranks.

    Args:
        hidden_size: width of the hidden states.
        seed: of the first weights, which do not depend on rank or layout.
        std: standard deviation of the first weights; the bias starts at 0.
        sequence_parallel: whether the hidden states come as this rank's part of the sequence.
    """

    def __init__(self, hidden_size: int, *, seed: int, std: float, sequence_parallel: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator, dtype=torch.float64) * std
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.sequence_parallel = sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Values [s, b, 1] of hidden states [s, b, h] (or [s / tp, b, h]), in float32 or the finer type of the two."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = torch.nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # All tensor ranks compute the same loss: each keeps its part of the gradient, none is added up.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


@EngineRegistry.register(model_type="value_model", backend="megatron", device=DEVICE_NAMES)
class MegatronEngineWithValueHead(MegatronEngineWithLMHead):
    """A value model: its output is ``values``, jagged [B, j]; entry t is the value of the sequence up to token t.

    The backbone's weights come from ``model.path``; so does the head if the folder holds ``score.weight``, else it
    starts from ``megatron.seed``. Embedding and head share nothing, whatever the folder's configuration says.
    """

    def _build_modules(self, provider: Any) -> list[Any]:
        if self.model_config.mtp.enable:
            raise ValueError("critic.model.mtp.enable=True: a value model predicts no tokens; set it to False")
        provider.share_embeddings_and_output_weights = False
        self._head: ValueHead | None = None
        return super()._build_modules(provider)

    def _after_loading(self, models: list[Any]) -> None:
        config = models[0].config
        # Made while every parameter is one that the bridge knows; they hold the backbone's parameters themselves.
        tasks = [task for task in self.bridge.get_conversion_tasks(models) if task is not None]
        is_head = [task.global_param_name.endswith("output_layer.weight") for task in tasks]
        self._export_tasks = [task for task, skip in zip(tasks, is_head, strict=True) if not skip]
        self._lm_head_names = {task.mapping.hf_param for task, skip in zip(tasks, is_head, strict=True) if skip}
        stored = _read_head(self.model_config.path, config.hidden_size)
        for model in models:
            if not model.post_process:
                continue
            head = ValueHead(
                config.hidden_size,
                seed=self.engine_config.seed,
                std=config.init_method_std,
                sequence_parallel=config.sequence_parallel,
            )
            for name, tensor in stored.items():
                getattr(head, name).data.copy_(tensor)
            self._head = head.to(model.output_layer.weight.device, self.dtype)
            model.output_layer = self._head

    def prepare_model_outputs(
        self, logits: torch.Tensor, data: TensorDict, inputs: dict[str, Any], forward_only: bool
    ) -> dict[str, torch.Tensor]:
        """Values of whole sequences, jagged like ``input_ids``; gradients flow into this rank's part only."""
        from megatron.core import parallel_state as mpu

        gathered = gather_with_own_gradient(logits.flatten(), mpu.get_context_parallel_group())
        values = inputs["layout"].unpack(gathered)
        return {"values": torch.nested.nested_tensor_from_jagged(values, offsets=data["input_ids"].offsets())}

    def get_per_tensor_param(self, with_mtp: bool = False, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Stream hub-named weights: the backbone's, then ``score.weight`` and ``score.bias``."""
        backbone, _ = super().get_per_tensor_param(with_mtp=False)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield from backbone
            yield from self._head_weights()

        return stream(), None

    def _head_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from megatron.core import parallel_state as mpu

        shapes = {"weight": (1, self.tf_config.hidden_size), "bias": (1,)}
        device = next(self.module[0].parameters()).device
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=self.dtype, device=device)
            if self._head is not None:
                tensor.copy_(getattr(self._head, name).data)
            if mpu.get_pipeline_model_parallel_world_size() > 1:
                last, group = mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group()
                dist.broadcast(tensor, src=last, group=group)
            yield HEAD_NAMES[name], tensor

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face folder with the value head in the place of the vocabulary head. Collective.

        ``AutoModelForTokenClassification.from_pretrained(path, num_labels=1)`` reads it; so does this engine.
        """
        from verl.utils.checkpoint.hf_export import save_hf_folder

        save_hf_folder(
            self.get_per_tensor_param()[0],
            source=self.model_config.path,
            target=path,
            is_writer=dist.get_rank() == 0,
            removed=self._lm_head_names,
            added=set(HEAD_NAMES.values()),
        )


def _read_head(path: str, hidden_size: int) -> dict[str, torch.Tensor]:
    """The folder's own value head by parameter name; empty if it has none."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            names = set(content.keys())
            found |= {own: content.get_tensor(name) for own, name in HEAD_NAMES.items() if name in names}
    if found and ("weight" not in found or found["weight"].shape != (1, hidden_size)):
        shape = list(found["weight"].shape) if "weight" in found else None
        raise ValueError(
            f"critic.model.path={path}: score.weight is {shape}, and a value head needs [1, {hidden_size}]; use a "
            "model with one label, or one without a score head"
        )
    return found
