# SPDX-License-Identifier: Apache-2.0
"""KL estimates from log-probabilities of sampled tokens, and the KL penalty inside the reward.

The estimators k1, k2, k3 are those of J. Schulman, "Approximating KL Divergence" (2020). The adaptive coefficient is
that of Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl.algos.aggregation import select

__all__ = ["AdaptiveKLController", "FixedKLController", "get_kl_controller", "kl_in_reward", "kl_penalty"]

_MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is still far from the float32 limit
_MAX_LOW_VAR_KL = 10.0


def _k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio


def _k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    minus = (-log_ratio).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where most tokens are.
    return (torch.expm1(minus) - minus).clamp(-_MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL)


_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) at the sampled tokens.

    With x = logprob - ref_logprob: ``kl``/``k1`` is x, ``abs`` ``|x|``, ``mse``/``k2`` x^2/2, ``low_var_kl``/``k3``
    exp(-x) - 1 + x, with x clamped to +-20 and the result to +-10. A trailing ``+`` keeps the value and takes the
    gradient of k2, the only one of them whose expected gradient is that of the KL.

    Args:
        logprob: log-probabilities under the policy, any shape.
        ref_logprob: the same tokens under the reference, same shape.
        kl_penalty: name of the estimator, optionally with ``+``.

    Raises:
        ValueError: unknown name.
    """
    name = str(kl_penalty)
    straight_through = name.endswith("+")
    estimator = _ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        raise ValueError(
            f"KL type (actor.kl_loss_type, algorithm.kl_penalty) {name!r} is unknown "
            f"(known: {', '.join(_ESTIMATORS)}, each also with a trailing '+')"
        )
    log_ratio = logprob - ref_logprob
    if not straight_through:
        return estimator(log_ratio)
    carrier = _k2(log_ratio)
    return estimator(log_ratio).detach() + (carrier - carrier.detach())


def kl_in_reward(
    token_level_scores: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_coef: float,
    kl_type: str = "kl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take ``kl_coef * KL`` off the score of every response token.

    Args:
        token_level_scores: [B, R] scores of the reward function.
        old_log_probs: [B, R] log-probabilities of the policy that produced the batch.
        ref_log_prob: [B, R] the same under the reference policy.
        response_mask: [B, R]; masked tokens keep their score, whatever their log-probabilities are.
        kl_coef: weight of the penalty, in units of reward per nat.
        kl_type: estimator, see `kl_penalty`.

    Returns:
        (token_level_rewards [B, R], 0-d mean over sequences of the mean KL per response token, in nats; a sequence
        without response tokens counts with 0).
    """
    penalty = kl_penalty(select(old_log_probs, response_mask), select(ref_log_prob, response_mask), kl_type)
    num_tokens = (response_mask != 0).sum(dim=-1).clamp(min=1)
    current_kl = (penalty.sum(dim=-1) / num_tokens).mean()
    return token_level_scores - kl_coef * penalty, current_kl


class FixedKLController:
    """A KL coefficient that stays what it is."""

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt; present so that both controllers are called alike."""


class AdaptiveKLController:
    """A KL coefficient that is steered until the measured KL meets a target.

    After `n_steps` samples the coefficient is multiplied by ``1 + e * n_steps / horizon``, with e the relative distance
    from the target clipped to +-0.2.

    Raises:
        ValueError: target or horizon not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int):
        for key, value in (("target_kl", target_kl), ("horizon", horizon)):
            if value <= 0:
                raise ValueError(f"algorithm.kl_ctrl.{key}={value} must be positive for the adaptive controller")
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to a KL of `current_kl` nats that was measured over `n_steps` samples."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """Build the controller that ``algorithm.kl_ctrl`` describes.

    Args:
        kl_ctrl: has attributes type ("fixed" or "adaptive"), kl_coef and, for adaptive, target_kl and horizon.

    Raises:
        ValueError: unknown type.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ValueError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is unknown (known: fixed, adaptive)")
