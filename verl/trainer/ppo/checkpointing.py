# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a PPO run: ``global_step_N/actor`` from the workers, ``global_step_N/data.pt`` from the controller."""

import os
from typing import Any

import torch

from verl.utils.checkpoint_folder import CheckpointFolder, step_of
from verl.utils.resumable_loader import ResumableLoader

CONTROLLER_FILE = "data.pt"
HF_FOLDER = "huggingface"


def save_checkpoint(
    folder: CheckpointFolder, step: int, actor_wg: Any, loader: ResumableLoader, kl_ctrl: Any, export_hf: bool
) -> str:
    """Write the checkpoint of ``step`` and return its folder.

    Args:
        folder: where the run keeps its checkpoints.
        step: number of finished training steps.
        actor_wg: worker group with ``save_checkpoint`` and ``export_hf``.
        loader: its position in the data is saved.
        kl_ctrl: controller with ``value``, the KL coefficient, or None.
        export_hf: also write the model in Hugging Face format, to ``actor/huggingface``.
    """

    def write(target: str) -> None:
        actor = os.path.join(target, "actor")
        actor_wg.save_checkpoint(actor, global_step=step)
        if export_hf:
            actor_wg.export_hf(os.path.join(actor, HF_FOLDER))
        state = {"step": step, "loader": loader.state_dict(), "kl_coef": None if kl_ctrl is None else kl_ctrl.value}
        torch.save(state, os.path.join(target, CONTROLLER_FILE))

    return folder.save(step, write)


def load_checkpoint(source: str, actor_wg: Any, loader: ResumableLoader, kl_ctrl: Any) -> int:
    """Take up the run from the checkpoint folder ``source``; returns the number of finished training steps.

    Raises:
        ValueError: a part is missing, or the run's data are not those of the checkpoint.
    """
    step = step_of(source)
    path = os.path.join(source, CONTROLLER_FILE)
    if not os.path.exists(path):
        raise ValueError(f"{source} is no complete checkpoint: {CONTROLLER_FILE} is missing")
    state = torch.load(path, weights_only=True)
    loader.load_state_dict(state["loader"])
    if kl_ctrl is not None and state["kl_coef"] is not None:
        kl_ctrl.value = state["kl_coef"]
    actor_wg.load_checkpoint(os.path.join(source, "actor"))
    return step
