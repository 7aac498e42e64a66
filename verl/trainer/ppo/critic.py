# SPDX-License-Identifier: Apache-2.0
"""The controller's calls to the critic: values of a batch, and the critic's update."""

from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict

import verl.utils.tensordict_utils as tu
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import PhaseTimer, worker_report


def compute_values(critic_wg: Any, critic: DictConfig, batch: DataProto, data: TensorDict, timer: PhaseTimer) -> None:
    """Write ``values`` [B, R] into ``batch``: what the critic expects where each response token was chosen.

    Args:
        critic_wg: worker group with ``compute_values``.
        critic: the ``critic`` section.
        batch: the controller's batch.
        data: its columns for the model, without padding.
        timer: gets the phase ``values``.
    """
    data = data.copy()
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=critic.use_dynamic_bsz,
        max_token_len_per_gpu=critic.ppo_infer_max_token_len_per_gpu,
        micro_batch_size_per_gpu=critic.ppo_micro_batch_size_per_gpu,
    )
    with timer.worker_call("values") as seconds:
        output = critic_wg.compute_values(data)
        seconds += worker_report(output)[1]
    batch.batch["values"] = output["values"]


def update_critic(
    critic_wg: Any, critic: DictConfig, batch: DataProto, data: TensorDict, mini_batch_rows: int, timer: PhaseTimer
) -> dict[str, float]:
    """Train the critic on the batch's ``returns``, near its ``values``; returns the workers' metrics.

    Args:
        critic_wg: worker group with ``update_critic``.
        critic: the ``critic`` section.
        batch: the controller's batch.
        data: its columns for the model, without padding.
        mini_batch_rows: responses of one optimiser step over all data-parallel ranks.
        timer: gets the phase ``update_critic``.
    """
    data = data.copy()
    for key in ("values", "returns"):
        data[key] = batch.batch[key]
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=critic.use_dynamic_bsz,
        max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu,
        micro_batch_size_per_gpu=critic.ppo_micro_batch_size_per_gpu,
        mini_batch_size=mini_batch_rows,
        epochs=critic.ppo_epochs,
        seed=critic.data_loader_seed,
        dataloader_kwargs={"shuffle": critic.shuffle},
    )
    with timer.worker_call("update_critic") as seconds:
        metrics, reported = worker_report(critic_wg.update_critic(data))
        seconds += reported
    return metrics
