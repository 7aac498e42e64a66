# SPDX-License-Identifier: Apache-2.0
"""What the advantage estimators share: their registry, group statistics, returns and whitening."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import torch

from verl.algos.aggregation import select
from verl.algos.registry import Registry

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageEstimator",
    "get_adv_estimator_fn",
    "group_mean_std",
    "group_sum",
    "masked_whiten",
    "number_groups",
    "over_tokens",
    "register_adv_est",
    "returns_to_go",
    "setting",
]

ADV_ESTIMATOR_REGISTRY = Registry("advantage estimator", "algorithm.adv_estimator")
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator_fn = ADV_ESTIMATOR_REGISTRY.get


class AdvantageEstimator(StrEnum):
    """Names of the estimators, for code that compares with ``algorithm.adv_estimator``."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


def setting(given: Any, config: Any, key: str, default: Any) -> Any:
    """An estimator's setting: as given, else from the ``algorithm`` section, else the default."""
    if given is not None:
        return given
    return default if config is None else config.get(key, default)


def number_groups(index: Any, num_rows: int) -> torch.Tensor:
    """Number the groups 0, 1, ... in order of appearance; labels may be of any hashable kind. Returns [B] int64.

    Raises:
        ValueError: the labels are not one a row.
    """
    labels = np.asarray(index).tolist()
    if len(labels) != num_rows:
        raise ValueError(f"index (the uid column) has {len(labels)} entries for {num_rows} rows of rewards")
    seen: dict[Any, int] = {}
    return torch.tensor([seen.setdefault(label, len(seen)) for label in labels], dtype=torch.int64)


def group_sum(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sum over each group, [number of groups, ...] from [B, ...]."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    return values.new_zeros(num_groups, *values.shape[1:]).index_add(0, group, values)


def group_mean_std(scores: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased standard deviation of each row's group, [B] each; a group of one has mean 0 and deviation 1."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    size = group_sum(torch.ones_like(scores), group)
    # Measured from the group's smallest score, so that equal scores give exactly 0 whatever their size.
    base = scores.new_zeros(num_groups).scatter_reduce(0, group, scores, "amin", include_self=False)
    offset = scores - base[group]
    mean = group_sum(offset, group) / size
    variance = group_sum((offset - mean[group]).square(), group) / (size - 1).clamp(min=1)
    single = size == 1
    mean = torch.where(single, 0.0, mean + base)
    std = torch.where(single, 1.0, variance.sqrt())
    return mean[group], std[group]


def returns_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Discounted sum of the rewards from each trained token on, [B, R], in the dtype of the rewards.

    Time goes by in trained tokens: what a response earns on tokens that are not trained (the answer of a tool, the end
    of the last turn) belongs to the trained token before them, and is not discounted for the wait. Entries at masked
    positions are 0.
    """
    trained = mask != 0
    result = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here = trained[:, t]
        # `running` holds the return from the next trained token on, plus what was earned on the way back to here.
        result[:, t] = torch.where(here, running + rewards[:, t], 0.0)
        running = torch.where(here, gamma * result[:, t], running + rewards[:, t])
    return result


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and unbiased variance 1 over the entries where `mask` is not 0; 0 elsewhere.

    1e-8 is added to the variance, so equal entries (and a single one) become 0.
    """
    chosen = mask != 0
    count = chosen.sum()
    offset = select(values - select(values, chosen).sum() / count.clamp(min=1), chosen)
    variance = offset.square().sum() / (count - 1).clamp(min=1)
    return offset * torch.rsqrt(variance + 1e-8)


def over_tokens(values: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One value a row, [B], to the trained tokens of the row, [B, R], in the dtype of the rewards."""
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return select(values.to(dtype)[:, None].expand(rewards.shape), mask)
