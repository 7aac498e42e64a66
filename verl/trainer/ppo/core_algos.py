# SPDX-License-Identifier: Apache-2.0
"""The algorithms of `verl.algos` under the import path that recipes use."""

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
