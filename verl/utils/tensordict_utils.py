# SPDX-License-Identifier: Apache-2.0
"""Work with TensorDicts of batch size [B] that hold dense tensors, jagged tensors, lists and metadata.

A column is one of four things: a dense tensor [B, ...]; a jagged tensor [B, j, ...]; a ``NonTensorStack``, one Python
object per row; a ``NonTensorData``, one Python object for the whole batch (metadata, such as the temperature). A nested
TensorDict of the same batch size is treated column by column.

TensorDict's own slicing, stacking and pickling are wrong or slow for some of these (slices of jagged tensors are views
that pickle the whole batch; stacks pickle object by object), so the functions below are used instead.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from verl.utils.jagged import (
    JaggedConcat,
    JaggedRowPick,
    JaggedRowRange,
    is_jagged,
    jagged_parts,
    nested_tensor_from_tensor_list,
)
from verl.utils.tensordict_wire import make_stack, to_wire, unwrap

__all__ = [
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_tensordict",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "iterate_indices",
    "make_iterator",
    "make_stack",
    "nearest_multiples",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "same_value",
    "slice_tensordict",
    "to_row_index",
    "to_wire",
    "union_tensor_dict",
    "unpad",
]

_MISSING = object()


def nearest_multiples(size: int, divisor: int) -> str:
    """Write the positive multiples of ``divisor`` next to ``size``, for error messages: "6 or 8"."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


# ---- building and reading -------------------------------------------------------------------------------------------
def assign_non_tensor_data(tensor_dict: TensorDictBase, key: str, val: Any) -> TensorDictBase:
    """Set one Python object (also a list) as metadata of the whole batch, in place."""
    entry: Any = NonTensorData(data=val, batch_size=tensor_dict.batch_size)  # its class hides that it is a collection
    tensor_dict.set(key, entry)
    return tensor_dict


def assign_non_tensor_stack(tensor_dict: TensorDictBase, key: str, val: Sequence) -> TensorDictBase:
    """Set one Python object per row, in place.

    Raises:
        ValueError: ``val`` does not have as many items as the batch has rows.
    """
    rows = tensor_dict.batch_size[0]
    if len(val) != rows:
        raise ValueError(
            f"column '{key}' has {len(val)} items but the batch has {rows} rows: give one item per row, or use "
            "assign_non_tensor_data for a list that belongs to the whole batch"
        )
    tensor_dict.set(key, make_stack(val))
    return tensor_dict


def assign_non_tensor(tensor_dict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
    """Set several non-tensor columns in place: a list or NonTensorStack is one object per row, all else metadata."""
    for key, val in kwargs.items():
        if isinstance(val, NonTensorStack):
            assign_non_tensor_stack(tensor_dict, key, unwrap(val))
        elif isinstance(val, list):
            assign_non_tensor_stack(tensor_dict, key, val)
        else:
            assign_non_tensor_data(tensor_dict, key, val.data if isinstance(val, NonTensorData) else val)
    return tensor_dict


def get_tensordict(tensor_dict: dict[str, Any], non_tensor_dict: dict[str, Any] | None = None) -> TensorDict:
    """Build a TensorDict of batch size [B].

    Args:
        tensor_dict: columns; dense or jagged tensors of B rows, lists, object arrays or NonTensorStacks of B items.
        non_tensor_dict: metadata of the whole batch.

    Raises:
        ValueError: no column, or a column whose number of rows differs from the others'.
    """
    rows: dict[str, int] = {k: v.size(0) if isinstance(v, torch.Tensor) else len(v) for k, v in tensor_dict.items()}
    if not rows:
        raise ValueError("get_tensordict needs at least one column to know the number of rows")
    first = next(iter(rows))
    for key, num in rows.items():
        if num != rows[first]:
            raise ValueError(f"column '{key}' has {num} rows but column '{first}' has {rows[first]}")
    tensors = {k: v for k, v in tensor_dict.items() if isinstance(v, torch.Tensor | TensorDictBase)}
    result = TensorDict(tensors, batch_size=[rows[first]])
    for key, val in tensor_dict.items():
        if key not in tensors:
            assign_non_tensor_stack(result, key, unwrap(val) if isinstance(val, NonTensorStack) else list(val))
    for key, val in (non_tensor_dict or {}).items():
        assign_non_tensor_data(result, key, val.data if isinstance(val, NonTensorData) else val)
    return result


def get(tensor_dict: TensorDictBase, key: str, default: Any = None) -> Any:
    """Return a column as plain Python: tensor as is, NonTensorStack as a list, NonTensorData as its object."""
    value = tensor_dict.get(key, None)
    return default if value is None else unwrap(value)


def get_non_tensor_data(data: TensorDictBase, key: str, default: Any) -> Any:
    """Return the metadata ``key`` of the batch, or ``default`` where it is not set."""
    return get(data, key, default)


def get_keys(tensor_dict: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Return a shallow TensorDict with only these columns. Raises KeyError naming the missing ones."""
    keys = list(keys)
    _check_keys(tensor_dict, keys)
    return tensor_dict.select(*keys)


def pop(tensor_dict: TensorDictBase, key: str, default: Any = _MISSING) -> Any:
    """Remove a column and return it as :func:`get` does. Raises KeyError where it is missing and no default given."""
    if default is _MISSING:
        _check_keys(tensor_dict, [key])
    value = get(tensor_dict, key, default)
    if key in tensor_dict.keys():
        tensor_dict.del_(key)
    return value


def pop_keys(tensor_dict: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Move these columns into a new TensorDict, which is returned. Raises KeyError naming the missing ones."""
    keys = list(keys)
    popped = get_keys(tensor_dict, keys)
    for key in keys:
        tensor_dict.del_(key)
    return popped


def _check_keys(tensor_dict: TensorDictBase, keys: Iterable[str]) -> None:
    missing = [key for key in keys if key not in tensor_dict.keys()]
    if missing:
        raise KeyError(f"columns {missing} are not in the batch; it has {sorted(tensor_dict.keys())}")


# ---- selecting rows -------------------------------------------------------------------------------------------------
def _map_rows(
    td: TensorDictBase, rows: int, dense: Callable, jagged: Callable, items: Callable[[list], list]
) -> TensorDict:
    """Build a TensorDict of ``rows`` rows; the three functions select the rows of one column of each kind."""
    columns: dict[str, Any] = {}
    for key in td.keys():
        value = td.get(key)
        if is_jagged(value):
            columns[key] = jagged(value)
        elif isinstance(value, torch.Tensor):
            columns[key] = dense(value)
        elif isinstance(value, NonTensorStack):
            columns[key] = NonTensorStack(*items(value.tensordicts)) if rows else None
        elif isinstance(value, NonTensorData):
            columns[key] = NonTensorData(data=value.data, batch_size=[rows])
        else:
            columns[key] = _map_rows(value, rows, dense, jagged, items)
    # A stack of no rows does not exist in TensorDict: in an empty batch the column is left out.
    return TensorDict({k: v for k, v in columns.items() if v is not None}, batch_size=[rows], device=td.device)


def to_row_index(indices: Any, rows: int) -> torch.Tensor:
    """Turn row numbers or a bool mask [B] into an int64 index [N] without negative numbers."""
    index = torch.as_tensor(indices)
    if index.dtype == torch.bool:
        if index.shape != (rows,):
            raise ValueError(f"a row mask for {rows} rows must have shape [{rows}], got {list(index.shape)}")
        return index.nonzero().squeeze(1)
    index = index.long().reshape(-1)
    if index.numel() and not (-rows <= int(index.min()) and int(index.max()) < rows):
        raise IndexError(f"row indices run from {int(index.min())} to {int(index.max())}, the batch has {rows} rows")
    return index % max(rows, 1)


def index_select_tensor_dict(batch: TensorDictBase, indices: Any) -> TensorDict:
    """Select rows, in the order given.

    Args:
        batch: TensorDict of B rows.
        indices: list, array or tensor of row numbers [N] (negative ones count from the end), or a bool mask [B].

    Raises:
        IndexError: a row number is out of range.
        ValueError: a mask of the wrong length.
    """
    index = to_row_index(indices, batch.batch_size[0])
    order = index.tolist()
    return _map_rows(
        batch,
        len(order),
        dense=lambda x: x.index_select(0, index.to(x.device)),
        jagged=JaggedRowPick(index),
        items=lambda xs: [xs[i] for i in order],
    )


def slice_tensordict(batch: TensorDictBase, start: int, stop: int) -> TensorDict:
    """Copy rows ``start:stop``. Copies, because a view would pickle the storage of the whole batch."""
    start, stop, _ = slice(start, stop).indices(batch.batch_size[0])
    stop = max(start, stop)
    return _map_rows(
        batch,
        stop - start,
        dense=lambda x: x[start:stop].clone(),
        jagged=JaggedRowRange(start, stop),
        items=lambda xs: xs[start:stop],
    )


def chunk_tensordict(td: TensorDictBase, chunks: int) -> list[TensorDict]:
    """Cut B rows into ``chunks`` equal consecutive pieces (copies).

    Raises:
        ValueError: B is not divisible by ``chunks``; the message names the nearest right sizes.
    """
    rows = td.batch_size[0]
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if rows % chunks or rows == 0:
        raise ValueError(
            f"cannot cut a batch of {rows} rows into {chunks} equal pieces: use {nearest_multiples(rows, chunks)} rows"
        )
    size = rows // chunks
    return [slice_tensordict(td, i * size, (i + 1) * size) for i in range(chunks)]


def make_iterator(
    tensordict: TensorDictBase,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Iterate over mini-batches of ``mini_batch_size`` rows, ``epochs`` times.

    With ``dataloader_kwargs={"shuffle": True}`` each epoch has its own order. The orders depend on ``seed`` only, so
    that the ranks of a model-parallel group agree; without a seed they come from torch's global generator.

    Raises:
        ValueError: the rows are not divisible by ``mini_batch_size``, or an option other than ``shuffle`` is given.
    """
    orders = iterate_indices(tensordict.batch_size[0], mini_batch_size, epochs, seed, dataloader_kwargs)
    return (index_select_tensor_dict(tensordict, index) for index in orders)


def iterate_indices(
    rows: int,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[torch.Tensor]:
    """Return the row numbers [mini_batch_size] of each mini-batch that :func:`make_iterator` would yield."""
    options = dict(dataloader_kwargs or {})
    shuffle = bool(options.pop("shuffle", False))
    if options:
        raise ValueError(f"dataloader_kwargs knows only 'shuffle', got {sorted(options)} too")
    if mini_batch_size < 1 or rows == 0 or rows % mini_batch_size:
        hint = "" if mini_batch_size < 1 else f": use a batch of {nearest_multiples(rows, mini_batch_size)} rows"
        raise ValueError(f"a batch of {rows} rows cannot be cut into mini-batches of {mini_batch_size}{hint}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def orders() -> Iterator[torch.Tensor]:
        for _ in range(epochs):
            order = torch.randperm(rows, generator=generator) if shuffle else torch.arange(rows)
            yield from order.split(mini_batch_size)

    return orders()


def pad_to_divisor(data: TensorDictBase, size_divisor: int) -> tuple[TensorDictBase, int]:
    """Append copies of the first rows (cyclically) until the rows are a multiple of ``size_divisor``.

    Returns the batch and the number of added rows; with 0 added the same object. Raises ValueError on an empty batch.
    """
    rows = data.batch_size[0]
    if rows == 0 or size_divisor < 1:
        raise ValueError(f"cannot pad a batch of {rows} rows to a multiple of {size_divisor}")
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return index_select_tensor_dict(data, torch.arange(rows + pad_size) % rows), pad_size


def unpad(data: TensorDictBase, pad_size: int) -> TensorDictBase:
    """Remove the last ``pad_size`` rows: the inverse of :func:`pad_to_divisor`."""
    return data if pad_size == 0 else slice_tensordict(data, 0, data.batch_size[0] - pad_size)


# ---- joining --------------------------------------------------------------------------------------------------------
def concat_tensordict(data: Sequence[TensorDictBase]) -> TensorDict:
    """Join batches along the rows. The result never shares memory with the pieces, unless there is only one.

    Metadata must be equal in all pieces, except ``metrics``, where the first piece's is kept: workers return metrics
    that are already reduced over the data-parallel ranks.

    Raises:
        ValueError: no piece, pieces with different columns, or widths, or metadata; the message names the column.
    """
    if not data:
        raise ValueError("cannot concatenate an empty list of batches")
    if len(data) == 1:
        return data[0]
    names = set(data[0].keys())
    for number, piece in enumerate(data):
        if set(piece.keys()) != names:
            odd = sorted(names ^ set(piece.keys()))
            raise ValueError(f"batches to concatenate need the same columns; pieces 0 and {number} differ in {odd}")
    rows = sum(piece.batch_size[0] for piece in data)
    jagged = JaggedConcat()
    result = TensorDict({}, batch_size=[rows], device=data[0].device)
    for key in data[0].keys():
        result.set(key, _concat_column(key, [piece.get(key) for piece in data], rows, jagged))
    return result


def _concat_column(key: str, values: list[Any], rows: int, jagged: JaggedConcat) -> Any:
    first = values[0]
    if isinstance(first, NonTensorData):
        for number, value in enumerate(values):
            if key != "metrics" and not (isinstance(value, NonTensorData) and same_value(first.data, value.data)):
                raise ValueError(
                    f"metadata '{key}' must be equal in all batches to concatenate: piece 0 has {first.data!r}, piece "
                    f"{number} has {unwrap(value)!r}"
                )
        return NonTensorData(data=first.data, batch_size=[rows])
    kinds = {(type(value), is_jagged(value)) for value in values}
    if len(kinds) > 1:
        raise ValueError(f"column '{key}' is of different kinds in the batches to concatenate: {kinds}")
    if isinstance(first, NonTensorStack):
        return NonTensorStack(*[item for value in values for item in value.tensordicts])
    if is_jagged(first):
        return jagged(values)
    if isinstance(first, TensorDictBase):
        return concat_tensordict(values)
    if any(value.shape[1:] != first.shape[1:] for value in values):
        shapes = [list(value.shape) for value in values]
        raise ValueError(f"column '{key}' has different widths in the batches to concatenate: shapes {shapes}")
    return torch.cat(values)


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDict:
    """Return a shallow TensorDict with the columns of both.

    Raises:
        ValueError: different numbers of rows, or a column that both have with different values; it names the column.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(
            f"cannot unite batches of {list(tensor_dict1.batch_size)} and {list(tensor_dict2.batch_size)} rows"
        )
    result = tensor_dict1.copy()
    for key in tensor_dict2.keys():
        value = tensor_dict2.get(key)
        if key not in tensor_dict1.keys():
            result.set(key, value)
        elif not same_value(unwrap(tensor_dict1.get(key)), unwrap(value)):
            raise ValueError(f"both batches have the column '{key}', with different values: drop or rename one")
    return result


# ---- comparing ------------------------------------------------------------------------------------------------------
def same_value(a: Any, b: Any) -> bool:
    """Compare two values deeply: tensors (jagged ones too), arrays, containers, objects. NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_tensor(a, b)
    if isinstance(a, TensorDictBase) and isinstance(b, TensorDictBase):
        return a.batch_size == b.batch_size and same_value(
            {k: unwrap(a.get(k)) for k in a.keys()}, {k: unwrap(b.get(k)) for k in b.keys()}
        )
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return both and a.shape == b.shape and a.dtype == b.dtype and same_value(a.tolist(), b.tolist())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if is_jagged(a) and is_jagged(b):
        return all(_same_tensor(x, y) for x, y in zip(jagged_parts(a), jagged_parts(b), strict=True))
    if a.is_nested or b.is_nested or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())


def assert_tensordict_eq(tensordict1: TensorDictBase, tensordict2: TensorDictBase) -> None:
    """Raise AssertionError, naming the column, where two TensorDicts differ in columns, kinds, dtypes or values."""
    odd = set(tensordict1.keys()) ^ set(tensordict2.keys())
    assert not odd, f"columns of only one of the two: {sorted(odd)}"
    assert tensordict1.batch_size == tensordict2.batch_size, (
        f"batch sizes differ: {list(tensordict1.batch_size)} and {list(tensordict2.batch_size)}"
    )
    for key in tensordict1.keys():
        a, b = tensordict1.get(key), tensordict2.get(key)
        assert type(a) is type(b), f"column '{key}' is a {type(a).__name__} and a {type(b).__name__}"
        assert same_value(unwrap(a), unwrap(b)), f"column '{key}' differs"
