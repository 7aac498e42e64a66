# SPDX-License-Identifier: Apache-2.0
"""What runs inside a worker process: a training engine behind calls that a controller can make."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric, merge_metrics, reduce_metrics
from verl.utils.quiet import quiet_imports
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry, LossFunction
from verl.workers.rollout import get_rollout_class
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import check_same_rows, no_padding_2_padding

__all__ = ["ActorRolloutRefWorker", "TrainingWorker"]

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")


def _import_engines() -> None:
    """Fill the registry; the engines' dependencies are loaded only in processes that train."""
    with quiet_imports():
        import verl.workers.engine.megatron.transformer_impl  # noqa: F401
        import verl.workers.engine.megatron.value_head  # noqa: F401


class TrainingWorker(Worker):
    """One model with its optimizer on one rank.

    Runs in a Ray worker group, where the controller calls the registered methods, or in any process of a distributed
    run, where every rank calls them together.

    Args:
        config: what to build; ``optimizer_config=None`` gives a model that is only evaluated.
    """

    def __init__(self, config: TrainingWorkerConfig) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        self.init_distributed()
        _import_engines()
        self.config = config
        self.loss_fn: LossFunction | None = None
        # The model section decides how its batches are laid out, whatever the engine section says.
        config.engine_config.use_remove_padding = config.model_config.use_remove_padding
        config.engine_config.use_fused_kernels = config.model_config.use_fused_kernels
        self.engine: BaseEngine = EngineRegistry.new(
            config.model_type,
            config.engine_config.strategy,
            model_config=config.model_config,
            engine_config=config.engine_config,
            optimizer_config=config.optimizer_config,
            checkpoint_config=config.checkpoint_config,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build the model and the optimizer, with the weights of ``model.path``."""
        self.engine.initialize()
        self._register_dispatch_collect_info(
            "train", self.engine.get_data_parallel_rank(), self.engine.is_mp_src_rank_with_outputs()
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFunction) -> None:
        """The loss that training and evaluation use; see :class:`BaseEngine` for its contract."""
        self.loss_fn = loss_fn

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts of the engine's state to ``"cpu"`` or to the ``"device"``."""
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """Several optimiser steps over one batch.

        Reads from ``data``: ``mini_batch_size`` (rows of a step over all data-parallel ranks; the whole batch if
        absent), ``epochs``, ``seed``, ``dataloader_kwargs``. The learning rate advances once, after the last step.

        Returns:
            a TensorDict whose ``metrics`` are those of all steps together; ``grad_norm`` is their mean. Steps without a
            loss token change nothing and count in ``skipped_steps`` only; if all are such, the learning rate stays.
        """
        rows = data.batch_size[0]
        whole = tu.get_non_tensor_data(data, "mini_batch_size", None)
        mini_batches = tu.make_iterator(
            data,
            rows if whole is None else whole // self.engine.get_data_parallel_size(),
            tu.get_non_tensor_data(data, "epochs", 1),
            tu.get_non_tensor_data(data, "seed", None),
            tu.get_non_tensor_data(data, "dataloader_kwargs", None),
        )
        return self._train(mini_batches)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def train_batch(self, data: TensorDict) -> TensorDict:
        """One optimiser step over the whole batch; see :meth:`train_mini_batch`. The learning rate stays also if
        ``update_lr_scheduler`` in ``data`` is False.
        """
        return self._train([data], tu.get_non_tensor_data(data, "update_lr_scheduler", True))

    def _train(self, batches: Iterable[TensorDict], update_lr_scheduler: bool = True) -> TensorDict:
        if self.loss_fn is None:
            raise ValueError("no loss function: call set_loss_fn before training")
        steps, skipped = [], 0
        with _timed() as seconds, self.engine.train_mode():
            for batch in batches:
                outputs = self.engine.train_batch(batch, self.loss_fn)
                if outputs["grad_norm"] is None:
                    skipped += 1
                else:
                    steps.append(outputs["metrics"] | {"grad_norm": Metric.mean(outputs["grad_norm"], 1)})
            learning_rate = self.engine.current_lr
            if update_lr_scheduler and steps:
                self.engine.lr_scheduler_step()
        metrics = _mean_over_steps(steps) | ({"skipped_steps": float(skipped)} if skipped else {})
        return _as_output(metrics | {"lr": learning_rate, "worker_seconds": seconds()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def infer_batch(self, data: TensorDict) -> TensorDict:
        """Evaluate a batch without a graph.

        Returns:
            a TensorDict with jagged [B, j] ``log_probs`` and, if ``calculate_entropy``, ``entropy``; and ``metrics``,
            which hold the loss's too if ``compute_loss`` is set in ``data`` (default False). Ranks of earlier pipeline
            stages have no outputs.
        """
        loss_fn = self.loss_fn if tu.get_non_tensor_data(data, "compute_loss", False) else None
        with _timed() as seconds, self.engine.eval_mode():
            outputs = self.engine.infer_batch(data, loss_fn)
        result = TensorDict(outputs["model_output"], batch_size=[data.batch_size[0]])
        metrics = reduce_metrics(outputs["metrics"]) | {"worker_seconds": seconds()}
        return tu.assign_non_tensor_data(result, "metrics", metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write a checkpoint below ``local_path``; which ones are kept is the caller's business.

        Raises:
            ValueError: for an ``hdfs_path``, which is not supported.
        """
        if hdfs_path is not None:
            raise ValueError(f"hdfs_path={hdfs_path}: remote checkpoints are not supported; use a mounted folder")
        self.engine.save_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read what :meth:`save_checkpoint` wrote."""
        self.engine.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads."""
        self.engine.export_hf(path)


class ActorRolloutRefWorker(Worker):
    """Actor, rollout and reference policy on the same rank.

    Args:
        config: the ``actor_rollout_ref`` tree.
        role: which of them live here: one of ``actor, rollout, ref, actor_rollout, actor_rollout_ref``.
    """

    actor_worker_cls = TrainingWorker
    ref_worker_cls = TrainingWorker

    def __init__(self, config: DictConfig, role: str) -> None:
        if role not in ROLES:
            raise ValueError(f"role={role!r} is not one of {', '.join(ROLES)}")
        self.config = config
        self.role = role
        self.actor: TrainingWorker | None = None
        self.ref: TrainingWorker | None = None
        self.rollout: Any = None
        self._rollout_gives_way = False
        self.init_distributed(timeout_s=config.nccl_timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build what the role asks for, with the weights of ``model.path``."""
        model_config = omega_conf_to_dataclass(self.config.model)
        if "actor" in self.role:
            actor_config = omega_conf_to_dataclass(self.config.actor)
            self.actor = self._build("actor", self.actor_worker_cls, model_config, actor_config, actor_config.optim)
            self.actor.set_loss_fn(partial(ppo_loss, config=actor_config))
        if "ref" in self.role:
            ref_config = omega_conf_to_dataclass(self.config.ref)
            self.ref = self._build("ref", self.ref_worker_cls, model_config, ref_config, None)
        if "rollout" in self.role:
            rollout_config = omega_conf_to_dataclass(self.config.rollout)
            rollout_cls = get_rollout_class(rollout_config.name, rollout_config.mode)
            self.rollout = rollout_cls(rollout_config, model_config)
            self._register_dispatch_collect_info("rollout", self.rank, True)
            self._rollout_gives_way = rollout_config.free_cache_engine and self.role != "rollout"
            if self._rollout_gives_way:
                self.rollout.release()

    def _build(self, name: str, worker_cls: type, model_config: Any, section: Any, optimizer: Any) -> TrainingWorker:
        worker = worker_cls(
            TrainingWorkerConfig(
                model_config=model_config,
                engine_config=section.megatron,
                optimizer_config=optimizer,
                checkpoint_config=getattr(section, "checkpoint", None),
            )
        )
        worker.reset()
        engine = worker.engine
        self._register_dispatch_collect_info(
            name, engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs()
        )
        return worker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample a response for every row; every rank samples its share. See :class:`BaseRollout`.

        With ``rollout.free_cache_engine`` the rollout is on the device only meanwhile, unless nothing else lives here.
        """
        with _timed() as seconds:
            if self._rollout_gives_way:
                self.rollout.resume()
            output = self.rollout.generate_sequences(prompts)
            if self._rollout_gives_way:
                self.rollout.release()
        output.meta_info["timing"] = {"generate_sequences": seconds()}
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Log-probs of the responses under the actor: ``old_log_probs`` [B, R], and, if asked for, ``entropys`` and
        ``sum_pi_squared``."""
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return _response_columns(self.actor, data, names)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Log-probs of the responses under the reference policy: ``ref_log_prob`` [B, R]."""
        return _response_columns(self.ref, data, {"log_probs": "ref_log_prob"})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        """Optimiser steps of the policy loss; see :meth:`TrainingWorker.train_mini_batch`. Metrics get ``actor/``."""
        output = self.actor.train_mini_batch(data)
        metrics = tu.get_non_tensor_data(output, "metrics", {})
        named = {k if "/" in k or k == "worker_seconds" else f"actor/{k}": v for k, v in metrics.items()}
        return tu.assign_non_tensor_data(output, "metrics", named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, global_steps: int | None = None) -> float:
        """Copy the actor's weights into the rollout, tensor by tensor; returns the seconds it took."""
        with _timed() as seconds, torch.no_grad():
            weights, _ = self.actor.engine.get_per_tensor_param(with_mtp=False)
            self.rollout.update_weights(weights, global_steps=global_steps)
        return seconds()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write the actor's checkpoint."""
        self.actor.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the actor's checkpoint."""
        self.actor.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the actor as a Hugging Face folder."""
        self.actor.export_hf(path)


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    start = perf_counter()
    yield lambda: perf_counter() - start


def _mean_over_steps(steps: list[dict[str, Metric]]) -> dict[str, float]:
    """Metrics of several optimiser steps: sums (losses) become means over the steps, the rest merge as they are."""
    merged = reduce_metrics(merge_metrics(steps))
    return {k: v / len(steps) if steps[0][k].how == "sum" else v for k, v in merged.items()}


def _as_output(metrics: dict[str, float]) -> TensorDict:
    return tu.assign_non_tensor_data(TensorDict({}, batch_size=[0]), "metrics", metrics)


def _response_columns(worker: TrainingWorker, data: TensorDict, names: dict[str, str]) -> TensorDict | None:
    """Evaluate ``data`` and cut the outputs ``names`` (output -> column) to the responses, [B, R] on the host; None on
    ranks without outputs."""
    with _timed() as seconds:
        output = worker.infer_batch(data)
        # The batch is on the host, so the outputs come there before they are cut.
        jagged = {target: output[source].cpu() for source, target in names.items() if source in output.keys()}
        for column in jagged.values():
            check_same_rows(column, data)
        columns = {target: no_padding_2_padding(column, data) for target, column in jagged.items()}
    if not columns:
        return None
    result = TensorDict(columns, batch_size=[data.batch_size[0]])
    metrics = tu.get_non_tensor_data(output, "metrics", {}) | {"worker_seconds": seconds()}
    return tu.assign_non_tensor_data(result, "metrics", metrics)
