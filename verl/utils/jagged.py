# SPDX-License-Identifier: Apache-2.0
"""Row operations on jagged nested tensors of shape [B, j, ...].

torch lets two jagged tensors meet in one operation only when they hold the very same ``offsets`` object. Everything
here therefore keeps sharing: tensors that shared their offsets before a selection or a concatenation share the new
offsets after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.nested._internal.nested_tensor import NestedTensor


def is_jagged(x: object) -> TypeGuard[NestedTensor]:
    """Tell whether ``x`` is a nested tensor with the jagged layout."""
    return isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged


def jagged_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(values [total, ...], offsets [B + 1])`` of a jagged tensor, without holes between its rows.

    Raises:
        ValueError: ``x`` is not jagged, or its ragged dimension is not dimension 1.
    """
    if not is_jagged(x):
        raise ValueError(f"expected a jagged nested tensor [B, j, ...], got {type(x).__name__} (layout not jagged)")
    if x._ragged_idx != 1:
        raise ValueError(f"the ragged dimension must be 1, as in [B, j, ...]; it is {x._ragged_idx}")
    if x.lengths() is not None:
        return jagged_parts(nested_tensor_from_tensor_list(list(x.unbind())))
    return x.values(), x.offsets()


def make_jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Build the jagged tensor [B, j, ...] of ``values`` [total, ...] and int64 ``offsets`` [B + 1]. Differentiable."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def nested_tensor_from_tensor_list(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join B tensors [j_i, ...] into one jagged tensor [B, j, ...], also where all lengths are equal. Differentiable.

    Raises:
        ValueError: the list is empty, or a tensor is a scalar.
    """
    if not tensors:
        raise ValueError("cannot build a jagged tensor from an empty list: its dtype and width are unknown")
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("every tensor of the list needs at least one dimension (its length); got a scalar")
    lengths = torch.tensor([t.shape[0] for t in tensors], device=tensors[0].device)
    return make_jagged(torch.cat(list(tensors)), offsets_from_lengths(lengths))


def offsets_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Turn int lengths [B] into int64 offsets [B + 1], starting with 0."""
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))


class JaggedRowPick:
    """Pick rows of several jagged tensors by an int64 index [N], repeats allowed. Differentiable, no loop over rows"""

    def __init__(self, index: torch.Tensor):
        self._index = index
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the jagged tensor [N, j, ...] of the picked rows of ``x`` [B, j, ...]."""
        values, offsets = jagged_parts(x)
        # The plan keeps `offsets` alive, so that its id cannot be taken by another tensor.
        if id(offsets) not in self._plans:
            self._plans[id(offsets)] = (offsets, *self._plan(offsets))
        _, new_offsets, tokens = self._plans[id(offsets)]
        return make_jagged(values.index_select(0, tokens), new_offsets)

    def _plan(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._index.to(offsets.device)
        lengths = offsets.diff()[index]
        new_offsets = offsets_from_lengths(lengths)
        shift = offsets[:-1][index] - new_offsets[:-1]
        shift = torch.repeat_interleave(shift, lengths)
        return new_offsets, shift + torch.arange(shift.shape[0], device=offsets.device)


class JaggedRowRange:
    """Cut rows ``start:stop`` out of several jagged tensors. The rows are copied, never views of the whole batch."""

    def __init__(self, start: int, stop: int):
        self._start, self._stop = start, stop
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor, int, int]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows ``start:stop`` of ``x`` [B, j, ...] as a jagged tensor."""
        values, offsets = jagged_parts(x)
        if id(offsets) not in self._plans:
            first, last = int(offsets[self._start]), int(offsets[self._stop])
            new_offsets = offsets[self._start : self._stop + 1] - first
            self._plans[id(offsets)] = (offsets, new_offsets, first, last)
        _, new_offsets, first, last = self._plans[id(offsets)]
        return make_jagged(values[first:last].clone(), new_offsets)


class JaggedConcat:
    """Concatenate jagged tensors along the rows; call it once per column, with the same pieces each time."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], tuple[list[torch.Tensor], torch.Tensor]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the jagged tensor [sum of B_i, j, ...] of jagged tensors [B_i, j, ...]. Differentiable."""
        parts = [jagged_parts(x) for x in tensors]
        offsets = [o for _, o in parts]
        key = tuple(id(o) for o in offsets)
        if key not in self._plans:
            lengths = torch.cat([o.diff() for o in offsets])
            self._plans[key] = (offsets, offsets_from_lengths(lengths))
        return make_jagged(torch.cat([v for v, _ in parts]), self._plans[key][1])
