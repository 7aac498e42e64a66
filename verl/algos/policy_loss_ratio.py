# SPDX-License-Identifier: Apache-2.0
"""Policy losses that bound the ratio of probabilities, new to old.

The ratio is that of a token (vanilla, sapo, cispo, dppo_tv, dppo_kl) or of a sequence (gspo, geo_mean). The
keywords of all of them are those of `compute_policy_loss_vanilla`.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.aggregation import agg_loss, select
from verl.algos.policy_loss_base import TokenBatch, clip_range, register_policy_loss
from verl.utils.metric import Metric

__all__ = [
    "compute_policy_loss_cispo",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gspo",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
]

_MAX_LOG_SEQUENCE_RATIO = 10.0
_SEQUENCE_MEAN = "seq-mean-token-mean"
_Loss = tuple[torch.Tensor, dict[str, Metric]]


def _dual_clip(config: Any) -> float | None:
    dual: float | None = config.clip_ratio_c
    if dual is not None and dual <= 1.0:
        raise ValueError(f"actor.clip_ratio_c={dual} must be above 1 (3.0 is usual), or null for no lower bound")
    return dual


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
) -> _Loss:
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
    low, high = clip_range(config)
    dual = _dual_clip(config)
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    ratio = tokens.log_ratio().exp()

    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses = torch.maximum(unclipped, clipped)
    is_bounded = torch.zeros_like(losses, dtype=torch.bool)
    if dual is not None:
        bound = -tokens.advantages * dual
        is_bounded = (tokens.advantages < 0) & (losses > bound)
        losses = torch.where(is_bounded, bound, losses)
    metrics = {
        "actor/pg_clipfrac": tokens.mean(clipped > unclipped),
        "actor/pg_clipfrac_lower": tokens.mean(is_bounded),
    }
    return tokens.reduce(losses, loss_agg_mode, global_counts), metrics | tokens.ppo_kl()


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = _SEQUENCE_MEAN,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """PPO's clipped surrogate on the ratio of whole sequences: GSPO (arXiv 2507.18071).

    The ratio of every token of a sequence has the value s = exp(mean of log_prob - old_log_prob over the sequence's
    trained tokens), its exponent at most 10, and the gradient s * d log_prob of that token (GSPO-token). The
    aggregation is part of the method: always seq-mean-token-mean, whatever `loss_agg_mode` says.
    """
    low, high = clip_range(config)
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    num_tokens = (response_mask != 0).sum(-1, keepdim=True).clamp(min=1)
    sequence = (tokens.log_prob - tokens.old_log_prob).detach().sum(-1, keepdim=True) / num_tokens
    carrier = tokens.log_prob - tokens.log_prob.detach()
    ratio = (sequence + carrier).clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high)
    metrics = {"actor/pg_clipfrac": tokens.mean(clipped > unclipped)} | tokens.ppo_kl()
    return tokens.reduce(torch.maximum(unclipped, clipped), _SEQUENCE_MEAN, global_counts), metrics


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = _SEQUENCE_MEAN,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """A smooth gate in place of the clip: -A (4 / tau) sigmoid(tau (q - 1)), SAPO (arXiv 2511.20347).

    tau is ``actor.tau_pos`` for A > 0 and ``actor.tau_neg`` otherwise. The aggregation is part of the method: always
    seq-mean-token-mean, whatever `loss_agg_mode` says.
    """
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    ratio = tokens.log_ratio().exp()
    tau = torch.where(tokens.advantages > 0, ratio.new_tensor(config.tau_pos), ratio.new_tensor(config.tau_neg))
    losses = -tokens.advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    return tokens.reduce(losses, _SEQUENCE_MEAN, global_counts), tokens.ppo_kl()


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """The geometric mean of the ratios of a sequence, GMPO (arXiv 2507.20673).

    A sequence's loss is -mean(A) * exp(mean of the clipped log-ratios), means over its trained tokens. The log-ratio is
    clipped to [-low, high] on the side where clipping is pessimistic. The loss is the mean over the sequences of the
    whole step, whatever `loss_agg_mode` says. Importance weights enter by their geometric mean.
    """
    low, high = clip_range(config)
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    log_ratio, sign = tokens.log_ratio(), tokens.advantages.sign()
    bounded = log_ratio.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    num_tokens = (response_mask != 0).sum(-1)
    at_least_one = num_tokens.clamp(min=1)
    ratio = (pessimistic.sum(-1) / at_least_one).exp()
    losses = -tokens.advantages.sum(-1) / at_least_one * ratio
    if tokens.weights is not None:
        log_weights = select(tokens.weights.clamp(min=1e-10).log(), response_mask)
        losses = losses * (log_weights.sum(-1) / at_least_one).exp()
    metrics = {"actor/pg_clipfrac": tokens.mean(sign * log_ratio > sign * bounded)} | tokens.ppo_kl()
    # One entry for each sequence, so that the sum over entries is the sum over sequences.
    return agg_loss(losses[:, None], num_tokens[:, None], "seq-mean-token-sum", **global_counts), metrics


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """-A clip(q, 1 - low, 1 + high) log_prob with the clipped ratio held constant: CISPO (arXiv 2506.13585).

    Unlike under PPO's clip every token keeps a gradient.
    """
    low, high = clip_range(config)
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    ratio = tokens.log_ratio().exp().detach()
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    metrics = {"actor/pg_clipfrac": tokens.mean(bounded != ratio)} | tokens.ppo_kl()
    return tokens.reduce(-bounded * tokens.advantages * tokens.log_prob, loss_agg_mode, global_counts), metrics


def _dppo(tokens: TokenBatch, is_near: torch.Tensor, config: Any, loss_agg_mode: str, counts: dict) -> _Loss:
    ratio = tokens.log_ratio().exp().detach()
    dual = _dual_clip(config)
    weight = torch.where(is_near, ratio if dual is None else ratio.clamp(max=dual), 0.0)
    metrics = {"actor/pg_clipfrac": tokens.mean(~is_near)} | tokens.ppo_kl()
    return tokens.reduce(-weight * tokens.advantages * tokens.log_prob, loss_agg_mode, counts), metrics


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """-A min(q, c) log_prob, the ratio held constant, for tokens near the old policy: DPPO (arXiv 2602.04879).

    Near is measured in total variation of "this token or another": p - p_old at most clip_ratio_high for A > 0, and at
    least -clip_ratio_low otherwise. c is clip_ratio_c.
    """
    low, high = clip_range(config)
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    moved = (tokens.log_prob.exp() - tokens.old_log_prob.exp()).detach()
    is_near = torch.where(tokens.advantages > 0, moved <= high, moved >= -low)
    return _dppo(tokens, is_near, config, loss_agg_mode, global_counts)


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """As dppo_tv, with nearness measured by KL(old || new) of "this token or another" (arXiv 2602.04879).

    A token is dropped when it has moved in the direction its advantage pushes it and the divergence exceeds
    clip_ratio_high (A > 0) or clip_ratio_low (otherwise).
    """
    low, high = clip_range(config)
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    new, old = tokens.log_prob.detach(), tokens.old_log_prob
    others_new, others_old = ((-torch.expm1(x)).clamp(min=1e-8) for x in (new, old))
    divergence = old.exp() * (old - new) + others_old * (others_old / others_new).log()
    is_near = torch.where(
        tokens.advantages > 0, (divergence <= high) | (new <= old), (divergence <= low) | (new >= old)
    )
    return _dppo(tokens, is_near, config, loss_agg_mode, global_counts)
