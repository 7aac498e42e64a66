# SPDX-License-Identifier: Apache-2.0
"""Checks of the estimator, the policy loss and the rollout correction against what the rest of the run supplies."""

import sys
from collections.abc import Callable, Mapping

from verl.algos.registry import Registry
from verl.trainer.ppo.preflight_batch import get
from verl.utils.config import did_you_mean
from verl.workers.config.names import ADV_ESTIMATORS, POLICY_LOSSES

_LOSS, _ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"
_CORRECTION = "algorithm.rollout_correction"


def check_algorithm(tree: Mapping) -> list[str]:
    """Every problem of the algorithm's names and of what they need, one sentence each."""
    estimator, loss = str(get(tree, _ESTIMATOR)), str(get(tree, _LOSS))
    errors = _check_name(_ESTIMATOR, estimator, ADV_ESTIMATORS, "verl.algos.advantage", "get_adv_estimator_fn")
    errors += _check_name(_LOSS, loss, POLICY_LOSSES, "verl.algos.policy_loss", "get_policy_loss_fn")
    needs = {"gdpo": _check_gdpo, "grpo_passk": _check_passk}
    if estimator in needs:
        errors += needs[estimator](tree)
    return errors + _check_correction(tree, loss)


def _check_name(key: str, name: str, known: tuple[str, ...], module: str, getter: str) -> list[str]:
    if name in known:
        return []
    if ":" in name:
        try:
            Registry("function", key).get(name)
        except ValueError as error:
            return [str(error)]
        return []
    # A program of the user's that registers a function has imported the registry by now; only then is it asked.
    loaded = sys.modules.get(module)
    if loaded is not None and _is_registered(getattr(loaded, getter), name):
        return []
    hint = did_you_mean(repr(name), map(repr, known))
    return [f"{key}={name!r} is not known; choose one of {', '.join(known)}, or module:function.{hint}"]


def _is_registered(getter: Callable, name: str) -> bool:
    try:
        return callable(getter(name))
    except ValueError:
        return False


def _check_gdpo(tree: Mapping) -> list[str]:
    keys, weights = get(tree, "algorithm.gdpo_reward_keys"), get(tree, "algorithm.gdpo_reward_weights")
    errors = []
    if not keys:
        errors.append(
            "algorithm.adv_estimator='gdpo' needs algorithm.gdpo_reward_keys, the names of the rewards that the reward "
            "function returns, for instance \"['accuracy','format']\""
        )
    elif weights is not None and (
        not isinstance(weights, list)
        or len(weights) != len(keys)
        or any(isinstance(weight, bool) or not isinstance(weight, int | float) for weight in weights)
    ):
        errors.append(
            f"algorithm.gdpo_reward_weights={weights} must hold a number for each of algorithm.gdpo_reward_keys={keys}"
        )
    if get(tree, "algorithm.use_kl_in_reward"):
        errors.append(
            "algorithm.use_kl_in_reward=True has no effect with adv_estimator='gdpo', which reads gdpo_reward_keys in "
            "place of the rewards; use actor_rollout_ref.actor.use_kl_loss=True"
        )
    return errors


def _check_passk(tree: Mapping) -> list[str]:
    n = get(tree, "actor_rollout_ref.rollout.n")
    if isinstance(n, int) and n < 2:
        return [
            f"actor_rollout_ref.rollout.n={n} must be at least 2 for algorithm.adv_estimator='grpo_passk', which "
            "compares the two best responses to a prompt"
        ]
    return []


def _check_correction(tree: Mapping, loss: str) -> list[str]:
    rules, errors = get(tree, _CORRECTION), []
    if not isinstance(rules, Mapping):
        return []
    bypass = rules["bypass_mode"]
    asked = [key for key in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold") if rules[key] is not None]
    asked += ["bypass_mode"] if bypass else []
    if asked and not get(tree, "actor_rollout_ref.rollout.calculate_log_probs"):
        errors.append(
            f"{_CORRECTION}.{asked[0]}={rules[asked[0]]!r} needs the rollout's log-probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if loss == "bypass_mode" and not bypass:
        errors.append(f"{_LOSS}='bypass_mode' needs {_CORRECTION}.bypass_mode=True")
    if bypass and loss not in ("vanilla", "bypass_mode"):
        errors.append(
            f"{_CORRECTION}.bypass_mode=True has a loss of its own, chosen by {_CORRECTION}.loss_type, and {_LOSS}="
            f"{loss!r} would not be used; leave one of them out"
        )
    if bypass and rules["rollout_is_batch_normalize"]:
        errors.append(
            f"{_CORRECTION}.rollout_is_batch_normalize=True divides by a mean over the batch, which a micro-batch of "
            "bypass_mode does not know; set it to False"
        )
    return errors
