# SPDX-License-Identifier: Apache-2.0
"""Config of megatron-core's optimizer and learning-rate schedule."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config.names import (
    LR_DECAY_STYLES,
    OPTIMIZERS,
    WEIGHT_DECAY_STYLES,
    WSD_DECAY_STYLES,
    name_problems,
)


@dataclass
class McoreOptimizerConfig(BaseConfig):
    """Optimizer and schedule.

    ``lr_warmup_steps`` counts optimizer steps; -1 or None means ``lr_warmup_steps_ratio * total_training_steps``.
    ``lr_decay_steps`` None means the whole run. ``total_training_steps`` is -1 until the trainer knows it.
    ``override_optimizer_config`` goes to megatron-core's ``OptimizerConfig`` as it is.

    Raises ``ValueError`` for an unknown style or a value out of range.
    """

    _mutable_fields = frozenset({"total_training_steps", "lr_warmup_steps", "lr_decay_steps"})

    optimizer: str = "adam"
    lr: float = 1e-3
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    total_training_steps: int = -1
    lr_warmup_steps: int | None = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_warmup_init: float = 0.0
    lr_decay_steps: int | None = None
    lr_decay_style: str = "constant"
    weight_decay_incr_style: str = "constant"
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_steps: int | None = None
    use_checkpoint_opt_param_scheduler: bool = False
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)

    def _problems(self) -> list[str]:
        problems = name_problems("optimizer", self.optimizer, OPTIMIZERS)
        problems += name_problems("lr_decay_style", self.lr_decay_style, LR_DECAY_STYLES)
        problems += name_problems("weight_decay_incr_style", self.weight_decay_incr_style, WEIGHT_DECAY_STYLES)
        problems += name_problems("lr_wsd_decay_style", self.lr_wsd_decay_style, WSD_DECAY_STYLES)
        if not 0 <= self.lr < float("inf"):
            problems.append(f"lr={self.lr} must be a number that is not negative, for example 1e-6")
        elif not 0 <= self.min_lr <= self.lr:
            problems.append(f"min_lr={self.min_lr} must lie between 0 and lr={self.lr}")
        if not 0 <= self.lr_warmup_steps_ratio <= 1:
            problems.append(f"lr_warmup_steps_ratio={self.lr_warmup_steps_ratio} must lie between 0 and 1")
        if len(self.betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            problems.append(f"betas={list(self.betas)} must be two numbers in [0, 1), for example [0.9, 0.999]")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_steps is None:
            problems.append("lr_decay_style='WSD' needs lr_wsd_decay_steps, the length of its last phase in steps")
        return problems
