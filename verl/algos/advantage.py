# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators, by name.

An estimator is called with keywords ``token_level_rewards``, ``response_mask``, ``config`` (the ``algorithm`` section)
and whatever else the batch holds (``index``, the group of each row, ...), so it must accept ``**kwargs``. It returns
``(advantages, returns)``, both [B, R], and runs on the driver.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch

from verl.algos.aggregation import select
from verl.algos.registry import Registry

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageEstimator",
    "compute_grpo_outcome_advantage",
    "get_adv_estimator_fn",
    "register_adv_est",
]

ADV_ESTIMATOR_REGISTRY = Registry("advantage estimator", "algorithm.adv_estimator")
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator_fn = ADV_ESTIMATOR_REGISTRY.get


class AdvantageEstimator(str, Enum):
    """Names of the estimators in this file, for code that compares with ``algorithm.adv_estimator``."""

    GRPO = "grpo"


def _group_ids(index: Any, num_rows: int) -> torch.Tensor:
    """Number the groups 0, 1, ... in order of appearance; labels may be of any hashable kind. Returns [B] int64."""
    labels = np.asarray(index).tolist()
    if len(labels) != num_rows:
        raise ValueError(f"index (the uid column) has {len(labels)} entries for {num_rows} rows of rewards")
    seen: dict[Any, int] = {}
    return torch.tensor([seen.setdefault(label, len(seen)) for label in labels], dtype=torch.int64)


def _group_mean_std(scores: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased standard deviation of each row's group, [B] each; a group of one has mean 0 and deviation 1."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    empty = scores.new_zeros(num_groups)
    size = empty.index_add(0, group, torch.ones_like(scores))
    # Measured from the group's smallest score, so that equal scores give exactly 0 whatever their size.
    base = empty.scatter_reduce(0, group, scores, "amin", include_self=False)
    offset = scores - base[group]
    mean = empty.index_add(0, group, offset) / size
    variance = empty.index_add(0, group, (offset - mean[group]).square()) / (size - 1).clamp(min=1)
    single = size == 1
    mean = torch.where(single, 0.0, mean + base)
    std = torch.where(single, 1.0, variance.sqrt())
    return mean[group], std[group]


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
    unbiased. Without the division it is Dr.GRPO (arXiv 2503.20783). A group of one has mean 0 and std 1. The statistics
    are computed in float64: rewards that differ in their sixth digit keep their advantage.

    Args:
        token_level_rewards: [B, R], 0 where there is no reward. Rewards outside the mask count too: the last token of a
            multi-turn response may be one that is not trained.
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
    if norm_adv_by_std_in_grpo is None:
        norm_adv_by_std_in_grpo = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    scores = token_level_rewards.to(torch.float64).sum(dim=-1)
    group = _group_ids(index, scores.shape[0]).to(scores.device)
    mean, std = _group_mean_std(scores, group)
    relative = scores - mean
    if norm_adv_by_std_in_grpo:
        relative = relative / (std + epsilon)
    dtype = token_level_rewards.dtype if token_level_rewards.is_floating_point() else torch.float32
    advantages = select(relative.to(dtype)[:, None].expand(token_level_rewards.shape), response_mask)
    return advantages, advantages
