# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators whose advantages differ from token to token: GAE, discounted returns, per-token baselines."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.advantage_base import (
    AdvantageEstimator,
    group_sum,
    masked_whiten,
    number_groups,
    register_adv_est,
    returns_to_go,
    setting,
)
from verl.algos.aggregation import select

__all__ = [
    "compute_gae_advantage_return",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_tir_optimal_token_baseline_advantage",
]


def _dtype(rewards: torch.Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.float32


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), whitened over the batch.

    Over the trained tokens of a row, with the value after the last of them 0:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t. Tokens that are not
    trained are no time steps: their values are not read, and what they earn belongs to the trained token before them.

    Args:
        token_level_rewards: [B, R].
        values: [B, R], the critic's value before each token.
        response_mask: [B, R]; results are 0 where it is 0.
        gamma, lam: discount and trace decay; None takes them from `config`, or 1 without one.
        config: mapping with ``gamma`` and ``lam``, or None.

    Returns:
        (advantages with mean 0 and variance 1 over the trained tokens, returns as they are), [B, R] each, in the dtype
        of the rewards; computed in float64.
    """
    gamma, lam = setting(gamma, config, "gamma", 1.0), setting(lam, config, "lam", 1.0)
    rewards, trained = token_level_rewards.to(torch.float64), response_mask != 0
    values = select(values.to(torch.float64), trained)
    advantages = torch.zeros_like(rewards)
    advantage = next_value = earned = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here = trained[:, t]
        earned = earned + rewards[:, t]
        step = earned + gamma * next_value - values[:, t] + gamma * lam * advantage
        advantage = torch.where(here, step, advantage)
        next_value = torch.where(here, values[:, t], next_value)
        earned = torch.where(here, 0.0, earned)
        advantages[:, t] = torch.where(here, advantage, 0.0)
    dtype = _dtype(token_level_rewards)
    return masked_whiten(advantages, trained).to(dtype), (advantages + values).to(dtype)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float | None = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Discounted returns, whitened over the trained tokens of the batch: REINFORCE++ (arXiv 2501.03262).

    Args:
        token_level_rewards: [B, R].
        response_mask: [B, R].
        gamma: discount; None takes it from `config`, or 1 without one.
        config: mapping with ``gamma``, or None.

    Returns:
        (advantages, returns before whitening), [B, R] each.
    """
    gamma = setting(gamma, config, "gamma", 1.0)
    returns = returns_to_go(token_level_rewards.to(torch.float64), response_mask, gamma)
    dtype = _dtype(token_level_rewards)
    return masked_whiten(returns, response_mask).to(dtype), returns.to(dtype)


@register_adv_est(AdvantageEstimator.REMAX)
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    reward_baselines: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward to go minus the score of the greedy answer to the same prompt: ReMax (arXiv 2310.10505).

    Args:
        token_level_rewards: [B, R].
        response_mask: [B, R].
        reward_baselines: [B] score of the greedy answer.

    Returns:
        (advantages, returns), [B, R] each.

    Raises:
        ValueError: there are no baselines.
    """
    if reward_baselines is None:
        raise ValueError("algorithm.adv_estimator='remax' needs reward_baselines, the scores of greedy answers")
    returns = returns_to_go(token_level_rewards.to(torch.float64), response_mask)
    advantages = select(returns - reward_baselines.to(torch.float64)[:, None], response_mask)
    dtype = _dtype(token_level_rewards)
    return advantages.to(dtype), returns.to(dtype)


def _token_energy(
    old_log_probs: torch.Tensor | None,
    sum_pi_squared: torch.Tensor | None,
    rollout_is_weights: torch.Tensor | None,
    mask: torch.Tensor,
    name: str,
) -> torch.Tensor:
    """Cumulated squared norm of the score function in logit space, 1 - 2 pi + sum pi^2 a token, [B, R] float64."""
    if old_log_probs is None or sum_pi_squared is None:
        key = "old_log_probs" if old_log_probs is None else "sum_pi_squared"
        raise ValueError(f"algorithm.adv_estimator={name!r} needs {key} of every token")
    probs = select(old_log_probs.to(torch.float64), mask).exp()
    energy = 1.0 - 2.0 * probs + sum_pi_squared.to(torch.float64)
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.to(torch.float64).square()
    return select(energy, mask).cumsum(-1)


def _minus_optimal_baseline(
    returns: torch.Tensor, energy: torch.Tensor, present: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """Returns minus, at each position, the group's mean of returns weighted by energy over the rows present there.

    A row that is alone at a position has no one to be compared with: its baseline there is 0.
    """
    present = present.to(returns.dtype)
    weighted = group_sum(returns * energy * present, group)
    total = group_sum(energy * present, group)
    is_shared = group_sum(present, group) > 1
    baseline = torch.where(is_shared & (total > 0), weighted / torch.where(total > 0, total, 1.0), 0.0)
    return returns - baseline[group]


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    old_log_probs: torch.Tensor | None = None,
    sum_pi_squared: torch.Tensor | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward to go minus the baseline of least variance for each position of the response.

    The baseline at position t is sum(G_t W_t) / sum(W_t) over the responses of the group that have a trained token
    there; W_t cumulates 1 - 2 pi + sum over the vocabulary of pi^2, the squared norm of the score in logit space.

    Args:
        token_level_rewards: [B, R].
        response_mask: [B, R].
        index: [B] labels; rows with equal labels form a group.
        old_log_probs: [B, R] log-probabilities of the tokens, in nats.
        sum_pi_squared: [B, R] sum of squared probabilities over the vocabulary.
        rollout_is_weights: [B, R] importance weights, whose squares scale W; or None.

    Returns:
        (advantages, returns), [B, R] each. In a group of one the advantage is the return.

    Raises:
        ValueError: old_log_probs or sum_pi_squared is missing, or `index` does not fit.
    """
    name = AdvantageEstimator.OPTIMAL_TOKEN_BASELINE.value
    energy = _token_energy(old_log_probs, sum_pi_squared, rollout_is_weights, response_mask, name)
    group = number_groups(index, energy.shape[0]).to(energy.device)
    returns = returns_to_go(token_level_rewards.to(torch.float64), response_mask)
    advantages = select(_minus_optimal_baseline(returns, energy, response_mask != 0, group), response_mask)
    dtype = _dtype(token_level_rewards)
    return advantages.to(dtype), returns.to(dtype)


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
def compute_tir_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    old_log_probs: torch.Tensor | None = None,
    sum_pi_squared: torch.Tensor | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The optimal token baseline for responses with tool calls: positions count trained tokens only.

    Two responses are compared at their k-th trained token, wherever the tools' answers stand in between. Arguments and
    results are those of `compute_optimal_token_baseline_advantage`.
    """
    name = AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE.value
    energy = _token_energy(old_log_probs, sum_pi_squared, rollout_is_weights, response_mask, name)
    group = number_groups(index, energy.shape[0]).to(energy.device)
    returns = returns_to_go(token_level_rewards.to(torch.float64), response_mask)
    # Trained tokens first, in their order; the inverse permutation puts the result back.
    order = torch.argsort((response_mask == 0).to(torch.int8), dim=-1, stable=True)
    moved, weights, present = (x.gather(-1, order) for x in (returns, energy, response_mask != 0))
    advantages = _minus_optimal_baseline(moved, weights, present, group).gather(-1, order.argsort(-1))
    dtype = _dtype(token_level_rewards)
    return select(advantages, response_mask).to(dtype), returns.to(dtype)
