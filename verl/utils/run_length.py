# SPDX-License-Identifier: Apache-2.0
"""How many steps a run has, and whether its learning-rate schedule fits into them. Needs no torch."""

import math
import warnings
from typing import Any

__all__ = ["check_warmup", "resolve_total_steps"]


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


def check_warmup(key: str, optim: Any, total_steps: int) -> None:
    """Whether the learning rate's warm-up ends before the run does.

    Args:
        key: of the optimiser section, for the message.
        optim: the section, with ``lr_warmup_steps``, ``lr_decay_steps`` and ``lr_decay_style``.
        total_steps: of the run.

    Raises:
        ValueError: it does not, and the schedule has a decay that follows it.
    """
    length = optim.lr_decay_steps or total_steps
    if optim.lr_decay_style != "constant" and optim.lr_warmup_steps >= length:
        raise ValueError(
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} must be below the schedule's {length} steps; use at most "
            f"{length - 1}"
        )
