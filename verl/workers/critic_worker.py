# SPDX-License-Identifier: Apache-2.0
"""The critic inside a worker process: values of responses, and updates of the value model."""

from functools import partial

from omegaconf import DictConfig
from tensordict import TensorDict

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker, _response_columns
from verl.workers.utils.losses import value_loss

__all__ = ["CriticWorker"]


class CriticWorker(Worker):
    """A value model with its own optimizer on one rank.

    It may share its process with an :class:`ActorRolloutRefWorker`; the two then have the same parallel layout.

    Args:
        config: the ``critic`` tree.
        nccl_timeout: seconds a collective may wait for the other ranks, if this is the first worker of the process.
    """

    critic_worker_cls = TrainingWorker

    def __init__(self, config: DictConfig, nccl_timeout: int = 600) -> None:
        self.config = config
        self.critic: TrainingWorker | None = None
        self.init_distributed(timeout_s=nccl_timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the value model with the weights of ``critic.model.path``, and its optimizer."""
        config = omega_conf_to_dataclass(self.config)
        self.critic = self.critic_worker_cls(
            TrainingWorkerConfig(
                model_type="value_model",
                model_config=config.model,
                engine_config=config.megatron,
                optimizer_config=config.optim,
                checkpoint_config=config.checkpoint,
            )
        )
        self.critic.reset()
        self.critic.set_loss_fn(partial(value_loss, config=config))
        engine = self.critic.engine
        self._register_dispatch_collect_info(
            "critic", engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs()
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def compute_values(self, data: TensorDict) -> TensorDict | None:
        """Values of the states in which the response tokens were chosen: ``values`` [B, R], 0 after each response."""
        return _response_columns(self.critic, data, {"values": "values"})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def update_critic(self, data: TensorDict) -> TensorDict:
        """Optimiser steps of the value loss; see :meth:`TrainingWorker.train_mini_batch`. Metrics get ``critic/``."""
        output = self.critic.train_mini_batch(data)
        metrics = tu.get_non_tensor_data(output, "metrics", {})
        named = {k if "/" in k or k == "worker_seconds" else f"critic/{k}": v for k, v in metrics.items()}
        return tu.assign_non_tensor_data(output, "metrics", named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write the critic's checkpoint."""
        self.critic.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Read the critic's checkpoint."""
        self.critic.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the critic as a Hugging Face folder with a ``score`` head."""
        self.critic.export_hf(path)
