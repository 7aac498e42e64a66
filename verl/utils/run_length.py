# SPDX-License-Identifier: Apache-2.0
"""How many steps a run has, and whether its learning-rate schedule fits into them. Needs no torch."""

import math
import warnings
from typing import Any

__all__ = ["check_warmup", "lengths_of_schedules", "resolve_total_steps"]


def resolve_total_steps(steps_per_epoch: int, total_epochs: int, total_training_steps: int | None) -> int:
    """Number of optimisation rounds of a run.

    ``total_training_steps`` counts when it is given, whatever ``total_epochs`` says: if the steps do not fit into the
    epochs, more epochs are run and a warning says so.

    Raises:
        ValueError: nothing would be trained.
    """
    if total_training_steps is None:
        total = steps_per_epoch * total_epochs
        if total < 1:
            raise ValueError(f"trainer.total_epochs={total_epochs} trains nothing; use at least 1")
        return total
    if total_training_steps < 1:
        raise ValueError(f"trainer.total_training_steps={total_training_steps} trains nothing; use at least 1")
    needed = math.ceil(total_training_steps / steps_per_epoch)
    if needed > total_epochs:
        warnings.warn(
            f"trainer.total_training_steps={total_training_steps} needs {needed} epochs of {steps_per_epoch} steps: "
            f"running them, although trainer.total_epochs={total_epochs}",
            stacklevel=2,
        )
    return total_training_steps


def lengths_of_schedules(total_steps: int, critic_warmup: int, uses_critic: bool) -> dict[str, int]:
    """Updates that a PPO run's learning-rate schedules count, by the optimiser section's key.

    The actor's counts its own updates, and there is none while the critic warms up.
    """
    lengths = {"actor_rollout_ref.actor.optim": max(total_steps - critic_warmup, 1)}
    return lengths | ({"critic.optim": total_steps} if uses_critic else {})


def check_warmup(key: str, optim: Any, total_steps: int) -> None:
    """Whether the learning rate's warm-up ends before the run does.

    Args:
        key: of the optimiser section, for the message.
        optim: the section, with ``lr_warmup_steps``, ``lr_warmup_steps_ratio``, ``lr_decay_steps`` and
            ``lr_decay_style``.
        total_steps: of the run.

    Raises:
        ValueError: it does not, and the schedule has a decay that follows it.
    """
    length, steps = optim.lr_decay_steps or total_steps, optim.lr_warmup_steps
    if optim.lr_decay_style == "constant":
        return
    if steps is None or steps < 0:
        ratio = getattr(optim, "lr_warmup_steps_ratio", None) or 0.0
        if int(ratio * total_steps) >= length:
            raise ValueError(
                f"{key}.lr_warmup_steps_ratio={ratio} of {total_steps} steps is a warm-up of "
                f"{int(ratio * total_steps)}, which must be below the schedule's {length} steps; use less than "
                f"{length / total_steps:g}"
            )
    elif steps >= length:
        raise ValueError(
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} must be below the schedule's {length} steps; use at most "
            f"{length - 1}"
        )
