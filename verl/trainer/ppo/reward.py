# SPDX-License-Identifier: Apache-2.0
"""From the `reward` config to a reward manager, and from a reward manager to token-level scores."""

import difflib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.utils.dataset.common import as_plain_dict
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import get_reward_manager_cls

__all__ = ["compute_reward", "get_custom_reward_fn", "load_reward_manager"]

_KEY = "reward.custom_reward_function"


def get_custom_reward_fn(config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The user's own score function.

    Args:
        config: the whole config; `reward.custom_reward_function` has path (a Python file), name (default
            "compute_score") and reward_kwargs (given to the function on every call).

    Returns:
        The function, or None when no path is set.

    Raises:
        ValueError: naming the key: the file is missing or cannot be imported, has no such function, or the function is
            a coroutine.
    """
    custom = as_plain_dict((config.get("reward") or {}).get("custom_reward_function"))
    if not custom.get("path"):
        return None
    module = _import_file(custom["path"])
    name = custom.get("name") or "compute_score"
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'no function'}"
        raise ValueError(f"{_KEY}.name={name!r} is not a function of {custom['path']!r}; {hint}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{_KEY}.name={name!r} is a coroutine; a plain function is needed")
    kwargs = custom.get("reward_kwargs") or {}
    return functools.partial(function, **kwargs) if kwargs else function


def _import_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{_KEY}.path={path!r}: the file does not exist")
    spec = importlib.util.spec_from_file_location(f"verl_custom_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{_KEY}.path={path!r}: a Python file (.py) is needed")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"{_KEY}.path={path!r}: importing the file failed: {error!r}") from error
    return module


def load_reward_manager(config: Mapping[str, Any], tokenizer: Any, num_examine: int = 0) -> Any:
    """Build the reward manager that the config names.

    Args:
        config: the whole config: reward.reward_manager.name, reward.reward_kwargs, reward.custom_reward_function,
            data.reward_fn_key.
        tokenizer: decodes the responses.
        num_examine: how many responses of each data source to print per batch.

    Raises:
        ValueError: an unknown manager, a reward_kwarg it does not take, or a bad custom function.
    """
    reward = config.get("reward") or {}
    manager = as_plain_dict(reward.get("reward_manager"))
    cls = get_reward_manager_cls(manager.get("name") or "naive")
    return cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config) or default_compute_score,
        reward_fn_key=(config.get("data") or {}).get("reward_fn_key") or "data_source",
        **as_plain_dict(reward.get("reward_kwargs")),
    )


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, list]]:
    """Score a batch.

    Args:
        data: see the reward manager.
        reward_fn: a reward manager.

    Returns:
        Token-level scores float32 [B, R], and the extra values per row (lists of length B).
    """
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result["reward_extra_info"]
