# SPDX-License-Identifier: Apache-2.0
"""The critic's loss."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.aggregation import agg_loss, select
from verl.utils.metric import Metric

__all__ = ["compute_value_loss"]


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_counts: Any,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Squared error of the values, with predictions held near those that made the advantages.

    A token's loss is max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2: the clipped value loss that goes with
    PPO (arXiv 1707.06347; the form is written out in arXiv 2006.05990, appendix B).

    Args:
        vpreds: [B, R] values under the critic being trained; carries the gradient.
        returns: [B, R] what they should be.
        values: [B, R] values under the critic before the update.
        response_mask: [B, R]; what the other tensors hold where it is 0 changes neither value nor gradient.
        cliprange_value: c, in the units of the rewards.
        loss_agg_mode: see `agg_loss`.
        **global_counts: the keywords of `agg_loss` about the whole step.

    Returns:
        (0-d loss times dp_size, metrics): the fraction of tokens whose clipped error was the larger one
        (``critic/vf_clipfrac``) and the mean prediction (``critic/vpred_mean``).
    """
    predicted, old = select(vpreds, response_mask), select(values, response_mask)
    target = select(returns, response_mask)
    unclipped = (predicted - target).square()
    clipped = (predicted.clamp(old - cliprange_value, old + cliprange_value) - target).square()
    loss = agg_loss(torch.maximum(unclipped, clipped), response_mask, loss_agg_mode, **global_counts) / 2
    num_tokens = (response_mask != 0).sum()
    return loss, {
        "critic/vf_clipfrac": Metric.mean((clipped > unclipped).sum(), num_tokens),
        "critic/vpred_mean": Metric.mean(predicted.sum(), num_tokens),
    }
