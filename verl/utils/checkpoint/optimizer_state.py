# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of a distributed checkpoint, read into an optimizer of another make-up.

A checkpoint holds a tensor for each kind of state of each parameter, cut like the parameter, and beside them one tree
that copies the saving run's optimizer: a branch for each optimizer of a chain (dense and expert parameters have one
each with expert parallelism, and share one without), a list of parameter groups, other forms for the distributed
optimizer and the plain one. The tensors fit any layout; the tree does not. So the tree is built from the optimizer at
hand, and of the stored one only the number of steps is taken. What else is in there (rates, betas, weight decay) are
settings, which follow the configuration.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["requested_state", "restore_steps", "stored_names"]

# Names that one tensor goes by: the distributed optimizer's main weights, those of the plain mixed-precision optimizer,
# and the parameter, which is its own main weight with the plain optimizer in float32.
_MAIN = re.compile(r"^optimizer\.state\.(?:fp32_)?param\.(.*)$")


def stored_names(state: Any) -> set[str]:
    """The names in a checkpoint of all tensors of a (nested) sharded state."""
    return {name for entry in _entries(state) for name in _names(entry)}


def _names(entry: Any) -> list[str]:
    if not hasattr(entry, "build"):
        return [entry.key]
    # A parameter that is stored in parts, such as the two halves of a gated layer; a part may have a name of its own.
    return [part.key for part in _entries(entry.build())]


def _entries(state: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _entries(value)


def requested_state(state: Any, stored: dict[str, Any]) -> Any:
    """An optimizer's ``sharded_state_dict`` with the names that its tensors have in a checkpoint, to be loaded.

    Args:
        state: made with ``is_loading=True``. Its values that are no tensors come back from the load as they are now.
        stored: the checkpoint's tensors by name; their ``dtype`` is looked at.
    """
    for entry in _entries(state):
        match = _MAIN.match(entry.key)
        if match is None:
            continue
        own, name = entry.key, match.group(1)
        for entry.key in (own, f"optimizer.state.param.{name}", f"optimizer.state.fp32_param.{name}", name):
            found = [stored.get(part) for part in _names(entry)]
            if all(part is not None and part.dtype == torch.float32 for part in found):
                break
        else:
            entry.key = own
    return _kept(state)


def _kept(state: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    if isinstance(state, dict) and state:
        return {key: _kept(value) for key, value in state.items()}
    if isinstance(state, list) and state:
        return [_kept(value) for value in state]
    return state if isinstance(state, ShardedBase | LocalNonpersistentObject) else LocalNonpersistentObject(state)


def restore_steps(state: Any, stored: Any) -> None:
    """Write the number of optimiser steps in a checkpoint's tree into a loaded state."""
    steps = {float(step) for step in _steps(stored)}
    if not steps:
        return  # an optimizer that counts none
    assert len(steps) == 1, steps
    step = steps.pop()
    for part in _parts(state):
        tree = part.get("optimizer", part)
        counted = [group for group in tree["param_groups"] if "step" in group]
        for group in counted:
            group["step"] = _like(group["step"], step)
        if not counted and tree.get("state"):
            tree["state"]["common_step"] = torch.tensor(step)


def _parts(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The optimizers of a chain; a chain of one has no branches."""
    return [state] if "optimizer" in state or "param_groups" in state else list(state.values())


def _steps(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("step", "common_step"):
                if value is not None:
                    yield value
            else:
                yield from _steps(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _steps(value)


def _like(old: Any, step: float) -> Any:
    return torch.tensor(step) if isinstance(old, torch.Tensor) else type(old)(step) if old is not None else step
