# SPDX-License-Identifier: Apache-2.0
"""The policy loss of ``algorithm.rollout_correction.bypass_mode``: the rollout's log-probs are the old policy's."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.policy_loss_base import TokenBatch, register_policy_loss
from verl.algos.policy_loss_ratio import compute_policy_loss_vanilla
from verl.algos.rollout_correction import importance_weights, rejection_mask
from verl.utils.metric import Metric

__all__ = ["compute_policy_loss_bypass_mode"]


@register_policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **global_counts: Any,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """PPO's clipped surrogate, or REINFORCE with importance weights, against the policy that sampled.

    `old_log_prob` holds the rollout's log-probs. With ``loss_type`` ppo_clip the loss is vanilla, whose ratio corrects
    for the gap by itself; with reinforce it is -w A log_prob, w being the truncated weights of ``rollout_is`` between
    the policy of the moment and the rollout (1 without it), held constant. In both, what ``rollout_rs`` and the veto
    reject now loses nothing.

    A rejected token adds 0 to the loss and stays in the counts of the step, which were fixed before it was rejected; so
    the loss does not depend on the split. `rollout_is_weights` is not read: the weights are made here. The keywords are
    those of `compute_policy_loss_vanilla`; `config` also has ``policy_loss.rollout_correction``.

    Raises:
        ValueError: there is no ``policy_loss.rollout_correction``.
    """
    rules = config.policy_loss.rollout_correction
    if rules is None:
        raise ValueError(
            "actor.policy_loss.loss_mode='bypass_mode' needs actor.policy_loss.rollout_correction, which the trainer "
            "fills in for algorithm.rollout_correction.bypass_mode=True"
        )
    mask, rejected = response_mask, {}
    if rules.rejections() or rules.rollout_token_veto_threshold is not None:
        mask, _ = rejection_mask(log_prob, old_log_prob, response_mask, rules)
        num_tokens = (response_mask != 0).sum()
        rejected = {"actor/rollout_rs_masked_fraction": Metric.mean(num_tokens - (mask != 0).sum(), num_tokens)}
    # Rejected tokens lose nothing but keep their place in the counts, of the sequence and of the step.
    kept_advantages = torch.where(mask != 0, advantages, torch.zeros_like(advantages))
    keywords = {"loss_agg_mode": loss_agg_mode, "config": config, **global_counts}
    if rules.loss_type == "ppo_clip":
        loss, metrics = compute_policy_loss_vanilla(
            old_log_prob, log_prob, kept_advantages, response_mask, rollout_is_weights=None, **keywords
        )
        return loss, metrics | rejected
    weights = None
    if rules.rollout_is is not None:
        weights, _ = importance_weights(log_prob, old_log_prob, response_mask, rules)
    tokens = TokenBatch.of(old_log_prob, log_prob, kept_advantages, response_mask, weights)
    losses = -tokens.advantages * tokens.log_prob
    return tokens.reduce(losses, loss_agg_mode, global_counts), tokens.ppo_kl() | rejected
