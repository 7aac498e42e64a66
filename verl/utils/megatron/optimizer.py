# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer and learning-rate schedule from our configuration."""

import logging
import math
from typing import Any

import torch

from verl.utils.config import did_you_mean

__all__ = ["build_lr_scheduler", "build_optimizer", "step_if_finite"]

logger = logging.getLogger(__name__)


def build_optimizer(config: Any, modules: list[Any], dtype: torch.dtype, use_distributed_optimizer: bool) -> Any:
    """A ``MegatronOptimizer`` over DDP-wrapped model chunks.

    Args:
        config: ``McoreOptimizerConfig``; its ``override_optimizer_config`` sets any field of Megatron's own.
        modules: this rank's model chunks.
        dtype: of the parameters.
        use_distributed_optimizer: shard the optimizer's state over the data-parallel ranks.

    Raises:
        ValueError: for an unknown field in ``override_optimizer_config``.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    beta1, beta2 = config.betas
    settings = {
        "optimizer": config.optimizer,
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "clip_grad": config.clip_grad,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": use_distributed_optimizer,
    }
    fields = OptimizerConfig.__dataclass_fields__
    for name, value in dict(config.override_optimizer_config or {}).items():
        if name not in fields:
            hint = did_you_mean(name, fields)
            raise ValueError(f"override_optimizer_config.{name}: Megatron's OptimizerConfig has no such field.{hint}")
        settings[name] = value
    return get_megatron_optimizer(OptimizerConfig(**settings), modules, use_gloo_process_groups=False)


def step_if_finite(optimizer: Any) -> float:
    """Clip and apply the gradients; returns their norm before clipping. Collective.

    A norm that is not finite applies nothing. Megatron's own ``step`` clips by such a norm and goes on, so what it does
    is done here, with the norm looked at in between; its groups of parameters with a norm of their own need
    ``mtp_detach_heads``, which is refused.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    norm = math.inf if optimizer.prepare_grads() else float(optimizer.get_grad_norm())
    if not math.isfinite(norm) or norm > optimizer.config.grad_norm_skip_threshold:
        logger.warning("gradient norm is %s: this step changes nothing", norm)
        return norm
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    return norm


def build_lr_scheduler(config: Any, optimizer: Any) -> Any:
    """Megatron's ``OptimizerParamScheduler``: warm-up, then the configured decay, counted in training steps: calls of
    the worker, however many mini-batches each of them cuts.

    Raises:
        ValueError: when the decay or the warm-up depends on a number of steps that is not known, or the warm-up is not
            shorter than the whole schedule.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup is None or warmup < 0:
        if config.lr_warmup_steps_ratio and total <= 0:
            raise ValueError(
                f"optim.lr_warmup_steps_ratio={config.lr_warmup_steps_ratio} needs optim.total_training_steps; "
                "set it, or set optim.lr_warmup_steps"
            )
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    decay = config.lr_decay_steps or total
    if config.lr_decay_style == "constant":
        decay = max(decay, warmup + 1)
    elif decay <= 0:
        raise ValueError(
            f"optim.lr_decay_style={config.lr_decay_style} needs a length: set optim.total_training_steps or "
            "optim.lr_decay_steps"
        )
    if warmup >= decay:
        raise ValueError(f"optim.lr_warmup_steps={warmup} must be below the schedule's {decay} steps")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=max(decay, 1),
        wd_incr_style=config.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=not config.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=config.lr_wsd_decay_steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
