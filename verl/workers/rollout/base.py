# SPDX-License-Identifier: Apache-2.0
"""The contract of a rollout engine, and the table of engines."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from verl.protocol import DataProto

_ROLLOUTS = {"hf": "verl.workers.rollout.hf_rollout.HFRollout"}
_MODES = ("sync", "async")


class BaseRollout(ABC):
    """Generates responses with a copy of the policy that the training engine keeps up to date.

    Args:
        config: `actor_rollout_ref.rollout` (RolloutConfig).
        model_config: `actor_rollout_ref.model` (HFModelConfig).
        device_mesh: the mesh a rollout that is itself sharded lives on; None for one model per worker.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None):
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh

    @abstractmethod
    def generate_sequences(self, prompts: "DataProto") -> "DataProto":
        """Answer every row of a left-padded prompt batch once."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        """Replace all weights by (hub name, tensor) pairs."""

    @abstractmethod
    def resume(self, tags: list[str] | None = None) -> None:
        """Bring what `release` put away back to the device."""

    @abstractmethod
    def release(self) -> None:
        """Free the device memory for training."""


def get_rollout_class(rollout_name: str, mode: str = "sync") -> type[BaseRollout]:
    """The rollout class for `rollout.name` and `rollout.mode`; its module is imported only now.

    Raises:
        ValueError: a name or a mode that does not exist.
    """
    if rollout_name not in _ROLLOUTS:
        raise ValueError(f"rollout.name={rollout_name!r} is not known; known: {', '.join(_ROLLOUTS)}")
    if mode not in _MODES:
        raise ValueError(f"rollout.mode={mode!r} is not known; known: {', '.join(_MODES)}")
    module, _, name = _ROLLOUTS[rollout_name].rpartition(".")
    found: type[BaseRollout] = getattr(importlib.import_module(module), name)
    return found
