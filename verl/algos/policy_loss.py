# SPDX-License-Identifier: Apache-2.0
"""Policy losses, by name (``actor.policy_loss.loss_mode``) or as ``module:function``.

A policy loss is called with keywords ``old_log_prob``, ``log_prob``, ``advantages``, ``response_mask`` (all [B, R]),
``loss_agg_mode``, ``config`` (the actor's), ``rollout_is_weights`` ([B, R] or None) and the keywords of `agg_loss` that
describe the whole optimiser step, which it hands on to `agg_loss`. It returns ``(0-d loss, dict of Metric)``. Formulas,
divisors and sources: docs/algorithms.md.
"""

from verl.algos.policy_loss_base import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss
from verl.algos.policy_loss_bypass import compute_policy_loss_bypass_mode
from verl.algos.policy_loss_plain import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_kl_cov,
)
from verl.algos.policy_loss_ratio import (
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "register_policy_loss",
]
