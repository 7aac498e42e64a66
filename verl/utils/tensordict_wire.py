# SPDX-License-Identifier: Apache-2.0
"""Send TensorDicts between processes fast.

Plain pickling of a TensorDict costs about 0.1 ms per tensor, more per jagged tensor, and 0.02 ms for every object of a
NonTensorStack. Here the tensors travel as numpy arrays, which Ray moves outside the pickle stream, and the stacks as
lists.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from verl.utils.jagged import is_jagged, jagged_parts, make_jagged

# dtypes that numpy has too; the others (bfloat16, float8) travel as bytes.
_NUMPY_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def make_stack(items: Sequence) -> NonTensorStack:
    """Build a NonTensorStack with one object per row. Lists stay objects: they are not taken for a second dimension."""
    return NonTensorStack(*[NonTensorData(data=item) for item in items])


def unwrap(value: Any) -> Any:
    """Return a column as plain Python: NonTensorStack as a list, NonTensorData as its object, a tensor as it is."""
    if isinstance(value, NonTensorStack):
        return [unwrap(item) for item in value.tensordicts]
    return value.data if isinstance(value, NonTensorData) else value


def to_wire(x: Any) -> Any:
    """Wrap a TensorDict for sending: the receiver unpickles a TensorDict. Anything else is returned as it is."""
    return _Wire(x) if isinstance(x, TensorDictBase) else x


class _Wire:
    """Pickles in place of the TensorDict it holds; unpickles as a TensorDict of CPU tensors without graph."""

    def __init__(self, td: TensorDictBase):
        self._td = td

    def __reduce__(self) -> tuple:
        return unpack_tensordict, pack_tensordict(self._td)


def _pack_tensor(x: torch.Tensor) -> tuple[np.ndarray, torch.dtype | None, tuple[int, ...]]:
    x = x.detach().cpu().contiguous()
    if x.dtype in _NUMPY_DTYPES:
        return x.numpy(), None, ()
    return x.reshape(-1).view(torch.uint8).numpy(), x.dtype, tuple(x.shape)


def _unpack_tensor(array: np.ndarray, dtype: torch.dtype | None, shape: tuple[int, ...]) -> torch.Tensor:
    # Ray hands out read-only memory that other processes map too: writing into it must not be possible.
    x = torch.from_numpy(array if array.flags.writeable else array.copy())
    return x if dtype is None else x.view(dtype).reshape(shape)


def pack_tensordict(td: TensorDictBase) -> tuple[tuple[int, ...], list[tuple[str, str, Any]], list[tuple]]:
    """Turn a TensorDict into plain picklable parts: (batch size, columns, table of shared jagged offsets)."""
    columns: list[tuple[str, str, Any]] = []
    offset_table: dict[int, torch.Tensor] = {}
    for key in td.keys():
        value = td.get(key)
        if is_jagged(value):
            values, offsets = jagged_parts(value)
            offset_table.setdefault(id(offsets), offsets)
            number = list(offset_table).index(id(offsets))
            columns.append((key, "jagged", (number, _pack_tensor(values))))
        elif isinstance(value, torch.Tensor):
            columns.append((key, "dense", _pack_tensor(value)))
        elif isinstance(value, NonTensorStack):
            columns.append((key, "stack", unwrap(value)))
        elif isinstance(value, NonTensorData):
            columns.append((key, "data", value.data))
        else:
            columns.append((key, "nested", pack_tensordict(value)))
    return tuple(td.batch_size), columns, [_pack_tensor(offsets) for offsets in offset_table.values()]


def unpack_tensordict(
    batch_size: tuple[int, ...], columns: list[tuple[str, str, Any]], offset_table: list[tuple]
) -> TensorDict:
    """Rebuild the TensorDict that :func:`pack_tensordict` took apart; jagged columns share offsets as before."""
    offsets = [_unpack_tensor(*packed) for packed in offset_table]
    source: dict[str, Any] = {}
    for key, kind, value in columns:
        if kind == "jagged":
            source[key] = make_jagged(_unpack_tensor(*value[1]), offsets[value[0]])
        elif kind == "dense":
            source[key] = _unpack_tensor(*value)
        elif kind == "stack":
            source[key] = make_stack(value)
        elif kind == "data":
            source[key] = NonTensorData(data=value, batch_size=batch_size)
        else:
            source[key] = unpack_tensordict(*value)
    return TensorDict(source, batch_size=batch_size)
