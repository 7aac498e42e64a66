# SPDX-License-Identifier: Apache-2.0
"""What ``reward.reward_kwargs`` may hold, by reward manager."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.base_config import BaseConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.names import name_problems

REWARD_EXECUTORS = ("thread", "process")

_KWARGS = "reward.reward_kwargs"


@dataclass
class ScoringConfig(BaseConfig):
    """How single responses are scored.

    ``timeout``: seconds for one response, null for no limit; a response that takes longer scores 0. ``num_workers``:
    responses scored at a time. ``executor``: thread or process; only a process that computes too long can be stopped.
    """

    timeout: float | None = 300.0
    num_workers: int = 1
    executor: str = "thread"

    def _problems(self) -> list[str]:
        problems = name_problems("executor", self.executor, REWARD_EXECUTORS)
        if self.timeout is not None and self.timeout <= 0:
            problems.append(f"timeout={self.timeout:g} must be above 0 seconds, or null for no limit")
        if self.num_workers < 1:
            problems.append(f"num_workers={self.num_workers} must be at least 1")
        return problems


@dataclass
class PrimeScoringConfig(ScoringConfig):
    """As `ScoringConfig`, in processes: by default one for each core but one."""

    num_workers: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) - 1))
    executor: str = "process"


@dataclass
class OverlongBufferConfig(BaseConfig):
    """DAPO's soft punishment of overlong responses (arXiv 2503.14476, equation 13).

    The last ``len`` tokens before ``max_resp_len`` cost up to ``penalty_factor``, growing linearly. ``log`` adds the
    penalty of each response to the extra values. Nothing is required of the other fields while ``enable`` is False.
    """

    enable: bool = False
    len: int | None = None
    penalty_factor: float = 1.0
    log: bool = False

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if not self.enable:
            return problems
        if self.len is None or self.len < 1:
            problems.append(f"len={self.len} must be at least 1 token while enable=True; set enable=False for none")
        if self.penalty_factor < 0:
            problems.append(f"penalty_factor={self.penalty_factor:g} must not be negative; it is subtracted")
        return problems


@dataclass
class DapoScoringConfig(ScoringConfig):
    """As `ScoringConfig`, with the overlong penalty; ``max_resp_len`` is the length at which it is full."""

    overlong_buffer_cfg: OverlongBufferConfig | None = None
    max_resp_len: int | None = None

    def _problems(self) -> list[str]:
        problems = super()._problems()
        buffer = self.overlong_buffer_cfg
        if buffer is None or not buffer.enable:
            return problems
        if self.max_resp_len is None:
            problems.append("max_resp_len must be set while overlong_buffer_cfg.enable=True")
        elif buffer.len is not None and buffer.len > self.max_resp_len:
            problems.append(
                f"overlong_buffer_cfg.len={buffer.len} is more than max_resp_len={self.max_resp_len}; use at most "
                f"{self.max_resp_len}"
            )
        return problems


_CONFIGS: dict[str, type[ScoringConfig]] = {
    "naive": ScoringConfig,
    "dapo": DapoScoringConfig,
    "prime": PrimeScoringConfig,
}

REWARD_MANAGERS = (*_CONFIGS, "batch")


def read_reward_kwargs(name: str, kwargs: Mapping[str, Any]) -> ScoringConfig:
    """``reward.reward_kwargs`` of the manager naive, dapo or prime as its typed config.

    Raises:
        ValueError: keys that the manager has no use for, and values it refuses; each with its full key.
    """
    known = [entry.name for entry in fields(_CONFIGS[name]) if entry.name != "_target_"]
    unknown = [key for key in kwargs if key not in known]
    if unknown:
        names = ", ".join(f"{_KWARGS}.{key}" for key in sorted(unknown))
        raise ValueError(
            f"{names}: the reward manager {name!r} has no use for it; leave it out (it takes {', '.join(known)})"
        )
    built: ScoringConfig = omega_conf_to_dataclass(kwargs, _CONFIGS[name], path=_KWARGS)
    return built


def reward_kwargs_problem(name: str, kwargs: Mapping[str, Any], max_response_length: int) -> str | None:
    """What `read_reward_kwargs` refuses, in words; the other managers' kwargs are theirs to check."""
    try:
        if name in _CONFIGS:
            read_reward_kwargs(name, with_response_length(name, kwargs, max_response_length))
    except ValueError as error:
        return str(error)
    return None


def with_response_length(name: str, kwargs: Mapping[str, Any], max_response_length: int | None) -> dict[str, Any]:
    """``kwargs`` with ``max_resp_len`` from the data's longest response where dapo is not given it."""
    kwargs = dict(kwargs)
    if name == "dapo" and kwargs.get("max_resp_len") is None:
        kwargs["max_resp_len"] = max_response_length
    return kwargs
