# SPDX-License-Identifier: Apache-2.0
"""From the `reward` config to a reward manager, and from a reward manager to token-level scores."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.utils.dataset.common import as_plain_dict
from verl.utils.file_function import FileFunction
from verl.utils.reward_score import default_compute_score
from verl.workers.config.reward import with_response_length
from verl.workers.reward_manager import get_reward_manager_cls

__all__ = ["compute_reward", "get_custom_reward_fn", "load_reward_manager", "reward_metrics"]

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
    return FileFunction(_KEY, custom["path"], custom.get("name") or "compute_score", custom.get("reward_kwargs") or {})


def load_reward_manager(config: Mapping[str, Any], tokenizer: Any, num_examine: int = 0) -> Any:
    """Build the reward manager that the config names.

    Args:
        config: the whole config: reward.reward_manager.name, reward.reward_kwargs, reward.custom_reward_function,
            data.reward_fn_key, and data.max_response_length where the manager needs a length and is given none.
        tokenizer: decodes the responses.
        num_examine: how many responses of each data source to print per batch.

    Raises:
        ValueError: an unknown manager, a reward_kwarg it does not take, or a bad custom function.
    """
    reward = config.get("reward") or {}
    manager = as_plain_dict(reward.get("reward_manager"))
    name, data = manager.get("name") or "naive", config.get("data") or {}
    kwargs = with_response_length(name, as_plain_dict(reward.get("reward_kwargs")), data.get("max_response_length"))
    return get_reward_manager_cls(name)(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config) or default_compute_score,
        reward_fn_key=data.get("reward_fn_key") or "data_source",
        **kwargs,
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


def reward_metrics(reward_fn: Callable[..., Any]) -> dict[str, float]:
    """Counts of the reward function's last call, see `RewardManager`; empty for a function that keeps none."""
    return dict(getattr(reward_fn, "metrics", {}))
