# SPDX-License-Identifier: Apache-2.0
"""Reward managers by name."""

from collections.abc import Callable

__all__ = ["get_reward_manager_cls", "register"]

_MANAGERS: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a reward manager known as `reward.reward_manager.name=name`.

    Raises:
        ValueError: another class has the name.
    """

    def add(cls: type) -> type:
        if _MANAGERS.get(name, cls) is not cls:
            raise ValueError(f"the reward manager name {name!r} is taken by {_MANAGERS[name].__name__}")
        _MANAGERS[name] = cls
        return cls

    return add


def get_reward_manager_cls(name: str) -> type:
    """The class registered as `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in _MANAGERS:
        known = ", ".join(sorted(_MANAGERS))
        raise ValueError(f"reward.reward_manager.name={name!r} is unknown; known are {known}")
    return _MANAGERS[name]
