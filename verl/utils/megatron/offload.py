# SPDX-License-Identifier: Apache-2.0
"""Moving a Megatron model's parameters, gradients and optimizer state between the accelerator and host memory.

Megatron's data-parallel wrapper keeps parameters and gradients in flat buffers that the parameters are views of.
Whatever is moved is copied to the host and its storage freed in place, so that every view stays a view. A parameter
that is in no buffer is moved the same way: under another device it would get a new gradient accumulator, and Megatron's
hook, which adds its gradient up, would be lost with the old one.
"""

from collections.abc import Iterator
from typing import Any

import torch

from verl.utils.device import get_device_name

__all__ = [
    "free_grads",
    "get_megatron_module_device",
    "has_device_memory",
    "load_grads",
    "load_optimizer",
    "load_params",
    "offload_optimizer",
    "offload_params",
]


def has_device_memory() -> bool:
    """Whether there is a memory beside the host's, so that moving between the two frees something."""
    return get_device_name() != "cpu"


def _buffers(modules: list[Any]) -> Iterator[Any]:
    for module in modules:
        yield from _ddp_buffers(module)


def _ddp_buffers(module: Any) -> list[Any]:
    buffers = getattr(module, "buffers", [])
    return [] if callable(buffers) else [*buffers, *module.expert_parallel_buffers]


def get_megatron_module_device(modules: list[Any]) -> str:
    """Device type that holds the parameters now: ``"cpu"`` for a module without parameters or with freed storage."""
    for buffer in _buffers(modules):
        if buffer.param_data is not None:
            return "cpu" if buffer.param_data.untyped_storage().size() == 0 else buffer.param_data.device.type
    for module in modules:
        for parameter in module.parameters():
            return "cpu" if getattr(parameter, "host_copy", None) is not None else parameter.device.type
    return "cpu"


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _allocate(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _movable(modules: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """(who keeps the copy, the tensor): every buffer of parameters, and every parameter that is in none."""
    for buffer in _buffers(modules):
        if buffer.param_data is not None:
            yield buffer, buffer.param_data
    for parameter in _unbuffered(modules):
        yield parameter, parameter.data


def offload_params(modules: list[Any]) -> None:
    """Copy every parameter to the host and free it on the device; a second call changes nothing."""
    for owner, data in _movable(modules):
        if data.untyped_storage().size():
            owner.host_copy = data.to("cpu", copy=True)
            _free(data)


def load_params(modules: list[Any]) -> None:
    """Undo :func:`offload_params`."""
    for owner, data in _movable(modules):
        if not data.untyped_storage().size():
            _allocate(data)
            data.copy_(owner.host_copy)
            owner.host_copy = None


def _unbuffered(modules: list[Any]) -> Iterator[torch.nn.Parameter]:
    in_buffer = {id(p) for b in _buffers(modules) if b.param_data is not None for p in b.params}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) not in in_buffer:
                whole = parameter.untyped_storage().size() in (0, parameter.numel() * parameter.element_size())
                assert whole, "a parameter outside the buffers shares its storage"
                yield parameter


def free_grads(modules: list[Any]) -> None:
    """Free the gradient buffers; their content is lost."""
    for buffer in _buffers(modules):
        _free(buffer.grad_data)


def load_grads(modules: list[Any]) -> None:
    """Allocate the gradient buffers again, all zero."""
    for buffer in _buffers(modules):
        if not buffer.grad_data.untyped_storage().size():
            _allocate(buffer.grad_data)
            buffer.grad_data.zero_()


def _move_optimizer(optimizer: Any, device: Any) -> None:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in getattr(part, "shard_fp32_from_float16_groups", None) or getattr(
            part, "fp32_from_float16_groups", []
        ):
            for parameter in group:
                if parameter is not None:
                    parameter.grad = None  # of the last step, as large as the weights
                    parameter.data = parameter.data.to(device)
        inner = getattr(part, "optimizer", None)
        for state in inner.state.values() if inner is not None else ():
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim() > 0:
                    state[key] = value.to(device)


def offload_optimizer(optimizer: Any) -> None:
    """Move the optimizer's moments and master weights to the host."""
    _move_optimizer(optimizer, "cpu")


def load_optimizer(optimizer: Any, device: Any) -> None:
    """Move the optimizer's moments and master weights to ``device``."""
    _move_optimizer(optimizer, device)
