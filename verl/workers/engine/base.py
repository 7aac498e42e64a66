# SPDX-License-Identifier: Apache-2.0
"""The contract between a worker and a training engine, and the registry of engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict

from verl.utils.device import get_device_name

__all__ = ["BaseEngine", "EngineRegistry", "LossFunction"]

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


class BaseEngine(ABC):
    """One model with its optimizer, spread over the ranks of the process group.

    Data is a TensorDict of one data-parallel rank: jagged ``input_ids`` [B, j] and whatever the loss function reads. A
    loss function is ``loss(model_output, data, dp_group) -> (scalar, metrics)``; its scalar is normalised by the counts
    of the whole optimiser step and multiplied by the data-parallel size, so that the sum over micro-batches and the
    mean over data-parallel ranks is the loss of the step.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Build the model, load its weights, build the optimizer unless ``forward_only``. Collective."""

    @abstractmethod
    def train_mode(self, **kwargs: Any) -> AbstractContextManager:
        """Context in which the model trains (loaded to the device, dropout on)."""

    @abstractmethod
    def eval_mode(self, **kwargs: Any) -> AbstractContextManager:
        """Context in which the model is only evaluated."""

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a batch in micro-batches and accumulate gradients (unless ``forward_only``).

        Returns:
            ``model_output``: jagged [B, j] tensors in the order of ``data`` (only if ``forward_only``), ``metrics``:
            what the loss function reported, merged over micro-batches and data-parallel ranks, ``loss``: the step's
            loss, and ``loss_tokens``: the tokens of the whole step that it counts.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Set every gradient to zero."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and apply the gradients; returns their norm before clipping. A norm that is not finite applies
        nothing.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the learning rate; returns the one that the next step uses."""

    @abstractmethod
    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """(hub name, whole tensor) one by one, on every rank, and the adapter's configuration (None). Collective."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Rank among the groups that hold different data."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Number of groups that hold different data."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """Process group of the ranks that hold different data and the same part of the model."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this is the one rank of its model-parallel group whose outputs are collected."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts of the state to ``"cpu"`` or to the ``"device"``."""

    @abstractmethod
    def save_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        """Write what a resumed run needs. Collective."""

    @abstractmethod
    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        """Read what :meth:`save_checkpoint` wrote. Collective."""

    def train_batch(self, data: TensorDict, loss_function: LossFunction) -> dict[str, Any]:
        """One optimiser step on ``data``; adds ``grad_norm`` to the outputs of :meth:`forward_backward_batch`.

        Without a loss token in the whole step nothing is applied and ``grad_norm`` is None (docs/objective.md, section
        1): weights would decay and follow their momentum, and the router losses would train alone.
        """
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["grad_norm"] = self.optimizer_step() if outputs["loss_tokens"] else None
        return outputs

    def infer_batch(self, data: TensorDict, loss_function: LossFunction | None = None) -> dict[str, Any]:
        """Evaluate ``data`` without a graph."""
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


class EngineRegistry:
    """Engines by model type (``language_model``, ``value_model``), backend and device."""

    _engines: dict[tuple[str, str, str], type[BaseEngine]] = {}

    @classmethod
    def register(cls, model_type: str, backend: str, device: str | Sequence[str]) -> Callable:
        """Class decorator that makes an engine known; ``device`` is a device name or several."""

        def add(engine: type[BaseEngine]) -> type[BaseEngine]:
            for name in [device] if isinstance(device, str) else device:
                cls._engines[model_type, backend, name] = engine
            return engine

        return add

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """The engine for this process's device.

        Raises:
            ValueError: names the registered engines when there is none.
        """
        key = (model_type, backend, get_device_name())
        if key not in cls._engines:
            known = ", ".join("/".join(k) for k in sorted(cls._engines))
            raise ValueError(f"no engine for model type/backend/device {'/'.join(key)}; registered: {known}")
        return cls._engines[key]

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Construct the engine of :meth:`get_engine_cls` with the other arguments."""
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)
