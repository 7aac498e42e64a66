# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators, by name (``algorithm.adv_estimator``) or as ``module:function``.

An estimator is called with keywords ``token_level_rewards``, ``response_mask``, ``config`` (the ``algorithm`` section),
``index`` (the group of each row), ``non_tensor_batch`` and the per-token columns that the batch holds (``values``,
``old_log_probs``, ``reward_baselines``, ...), so it must accept ``**kwargs``. It returns ``(advantages, returns)``,
both [B, R], and runs on the driver. Formulas and sources: docs/algorithms.md.
"""

from verl.algos.advantage_base import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.algos.advantage_groups import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.algos.advantage_returns import (
    compute_gae_advantage_return,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_tir_optimal_token_baseline_advantage,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageEstimator",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_tir_optimal_token_baseline_advantage",
    "get_adv_estimator_fn",
    "register_adv_est",
]
