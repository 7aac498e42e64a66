# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators that compare the whole responses of a group: one advantage for all tokens of a response.

All of them sum the rewards of a row over all R positions: the last token of a multi-turn response may be one that is
not trained. Statistics are computed in float64: rewards that differ in their sixth digit keep their advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl.algos.advantage_base import (
    AdvantageEstimator,
    group_mean_std,
    group_sum,
    masked_whiten,
    number_groups,
    over_tokens,
    register_adv_est,
    setting,
)

__all__ = [
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
]

_BY_STD = "norm_adv_by_std_in_grpo"


def _scores_and_groups(token_level_rewards: torch.Tensor, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = token_level_rewards.to(torch.float64).sum(dim=-1)
    return scores, number_groups(index, scores.shape[0]).to(scores.device)


def _relative(scores: torch.Tensor, group: torch.Tensor, epsilon: float, by_std: bool) -> torch.Tensor:
    mean, std = group_mean_std(scores, group)
    return (scores - mean) / (std + epsilon) if by_std else scores - mean


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of each response relative to the other responses to its prompt.

    GRPO (arXiv 2402.03300): (r - mean) / (std + epsilon) over the group, with r the sum of the row's rewards and std
    unbiased. Without the division it is Dr.GRPO (arXiv 2503.20783). A group of one has mean 0 and std 1. The names grpo
    and grpo_vectorized mean this one function, which has no loop over groups.

    Args:
        token_level_rewards: [B, R], 0 where there is no reward.
        response_mask: [B, R]; the advantage is 0 where it is 0.
        index: [B] labels; rows with equal labels form a group.
        epsilon: added to the deviation.
        norm_adv_by_std_in_grpo: divide by the deviation; None takes the value from `config`, or True without one.
        config: mapping with ``norm_adv_by_std_in_grpo``, or None.

    Returns:
        (advantages, returns), the same [B, R] tensor twice, in the dtype of the rewards.

    Raises:
        ValueError: `index` and the rewards have different numbers of rows.
    """
    by_std = setting(norm_adv_by_std_in_grpo, config, _BY_STD, True)
    scores, group = _scores_and_groups(token_level_rewards, index)
    advantages = over_tokens(_relative(scores, group, epsilon, by_std), token_level_rewards, response_mask)
    return advantages, advantages


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the best response of a group gets an advantage: (best - second best) / (std + epsilon).

    Follows arXiv 2503.19595. Where several responses share the best reward, every advantage of the group is 0. The
    arguments are those of `compute_grpo_outcome_advantage`.

    Raises:
        ValueError: a group of one, which has no second best, or an `index` that does not fit.
    """
    by_std = setting(norm_adv_by_std_in_grpo, config, _BY_STD, True)
    scores, group = _scores_and_groups(token_level_rewards, index)
    sizes = group_sum(torch.ones_like(scores), group)
    if (sizes == 1).any():
        raise ValueError(
            "algorithm.adv_estimator='grpo_passk' compares the two best responses to a prompt, and a prompt has only "
            "one; use actor_rollout_ref.rollout.n of at least 2"
        )
    best = scores.new_full((len(sizes),), -torch.inf).scatter_reduce(0, group, scores, "amax")
    is_best = scores == best[group]
    others = torch.where(is_best, -torch.inf, scores)
    second = scores.new_full((len(sizes),), -torch.inf).scatter_reduce(0, group, others, "amax")
    second = torch.where(group_sum(is_best.to(scores.dtype), group) > 1, best, second)
    margin = torch.where(is_best, best[group] - second[group], 0.0)
    if by_std:
        margin = margin / (group_mean_std(scores, group)[1] + epsilon)
    advantages = over_tokens(margin, token_level_rewards, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward minus the group's mean, whitened over the trained tokens of the batch (arXiv 2501.03262).

    A group of one has mean 0. Arguments and results as in `compute_grpo_outcome_advantage`.
    """
    scores, group = _scores_and_groups(token_level_rewards, index)
    relative = scores - group_mean_std(scores, group)[0]
    whitened = masked_whiten(relative[:, None].expand(token_level_rewards.shape), response_mask)
    dtype = token_level_rewards.dtype if token_level_rewards.is_floating_point() else torch.float32
    advantages = whitened.to(dtype)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
@register_adv_est(AdvantageEstimator.RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward minus the mean reward of the other responses of the group: RLOO (arXiv 2402.14740).

    With k responses that is k / (k - 1) * (r - mean). A response without others keeps its reward. The names rloo and
    rloo_vectorized mean this one function. Arguments and results as in `compute_grpo_outcome_advantage`.
    """
    scores, group = _scores_and_groups(token_level_rewards, index)
    size = group_sum(torch.ones_like(scores), group)[group]
    relative = (scores - group_mean_std(scores, group)[0]) * size / (size - 1).clamp(min=1)
    advantages = over_tokens(relative, token_level_rewards, response_mask)
    return advantages, advantages


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


@register_adv_est(AdvantageEstimator.OPO)
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward minus the group's mean weighted by response lengths: OPO (arXiv 2505.23585).

    A length counts trained tokens. A group of one has baseline 0. Arguments and results as in
    `compute_grpo_outcome_advantage`.
    """
    scores, group = _scores_and_groups(token_level_rewards, index)
    length = (response_mask != 0).sum(-1).to(scores.dtype)
    mean = group_mean_std(scores, group)[0]
    # Around the plain mean, so that equal scores give exactly 0.
    weighted, total = group_sum((scores - mean) * length, group), group_sum(length, group)
    shift = torch.where(group_sum(torch.ones_like(scores), group) > 1, weighted / total.clamp(min=1), 0.0)
    advantages = over_tokens(scores - mean - shift[group], token_level_rewards, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, f_norm: float = 1.0, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B / number of rewards that are not 0) * (r - mean of the group) / f_norm: GPG (arXiv 2504.02546).

    The factor makes up for samples that carry no gradient. A group of one has mean 0. Other arguments and the results
    as in `compute_grpo_outcome_advantage`.
    """
    scores, group = _scores_and_groups(token_level_rewards, index)
    scale = scores.shape[0] / torch.count_nonzero(scores).clamp(min=1)
    relative = scale * (scores - group_mean_std(scores, group)[0]) / f_norm
    advantages = over_tokens(relative, token_level_rewards, response_mask)
    return advantages, advantages


def _reward_column(columns: Mapping[str, Any], key: str, num_rows: int) -> torch.Tensor:
    if key not in columns:
        raise ValueError(
            f"algorithm.gdpo_reward_keys names {key!r}, which the reward function does not return; it returns "
            f"{', '.join(map(repr, sorted(columns)))}"
        )
    values = np.asarray(columns[key]).tolist()
    assert len(values) == num_rows, (key, len(values), num_rows)
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


@register_adv_est(AdvantageEstimator.GDPO)
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several rewards, each made relative to its group on its own: sum_k w_k GRPO(r_k), whitened over the batch.

    GDPO (arXiv 2601.05242): a reward of small spread is not drowned by one of large spread.

    Args:
        token_level_rewards: [B, R], read for its shape and dtype only.
        response_mask: [B, R].
        index: [B] labels; rows with equal labels form a group.
        epsilon, norm_adv_by_std_in_grpo: as in `compute_grpo_outcome_advantage`.
        config: mapping with ``gdpo_reward_keys``, the names of the rewards, and optionally ``gdpo_reward_weights``.
        non_tensor_batch: name -> [B] numbers, what the reward function returned beside the score.

    Returns:
        (advantages, returns), the same [B, R] tensor twice.

    Raises:
        ValueError: no reward is named, or a named one is missing.
    """
    keys = list(setting(None, config, "gdpo_reward_keys", None) or ())
    if not keys:
        raise ValueError("algorithm.adv_estimator='gdpo' needs algorithm.gdpo_reward_keys, a list of reward names")
    weights = list(setting(None, config, "gdpo_reward_weights", None) or [1.0] * len(keys))
    if len(weights) != len(keys):
        raise ValueError(f"gdpo_reward_weights={weights} must be one number for each of gdpo_reward_keys={keys}")
    by_std = setting(norm_adv_by_std_in_grpo, config, _BY_STD, True)
    group = number_groups(index, token_level_rewards.shape[0]).to(token_level_rewards.device)
    total = torch.zeros(group.shape, dtype=torch.float64, device=group.device)
    for key, weight in zip(keys, weights, strict=True):
        scores = _reward_column(non_tensor_batch or {}, key, len(group)).to(group.device)
        total = total + weight * _relative(scores, group, epsilon, by_std)
    whitened = masked_whiten(total[:, None].expand(token_level_rewards.shape), response_mask)
    dtype = token_level_rewards.dtype if token_level_rewards.is_floating_point() else torch.float32
    advantages = whitened.to(dtype)
    return advantages, advantages
