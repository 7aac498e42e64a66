# SPDX-License-Identifier: Apache-2.0
"""Values that have the right type and make no sense: numbers that are none, counts below nought, names left empty.

Keys whose classes in ``verl.workers.config`` check themselves are not repeated here.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.utils.config import compose_config, flatten, is_free_form, to_tree

__all__ = ["with_values", "without_followers"]

_ACTOR = "actor_rollout_ref.actor"

# Keys that name something: a column, a folder, a function.
_TEXTS = {
    "ppo_trainer": ("data.prompt_key", "data.reward_fn_key", "trainer.default_local_dir"),
    "sft_trainer_engine": ("data.messages_key", "trainer.default_local_dir"),
    "generation": ("data.prompt_key", "data.output_path"),
    "evaluation": ("data.response_key", "data.data_source_key", "data.reward_model_key"),
}


def _at_least(limit: float) -> tuple[str, Callable[[Any], bool]]:
    return f"must be {limit} or more", lambda value: value >= limit


_COUNT = ("must be null or a whole number of at least 1", lambda value: value >= 1 and float(value).is_integer())
_SEED = ("must be null or a whole number", lambda value: isinstance(value, int))
_ABOVE_0 = ("must be above 0", lambda value: value > 0)
_ROWS = ("keeps no row; use -1 for all of them", lambda value: value != 0)
_WARMUP = ("must be 0 or more, or -1 for lr_warmup_steps_ratio", lambda value: value >= -1)

_OPTIM = {
    "clip_grad": ("must be 0 or more; 0 clips nothing", lambda value: value >= 0),
    "weight_decay": _at_least(0),
    "lr_warmup_init": _at_least(0),
    "lr_warmup_steps": _WARMUP,
    "lr_decay_steps": _COUNT,
    "lr_wsd_decay_steps": _COUNT,
}
_RULES: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "ppo_trainer": {
        "data.seed": _SEED,
        "data.train_max_samples": _ROWS,
        "data.val_max_samples": ("keeps no row; use -1 for all of them, or data.val_files=null", _ROWS[1]),
        "data.dataloader_num_workers": _at_least(0),
        "trainer.num_cpus_per_worker": _ABOVE_0,
        "trainer.critic_warmup": _at_least(0),
        f"{_ACTOR}.loss_scale_factor": _ABOVE_0,
        f"{_ACTOR}.kl_loss_coef": _at_least(0),
        "algorithm.kl_ctrl.kl_coef": _at_least(0),
        "actor_rollout_ref.model.mtp.mtp_loss_scaling_factor": _at_least(0),
        **{f"{_ACTOR}.optim.{name}": rule for name, rule in _OPTIM.items()},
    },
    "sft_trainer_engine": {
        "data.train_max_samples": _ROWS,
        "data.val_max_samples": ("keeps no row; use -1 for all of them, or data.val_files=null", _ROWS[1]),
        "data.num_workers": _at_least(0),
        "model.mtp.mtp_loss_scaling_factor": _at_least(0),
        **{f"optim.{name}": rule for name, rule in _OPTIM.items()},
    },
    "generation": {"data.max_samples": _ROWS, "trainer.num_cpus_per_worker": _ABOVE_0},
    "evaluation": {},
}
_CRITIC_RULES = {
    "critic.loss_scale_factor": _ABOVE_0,
    **{f"critic.optim.{name}": rule for name, rule in _OPTIM.items()},
}


def with_values(errors: list[str], tree: Mapping, config_name: str) -> list[str]:
    """``errors`` and what is wrong with single values, each key once.

    Args:
        errors: sentences that begin with their key.
        tree: the config.
        config_name: its name.
    """
    found = list(errors)
    for problem in _problems(tree, config_name):
        key = problem.partition("=")[0]
        if not any(f"{key}=" in error for error in found):
            found.append(problem)
    return without_followers(found, tree, config_name)


def _problems(tree: Mapping, config_name: str) -> Iterator[str]:
    has_critic = config_name == "ppo_trainer" and uses_critic(tree)
    for key, value in flatten(tree).items():
        numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, float)]
        is_idle = key.startswith("critic.") and not has_critic
        # What is handed on may be without a limit.
        wrong = any(map(math.isnan, numbers)) if is_free_form(key) else not all(map(math.isfinite, numbers))
        if wrong and not is_idle:
            yield f"{key}={value!r} is not a finite number"
    for key in _TEXTS[config_name]:
        value = get(tree, key)
        if not isinstance(value, str) or not value.strip():
            yield f"{key}={value!r} is empty; it must be text"
    rules = _RULES[config_name] | (_CRITIC_RULES if has_critic else {})
    for key, (words, is_right) in rules.items():
        value = get(tree, key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_right(value):
            yield f"{key}={value!r} {words}"
    yield from _engine_and_optimizer(tree, config_name, has_critic)


def _engine_and_optimizer(tree: Mapping, config_name: str, has_critic: bool) -> Iterator[str]:
    """What two keys say together."""
    pairs = {
        "ppo_trainer": [(f"{_ACTOR}.megatron", f"{_ACTOR}.optim"), *[("critic.megatron", "critic.optim")] * has_critic],
        "sft_trainer_engine": [("engine", "optim")],
    }
    for engine, optim in pairs.get(config_name, ()):
        if get(tree, f"{engine}.dtype") == "float64" and get(tree, f"{engine}.use_distributed_optimizer"):
            yield (
                f"{engine}.use_distributed_optimizer=True keeps its gradients in float32, and {engine}.dtype="
                "'float64'; set it to False"
            )
        node = f"{optim.removesuffix('optim')}checkpoint.save_contents"
        if get(tree, node) == [] and get(tree, "trainer.save_freq") > 0:
            yield f"{node}=[] makes checkpoints of nothing; name parts, or set trainer.save_freq=-1"
        start, rate = get(tree, f"{optim}.lr_warmup_init"), get(tree, f"{optim}.lr")
        if isinstance(start, int | float) and isinstance(rate, int | float) and start > rate:
            yield f"{optim}.lr_warmup_init={start!r} is above {optim}.lr={rate!r}, to which the rate warms up"


@functools.cache
def _followers(config_name: str) -> Mapping[str, str]:
    """Keys that take their value from another key unless they are set: follower -> the other."""
    found = {}
    for key, value in flatten(to_tree(compose_config(config_name), resolve=False)).items():
        match = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,.*)?\}", str(value))
        if match:
            other = match.group(1)
            found[key] = key.rpartition(".")[0] + other if other.startswith(".") else other
    return found


def without_followers(errors: list[str], tree: Mapping, config_name: str) -> list[str]:
    """``errors`` without those about keys that only repeat another key's wrong value."""
    begun = {error.partition("=")[0] for error in errors}
    followers = _followers(config_name) if len(errors) > 1 else {}

    def repeats(key: str) -> bool:
        other, seen = followers.get(key), get(tree, key)
        while other is not None:
            if other in begun and repr(get(tree, other)) == repr(seen):  # nan differs from itself
                return True
            other = followers.get(other)
        return False

    return [error for error in errors if not repeats(error.partition("=")[0])]
