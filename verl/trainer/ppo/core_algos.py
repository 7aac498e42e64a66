# SPDX-License-Identifier: Apache-2.0
"""The algorithms of `verl.algos` under the import path that recipes use."""

from __future__ import annotations

from typing import Any

from verl.algos.advantage import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.algos.aggregation import agg_loss
from verl.algos.kl import (
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_in_reward,
    kl_penalty,
)
from verl.algos.policy_loss import (
    POLICY_LOSS_REGISTRY,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "apply_kl_penalty",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_in_reward",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]


def apply_kl_penalty(data: Any, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[Any, dict[str, float]]:
    """Write ``token_level_rewards``, the scores minus the KL penalty, into a batch and adapt the controller.

    Args:
        data: DataProto with [B, R] token_level_scores, old_log_probs, ref_log_prob and response_mask; changed in place.
        kl_ctrl: a KL controller; its coefficient is used first and updated afterwards.
        kl_penalty: name of the estimator, see `verl.algos.kl.kl_penalty`.

    Returns:
        (data, metrics): the mean KL in nats, and the coefficient that this batch was penalised with.
    """
    coefficient = kl_ctrl.value
    rewards, current_kl = kl_in_reward(
        data.batch["token_level_scores"],
        data.batch["old_log_probs"],
        data.batch["ref_log_prob"],
        data.batch["response_mask"],
        coefficient,
        kl_penalty,
    )
    data.batch["token_level_rewards"] = rewards
    measured = current_kl.item()
    kl_ctrl.update(current_kl=measured, n_steps=rewards.shape[0])
    return data, {"actor/reward_kl_penalty": measured, "actor/reward_kl_penalty_coeff": coefficient}
