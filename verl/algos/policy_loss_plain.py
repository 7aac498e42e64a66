# SPDX-License-Identifier: Apache-2.0
"""Policy losses without a clip (gpg, dro), and those that single out tokens by their covariance (clip_cov, kl_cov).

The keywords of all of them are those of `compute_policy_loss_vanilla`.

The covariance losses choose their tokens inside the micro-batch: the log-probabilities they compare exist only there,
while it is being trained. So which tokens are chosen depends on how the step was cut into micro-batches; the divisor is
that of the whole step, as everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.policy_loss_base import TokenBatch, clip_range, register_policy_loss
from verl.utils.metric import Metric

__all__ = [
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dro",
    "compute_policy_loss_gpg",
    "compute_policy_loss_kl_cov",
]

_Loss = tuple[torch.Tensor, dict[str, Metric]]


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """-A log_prob, the plain policy gradient: GPG (arXiv 2504.02546). The old policy is not read for the loss."""
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return tokens.reduce(-tokens.advantages * tokens.log_prob, loss_agg_mode, global_counts), tokens.ppo_kl()


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """-(A log_prob - beta / 2 (log_prob - old_log_prob)^2), after DRO (arXiv 2405.19107).

    beta is ``actor.policy_loss.dro_beta``.

    Raises:
        ValueError: dro_beta is not set or not positive.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"actor.policy_loss.dro_beta={beta} must be a positive number for loss_mode='dro'")
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    distance = (tokens.log_prob - tokens.old_log_prob).square()
    losses = -(tokens.advantages * tokens.log_prob - 0.5 * beta * distance)
    return tokens.reduce(losses, loss_agg_mode, global_counts), tokens.ppo_kl()


def _covariance(tokens: TokenBatch) -> torch.Tensor:
    """(A - mean) * (log_prob - mean) of each token, means over the tokens at hand, [B, R]; -inf at masked positions."""
    num_tokens = tokens.num_tokens.clamp(min=1)
    log_prob = tokens.log_prob.detach()
    product = (tokens.advantages - tokens.advantages.sum() / num_tokens) * (log_prob - log_prob.sum() / num_tokens)
    return torch.where(tokens.mask != 0, product, -torch.inf)


def _draw(candidates: torch.Tensor, count: int, old_log_prob: torch.Tensor) -> torch.Tensor:
    """`count` of the true entries of `candidates` at random, as a mask of the same shape.

    The generator is seeded from the data: all ranks that compute this micro-batch (tensor and context parallel) must
    choose the same tokens, and their global generators need not agree.
    """
    places = candidates.flatten().nonzero()[:, 0].cpu()
    seed = int(old_log_prob.to(torch.float64).sum().view(torch.int64))
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed & (2**63 - 1)))
    chosen = torch.zeros(candidates.numel(), dtype=torch.bool)
    chosen[places[order[:count]]] = True
    return chosen.view(candidates.shape).to(candidates.device)


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """PPO's clipped surrogate without the gradient of a few tokens of high covariance: Clip-Cov (arXiv 2505.22617).

    Of the tokens that the clip leaves alone and whose covariance lies between ``clip_cov_lb`` and ``clip_cov_ub``, a
    random share is dropped: ``clip_cov_ratio`` of the micro-batch's tokens, at least one (keys of
    ``actor.policy_loss``).
    """
    low, high = clip_range(config)
    settings = config.policy_loss
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    ratio = tokens.log_ratio().exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high)
    covariance = _covariance(tokens)
    candidates = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub) & (clipped <= unclipped)
    count = max(int(settings.clip_cov_ratio * tokens.num_tokens), 1)
    is_dropped = _draw(candidates, count, tokens.old_log_prob)
    losses = torch.where(is_dropped, 0.0, torch.maximum(unclipped, clipped))
    metrics = {"actor/pg_clipfrac": tokens.mean(is_dropped)} | tokens.ppo_kl()
    return tokens.reduce(losses, loss_agg_mode, global_counts), metrics


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> _Loss:
    """-A q, and ``ppo_kl_coef * |log_prob - old_log_prob|`` on the tokens of highest covariance: KL-Cov.

    arXiv 2505.22617. ``kl_cov_ratio`` of the micro-batch's tokens, at least one, get the penalty (keys of
    ``actor.policy_loss``).
    """
    settings = config.policy_loss
    tokens = TokenBatch.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    log_ratio = tokens.log_ratio()
    num_tokens = int(tokens.num_tokens)
    count = min(max(int(settings.kl_cov_ratio * num_tokens), 1), num_tokens)
    is_held = torch.zeros(response_mask.numel(), dtype=torch.bool, device=response_mask.device)
    is_held[_covariance(tokens).flatten().topk(count).indices] = True
    is_held = is_held.view(response_mask.shape)
    losses = -tokens.advantages * log_ratio.exp()
    losses = losses + torch.where(is_held, settings.ppo_kl_coef * log_ratio.abs(), 0.0)
    return tokens.reduce(losses, loss_agg_mode, global_counts), tokens.ppo_kl()
