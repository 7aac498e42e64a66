# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a PPO run: ``global_step_N/actor`` and ``critic`` from the workers, ``global_step_N/data.pt`` from
the controller.
"""

import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from verl.utils.checkpoint_folder import CheckpointFolder, step_of
from verl.utils.resumable_loader import ResumableLoader

CONTROLLER_FILE = "data.pt"
HF_FOLDER = "huggingface"


@dataclass(frozen=True)
class CriticPart:
    """The critic's side of a checkpoint.

    Attributes:
        group: worker group with ``save_checkpoint``, ``load_checkpoint`` and ``export_hf``.
        export_hf: also write ``critic/huggingface``.
        max_to_keep: critics kept; older checkpoints then hold the actor only. None keeps all.
    """

    group: Any
    export_hf: bool = False
    max_to_keep: int | None = None


def save_checkpoint(
    folder: CheckpointFolder,
    step: int,
    actor_wg: Any,
    loader: ResumableLoader,
    kl_ctrl: Any,
    export_hf: bool,
    critic: CriticPart | None = None,
) -> str:
    """Write the checkpoint of ``step`` and return its folder.

    Args:
        folder: where the run keeps its checkpoints.
        step: number of finished training steps.
        actor_wg: worker group with ``save_checkpoint`` and ``export_hf``.
        loader: its position in the data is saved.
        kl_ctrl: controller with ``value``, the KL coefficient, or None.
        export_hf: also write the model in Hugging Face format, to ``actor/huggingface``.
        critic: None without one.
    """

    def write(target: str) -> None:
        actor = os.path.join(target, "actor")
        actor_wg.save_checkpoint(actor, global_step=step)
        if export_hf:
            actor_wg.export_hf(os.path.join(actor, HF_FOLDER))
        if critic is not None:
            target_of_critic = os.path.join(target, "critic")
            critic.group.save_checkpoint(target_of_critic, global_step=step)
            if critic.export_hf:
                critic.group.export_hf(os.path.join(target_of_critic, HF_FOLDER))
        state = {"step": step, "loader": loader.state_dict(), "kl_coef": None if kl_ctrl is None else kl_ctrl.value}
        torch.save(state, os.path.join(target, CONTROLLER_FILE))

    path = folder.save(step, write)
    if critic is not None and critic.max_to_keep is not None and critic.max_to_keep > 0:
        for old in [known for known in folder.steps() if known <= step][: -critic.max_to_keep]:
            shutil.rmtree(os.path.join(folder.path(old), "critic"), ignore_errors=True)
    return path


def load_checkpoint(source: str, actor_wg: Any, loader: ResumableLoader, kl_ctrl: Any, critic_wg: Any = None) -> int:
    """Take up the run from the checkpoint folder ``source``; returns the number of finished training steps.

    Raises:
        ValueError: a part is missing, or the run's data are not those of the checkpoint.
    """
    step = step_of(source)
    path = os.path.join(source, CONTROLLER_FILE)
    if not os.path.exists(path):
        raise ValueError(f"{source} is no complete checkpoint: {CONTROLLER_FILE} is missing")
    state = torch.load(path, weights_only=True)
    if critic_wg is not None and not os.path.isdir(os.path.join(source, "critic")):
        raise ValueError(
            f"{source} holds no critic, and this run has one; resume from a later step, or set critic.enable=False"
        )
    loader.load_state_dict(state["loader"])
    if kl_ctrl is not None and state["kl_coef"] is not None:
        kl_ctrl.value = state["kl_coef"]
    actor_wg.load_checkpoint(os.path.join(source, "actor"))
    if critic_wg is not None:
        critic_wg.load_checkpoint(os.path.join(source, "critic"))
    return step
