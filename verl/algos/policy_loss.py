# SPDX-License-Identifier: Apache-2.0
"""Policy losses, by name (``actor.policy_loss.loss_mode``).

A policy loss is called with keywords ``old_log_prob``, ``log_prob``, ``advantages``, ``response_mask`` (all [B, R]),
``loss_agg_mode``, ``config`` (the actor's), ``rollout_is_weights`` ([B, R] or None) and the keywords of `agg_loss` that
describe the whole optimiser step, which it hands on to `agg_loss`. It returns ``(0-d loss, dict of Metric)``.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.aggregation import agg_loss, select
from verl.algos.registry import Registry
from verl.utils.metric import Metric

__all__ = ["POLICY_LOSS_REGISTRY", "compute_policy_loss_vanilla", "get_policy_loss_fn", "register_policy_loss"]

POLICY_LOSS_REGISTRY = Registry("policy loss", "actor.policy_loss.loss_mode")
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss_fn = POLICY_LOSS_REGISTRY.get

_MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: beyond it the ratio says nothing and could overflow


def _clip_range(config: Any) -> tuple[float, float, float | None]:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    dual = config.clip_ratio_c
    if dual is not None and dual <= 1.0:
        raise ValueError(f"actor.clip_ratio_c={dual} must be above 1 (3.0 is usual), or null for no lower bound")
    return low, high, dual


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The clipped surrogate of PPO, with a lower bound for negative advantages.

    With ratio q = exp(log_prob - old_log_prob), the difference clamped to +-20, a token's loss is
    max(-A q, -A clip(q, 1 - low, 1 + high)) (arXiv 1707.06347); for A < 0 it is at most -A c, the dual clip of
    arXiv 1912.09729. Unequal low and high are the clip-higher of DAPO (arXiv 2503.14476).

    Args:
        old_log_prob: [B, R] log-probabilities under the policy before the update, in nats.
        log_prob: [B, R] under the policy being trained; carries the gradient.
        advantages: [B, R].
        response_mask: [B, R]; what the other tensors hold where it is 0 changes neither value nor gradient.
        loss_agg_mode: see `agg_loss`.
        config: has clip_ratio, clip_ratio_low, clip_ratio_high (None: clip_ratio) and clip_ratio_c (None: no bound).
        rollout_is_weights: [B, R] factors on each token's loss, or None.
        **global_counts: the keywords of `agg_loss` about the whole step.

    Returns:
        (0-d loss times dp_size, metrics): the fraction of tokens whose loss was clipped (``actor/pg_clipfrac``), of
        those held by the dual clip (``actor/pg_clipfrac_lower``), and the mean of old_log_prob - log_prob
        (``actor/ppo_kl``).

    Raises:
        ValueError: clip_ratio_c not above 1, or what `agg_loss` refuses.
    """
    low, high, dual = _clip_range(config)
    # Masked positions are zeroed before exp: a NaN there would come back through the gradient of exp as 0 * NaN.
    advantages = select(advantages, response_mask)
    log_ratio = select(log_prob, response_mask) - select(old_log_prob, response_mask)
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    is_bounded = torch.zeros_like(is_clipped)
    if dual is not None:
        bound = -advantages * dual
        is_bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(is_bounded, bound, losses)
    if rollout_is_weights is not None:
        losses = losses * select(rollout_is_weights, response_mask)

    num_tokens = (response_mask != 0).sum()
    metrics = {
        "actor/pg_clipfrac": Metric.mean(is_clipped.sum(), num_tokens),
        "actor/pg_clipfrac_lower": Metric.mean(is_bounded.sum(), num_tokens),
        "actor/ppo_kl": Metric.mean(-log_ratio.sum(), num_tokens),
    }
    return agg_loss(losses, response_mask, loss_agg_mode, **global_counts), metrics
