# SPDX-License-Identifier: Apache-2.0
"""What the policy losses share: their registry, their settings, the masked log-ratio and the last reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.algos.aggregation import agg_loss, select
from verl.algos.registry import Registry
from verl.utils.metric import Metric

__all__ = ["POLICY_LOSS_REGISTRY", "TokenBatch", "clip_range", "get_policy_loss_fn", "register_policy_loss"]

POLICY_LOSS_REGISTRY = Registry("policy loss", "actor.policy_loss.loss_mode")
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss_fn = POLICY_LOSS_REGISTRY.get

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: beyond it the ratio says nothing and could overflow


def clip_range(config: Any) -> tuple[float, float]:
    """How far the ratio may fall below and rise above 1."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


@dataclass
class TokenBatch:
    """The inputs of a policy loss, [B, R] each, with 0 at masked positions.

    They are zeroed before any exp: a NaN at a masked position would come back through the gradient of exp as 0 * NaN.

    Attributes:
        log_prob: under the policy being trained; carries the gradient.
        old_log_prob: under the policy before the update.
        advantages: of the tokens.
        mask: not 0 where a token counts.
        weights: factors on each token's loss, or None.
    """

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor | None

    @classmethod
    def of(
        cls,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> TokenBatch:
        """Zero everything at masked positions."""
        weights = None if rollout_is_weights is None else select(rollout_is_weights, response_mask)
        return cls(
            log_prob=select(log_prob, response_mask),
            old_log_prob=select(old_log_prob, response_mask),
            advantages=select(advantages, response_mask),
            mask=response_mask,
            weights=weights,
        )

    @property
    def num_tokens(self) -> torch.Tensor:
        """Tokens that count, 0-d."""
        return (self.mask != 0).sum()

    def log_ratio(self) -> torch.Tensor:
        """log_prob - old_log_prob, clamped to +-20."""
        return (self.log_prob - self.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean(self, values: torch.Tensor) -> Metric:
        """Mean of [B, R] numbers or truths over the tokens that count."""
        return Metric.mean(select(values, self.mask).sum(), self.num_tokens)

    def ppo_kl(self) -> dict[str, Metric]:
        """The mean of old_log_prob - log_prob, which every loss reports."""
        return {"actor/ppo_kl": self.mean(-self.log_ratio())}

    def reduce(self, losses: torch.Tensor, loss_agg_mode: str, counts: dict[str, Any]) -> torch.Tensor:
        """Weigh the tokens' losses and reduce them by the counts of the whole step."""
        if self.weights is not None:
            losses = losses * self.weights
        return agg_loss(losses, self.mask, loss_agg_mode, **counts)
