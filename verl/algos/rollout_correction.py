# SPDX-License-Identifier: Apache-2.0
"""Correction for the gap between the policy that sampled the tokens and the one that is trained.

A rollout server computes with other kernels, other precision and sometimes older weights than the trainer, so the
tokens come from a policy next to the trained one. With log-ratio l = trainer's log-prob - rollout's log-prob, tokens or
sequences are weighed by exp(l) cut from above (truncated importance sampling, Ionides 2008), or left out where l is too
far from 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from verl.algos.aggregation import select

__all__ = ["correct_rollout", "importance_weights", "off_policy_metrics", "rejection_mask"]

_MAX_LOG_RATIO = 20.0


def _log_ratio(old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (select(old_log_prob, mask) - select(rollout_log_prob, mask)).detach()


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def importance_weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Truncated importance weights.

    Args:
        old_log_prob: [B, R] log-probs under the trainer's policy, in nats.
        rollout_log_prob: [B, R] under the policy that sampled.
        response_mask: [B, R].
        config: has rollout_is ("token", or "sequence": the product of a sequence's ratios on each of its tokens),
            rollout_is_threshold and rollout_is_batch_normalize.

    Returns:
        (weights [B, R] without a graph, 0 at masked positions; metrics about them as 0-d tensors). Weights that are
        normalised have mean 1 over tokens, or over sequences at the level "sequence".
    """
    trained = response_mask != 0
    log_ratio = _log_ratio(old_log_prob, rollout_log_prob, response_mask)
    if config.rollout_is == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand(response_mask.shape)
    raw = _exp(log_ratio)
    weights = select(raw.clamp(max=config.rollout_is_threshold), response_mask)
    # Each sequence counts once at the level "sequence", however long it is.
    share = trained.to(weights.dtype)
    if config.rollout_is == "sequence":
        share = share / trained.sum(-1, keepdim=True).clamp(min=1)
    total = share.sum()
    mean = (weights * share).sum() / total
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": ((weights - mean).square() * share).sum().div(total).sqrt(),
        "rollout_is_max": select(weights, response_mask).max() if trained.any() else mean,
        "rollout_is_min": torch.where(trained, weights, torch.inf).min() if trained.any() else mean,
        "rollout_is_eff_sample_size": mean.square() / ((weights.square() * share).sum() / total),
        "rollout_is_truncated_fraction": (select(raw > config.rollout_is_threshold, trained) * share).sum() / total,
    }
    if config.rollout_is_batch_normalize:
        weights = weights / torch.where(mean > 0, mean, 1.0)
    return weights, metrics


def _statistic(log_ratio: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)) - log_ratio


def _keeps(rule: Any, log_ratio: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    level, _, kind = rule.name.rpartition("_")
    statistic = _statistic(log_ratio, kind)
    if level != "token":
        num_tokens = (response_mask != 0).sum(-1, keepdim=True).clamp(min=1)
        if level == "seq_max":  # k2 and k3 are never negative, and 0 at masked positions
            statistic = statistic.amax(-1, keepdim=True)
        else:
            statistic = statistic.sum(-1, keepdim=True) / (num_tokens if level == "seq_mean" else 1)
    lower, upper = (math.log(rule.lower), math.log(rule.upper)) if rule.is_ratio else (-math.inf, rule.upper)
    return (statistic >= lower) & (statistic <= upper)


def rejection_mask(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The response mask without the tokens that are rejected.

    A row's verdict depends on that row only, so it is the same in whatever batch the row stands.

    Args:
        old_log_prob: [B, R] log-probs under the trainer's policy, in nats.
        rollout_log_prob: [B, R] under the policy that sampled.
        response_mask: [B, R].
        config: has ``rejections()``, see `RolloutCorrectionConfig`, and rollout_token_veto_threshold.

    Returns:
        (mask [B, R] in the dtype of `response_mask`; the shares of tokens, and of sequences with all tokens, that were
        taken out, as 0-d tensors).
    """
    trained = response_mask != 0
    log_ratio = _log_ratio(old_log_prob, rollout_log_prob, response_mask)
    keep = trained
    for rule in config.rejections():
        keep = keep & _keeps(rule, log_ratio, response_mask)
    veto = config.rollout_token_veto_threshold
    if veto is not None:
        # At masked positions the log-ratio is 0, which no veto reaches.
        keep = keep & ~(log_ratio < math.log(veto)).any(-1, keepdim=True)
    had, has = trained.any(-1), keep.any(-1)
    metrics = {
        "rollout_rs_masked_fraction": 1.0 - keep.sum() / trained.sum(),
        "rollout_rs_seq_masked_fraction": (had & ~has).sum() / had.sum(),
    }
    return torch.where(keep, response_mask, torch.zeros_like(response_mask)), metrics


def off_policy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the sampling policy is from the trained one, as 0-d float64 tensors; NaN without a trained token.

    Returns:
        ``kl``, the mean over tokens of rollout's - trainer's log-prob (estimates KL(rollout || trainer)); ``k3_kl``,
        the same with less variance; ``training_ppl``, ``rollout_ppl``, the means over sequences of
        exp(-mean log-prob); ``log_ppl_diff`` and ``ppl_ratio``, the mean over sequences of the difference of the
        mean log-probs, and of its exp; ``chi2_token`` and ``chi2_seq``, the means of ratio^2 - 1 over tokens and,
        with the product of ratios, over sequences.
    """
    trained = response_mask != 0
    new, old = (select(x.detach().to(torch.float64), response_mask) for x in (old_log_prob, rollout_log_prob))
    log_ratio = new - old
    length = trained.sum(-1)
    rows = length > 0
    num_tokens, at_least_one = trained.sum(), length.clamp(min=1)
    mean_new, mean_old = new.sum(-1) / at_least_one, old.sum(-1) / at_least_one

    def over_tokens(values: torch.Tensor) -> torch.Tensor:
        return select(values, trained).sum() / num_tokens

    def over_rows(values: torch.Tensor) -> torch.Tensor:
        return select(values, rows).sum() / rows.sum()

    return {
        "kl": over_tokens(-log_ratio),
        "k3_kl": over_tokens(_statistic(log_ratio, "k3")),
        "training_ppl": over_rows((-mean_new).exp()),
        "rollout_ppl": over_rows((-mean_old).exp()),
        "log_ppl_diff": over_rows(mean_old - mean_new),
        "ppl_ratio": over_rows((mean_old - mean_new).exp()),
        "chi2_token": over_tokens(_exp(2 * log_ratio) - 1),
        "chi2_seq": over_rows(_exp(2 * log_ratio.sum(-1)) - 1),
    }


def correct_rollout(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """Everything the configuration asks for, on the whole batch.

    Weights are computed for all tokens; rejection comes on top of them.

    Args:
        old_log_prob: [B, R] log-probs under the trainer's policy, in nats.
        rollout_log_prob: [B, R] under the policy that sampled.
        response_mask: [B, R].
        config: a `RolloutCorrectionConfig`.

    Returns:
        (weights [B, R], or None without ``rollout_is``; the mask of what is left to train on, [B, R]; metrics, their
        names starting with ``rollout_corr/``, NaN where there was nothing to measure).
    """
    metrics = off_policy_metrics(old_log_prob, rollout_log_prob, response_mask)
    weights, mask = None, response_mask
    if config.rollout_is is not None:
        weights, more = importance_weights(old_log_prob, rollout_log_prob, response_mask, config)
        metrics |= more
    if config.rejections() or config.rollout_token_veto_threshold is not None:
        mask, more = rejection_mask(old_log_prob, rollout_log_prob, response_mask, config)
        metrics |= more
    return weights, mask, {f"rollout_corr/{key}": float(value) for key, value in metrics.items()}
