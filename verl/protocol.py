# SPDX-License-Identifier: Apache-2.0
"""DataProto: the batch that the controller holds and that travels between controller and workers."""

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_wire import pack_tensordict, unpack_tensordict

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "chunk_data",
    "concat_data",
    "pad_dataproto_to_divisor",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

union_tensor_dict = tu.union_tensor_dict


class DataProtoConfig:
    """Names under which a batch says that it may be chunked unevenly."""

    auto_padding_key = "_verl_auto_padding"


def _object_array(items: Any) -> np.ndarray:
    """Make a one-dimensional object array: one Python object per row, whatever the objects are."""
    if isinstance(items, np.ndarray) and items.dtype == object and items.ndim == 1:
        return items
    result = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        result[i] = item
    return result


def union_numpy_dict(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join two dicts of arrays. Raises ValueError naming a key that both have with different values."""
    for key in first.keys() & second.keys():
        if not tu.same_value(first[key], second[key]):
            raise ValueError(f"both batches have the column '{key}', with different values: drop or rename one")
    return {**first, **second}


def _union_meta(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    for key in first.keys() & second.keys():
        if not tu.same_value(first[key], second[key]):
            raise ValueError(f"both batches have meta_info '{key}': {first[key]!r} and {second[key]!r}")
    return {**first, **second}


@dataclass
class DataProtoItem:
    """One row of a DataProto."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch of B rows.

    Attributes:
        batch: tensors [B, ...] (dense or jagged), or None.
        non_tensor_batch: object arrays [B], one Python object per row.
        meta_info: facts about the whole batch.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.check_consistency()

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def __getstate__(self) -> tuple:
        batch = None if self.batch is None else pack_tensordict(self.batch)
        return batch, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple) -> None:
        batch, self.non_tensor_batch, self.meta_info = state
        self.batch = None if batch is None else unpack_tensordict(*batch)

    def check_consistency(self) -> None:
        """Raise ValueError, naming the column, where the columns are not object arrays of the same number of rows."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ValueError(f"the batch needs one batch dimension, it has shape {list(self.batch.batch_size)}")
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise ValueError(f"non-tensor column '{key}' must be a numpy array, got {type(value).__name__}")
            if len(value) != len(self):
                raise ValueError(f"non-tensor column '{key}' has {len(value)} rows, the batch has {len(self)}")

    # ---- building ---------------------------------------------------------------------------------------------------
    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> "DataProto":
        """Build from one dict of tensors and arrays (or lists), as a collate function returns it."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in data.items() if k not in tensors}
        for key, value in others.items():
            if not isinstance(value, np.ndarray | list):
                raise ValueError(f"column '{key}' must be a tensor, an array or a list, got {type(value).__name__}")
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Build from a dict of tensors and a dict of arrays or lists; all have the same number of rows.

        ``auto_padding`` lets :meth:`chunk` make pieces of uneven size.
        """
        if num_batch_dims != 1:
            raise ValueError(f"num_batch_dims must be 1 (rows), got {num_batch_dims}")
        batch = tu.get_tensordict(tensors) if tensors else None
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(batch, {k: _object_array(v) for k, v in (non_tensors or {}).items()}, meta)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> "DataProto":
        """Build from a TensorDict: stacks become non-tensor columns, metadata becomes ``meta_info``."""
        tensors, arrays, meta = {}, {}, {}
        for key in tensor_dict.keys():
            value = tensor_dict.get(key)
            if isinstance(value, NonTensorStack):
                arrays[key] = _object_array(tu.get(tensor_dict, key))
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        batch = TensorDict(tensors, batch_size=tensor_dict.batch_size) if tensors else None
        return cls(batch, arrays, {**meta, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """Return one TensorDict that shares the tensors; columns become stacks, ``meta_info`` becomes metadata.

        Each column of objects costs about 5 microseconds a row: select what the receiver needs first.
        """
        result = TensorDict({}, batch_size=[len(self)]) if self.batch is None else self.batch.copy()
        taken = set(result.keys())
        for key in (*self.non_tensor_batch, *self.meta_info):
            if key in taken:
                raise ValueError(f"the name '{key}' stands for two different things in the batch: rename one")
            taken.add(key)
        for key, value in self.non_tensor_batch.items():
            tu.assign_non_tensor_stack(result, key, value.tolist())
        for key, value in self.meta_info.items():
            tu.assign_non_tensor_data(result, key, value)
        return result

    def save_to_disk(self, filepath: str) -> None:
        """Write the batch as a pickle file."""
        with open(filepath, "wb") as f:
            pickle.dump(self, f)

    @staticmethod
    def load_from_disk(filepath: str) -> "DataProto":
        """Read what :meth:`save_to_disk` wrote. A pickle can run code: load only files that you trust."""
        with open(filepath, "rb") as f:
            return pickle.load(f)

    # ---- looking ----------------------------------------------------------------------------------------------------
    def nbytes(self) -> int:
        """Bytes of all tensors, plus 8 for every object of the non-tensor columns."""
        tensors = 0 if self.batch is None else self.batch.bytes()
        return tensors + sum(value.nbytes for value in self.non_tensor_batch.values())

    def print_size(self, prefix: str = "") -> None:
        """Print the number of rows and the size in MB."""
        print(f"{prefix}{': ' if prefix else ''}DataProto of {len(self)} rows, {self.nbytes() / 1e6:.3f} MB")

    def to(self, device: Any) -> "DataProto":
        """Move the tensors, in place; returns itself."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- columns ----------------------------------------------------------------------------------------------------
    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Return a batch with only these columns (None: all of that kind). Raises KeyError naming missing ones."""
        batch = self.batch
        if batch_keys is not None:
            batch = tu.get_keys(batch if batch is not None else TensorDict({}), batch_keys) if batch_keys else None
        elif batch is not None:
            batch = batch.copy()
        arrays = _pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor columns")
        meta = _pick(self.meta_info, meta_info_keys, "meta_info")
        if deepcopy:
            batch = None if batch is None else tu.slice_tensordict(batch, 0, len(self))
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(batch, arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Move these columns (None: none) into a new batch, which is returned. Raises KeyError naming missing ones."""
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        for key in batch_keys or []:
            self.batch.del_(key)
        for key in non_tensor_batch_keys or []:
            del self.non_tensor_batch[key]
        for key in meta_info_keys or []:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Rename tensor columns in place; returns itself. Raises ValueError where the lists differ in length."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"rename needs as many new names as old ones, got {old} and {new}")
        values = tu.pop_keys(self.batch, old)
        for old_key, new_key in zip(old, new, strict=True):
            if new_key in self.batch.keys():
                raise ValueError(f"cannot rename '{old_key}' to '{new_key}': that column exists already")
            self.batch.set(new_key, values.get(old_key))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Take over the columns and meta_info of ``other``, in place; returns itself.

        Raises:
            ValueError: other number of rows, or a key that both have with different values; nothing is changed then.
        """
        if len(self) != len(other) and len(self) and len(other):
            raise ValueError(f"cannot unite a batch of {len(self)} rows with one of {len(other)} rows")
        if self.batch is None or other.batch is None:
            batch = other.batch if self.batch is None else self.batch
        else:
            batch = tu.union_tensor_dict(self.batch, other.batch)
        arrays = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        meta = _union_meta(self.meta_info, other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta
        return self

    # ---- rows -------------------------------------------------------------------------------------------------------
    def __getitem__(self, item: Any) -> "DataProto | DataProtoItem":
        """Rows: an int gives a DataProtoItem; a slice, list, array, index tensor or bool mask gives a DataProto."""
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            return self.slice(start, stop) if step == 1 else self.select_idxs(list(range(start, stop, step)))
        if isinstance(item, int | np.integer):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a batch of {len(self)} rows")
            row = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(row, {k: v[item] for k, v in self.non_tensor_batch.items()}, self.meta_info)
        return self.select_idxs(item)

    def slice(self, start: int | None = None, end: int | None = None, step: int = 1) -> "DataProto":
        """Return rows ``start:end:step`` (copies of the tensors)."""
        start, end, step = slice(start, end, step).indices(len(self))
        if step != 1:
            return self.select_idxs(list(range(start, end, step)))
        batch = None if self.batch is None else tu.slice_tensordict(self.batch, start, end)
        return type(self)(batch, {k: v[start:end] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def select_idxs(self, idxs: Any) -> "DataProto":
        """Return the rows of a list, array or tensor of row numbers, or of a bool mask [B], in that order."""
        index = tu.to_row_index(idxs, len(self))
        batch = None if self.batch is None else tu.index_select_tensor_dict(self.batch, index)
        order = index.cpu().numpy()
        return type(self)(batch, {k: v[order] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def reorder(self, indices: Any) -> None:
        """Put the rows into the order of ``indices`` [B], in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Return every row ``repeat_times`` times: next to each other (aabb), or the whole batch over again (abab)."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def split(self, split_size: int) -> list["DataProto"]:
        """Cut into consecutive pieces of ``split_size`` rows; the last may be smaller."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def is_padding_enabled(self) -> bool:
        """Tell whether :meth:`chunk` may make pieces of uneven size."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Cut into ``chunks`` equal consecutive pieces; with auto padding, pieces that differ by at most one row.

        Raises:
            ValueError: the rows do not divide evenly, or, with auto padding, are fewer than ``chunks``.
        """
        rows = len(self)
        uneven = self.is_padding_enabled() and rows >= chunks
        if chunks < 1 or rows == 0 or (rows % chunks and not uneven):
            hint = "" if chunks < 1 else f": use {tu.nearest_multiples(rows, chunks)} rows, or pad_dataproto_to_divisor"
            raise ValueError(f"cannot cut a batch of {rows} rows into {chunks} equal pieces{hint}")
        size, extra = divmod(rows, chunks)
        bounds = [i * size + min(i, extra) for i in range(chunks + 1)]
        return [self.slice(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Join batches along the rows.

        ``meta_info`` must agree, except ``metrics``, which becomes the list of all pieces' metrics, and ``timing``,
        of which the largest value of each name is kept (the pieces ran side by side).

        Raises:
            ValueError: no piece, or columns or meta_info that do not agree; the message names them.
        """
        if not data:
            raise ValueError("cannot concatenate an empty list of batches")
        has_batch = {piece.batch is not None for piece in data}
        if len(has_batch) > 1:
            raise ValueError("some of the batches to concatenate have tensors and some have none")
        batch = tu.concat_tensordict([piece.batch for piece in data]) if has_batch == {True} else None
        keys = data[0].non_tensor_batch.keys()
        for number, piece in enumerate(data):
            odd = keys ^ piece.non_tensor_batch.keys()
            if odd:
                raise ValueError(f"non-tensor columns {sorted(odd)} are only in one of the pieces 0 and {number}")
        arrays = {key: np.concatenate([piece.non_tensor_batch[key] for piece in data]) for key in keys}
        return type(data[0])(batch, arrays, _concat_meta([piece.meta_info for piece in data]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """Iterate over mini-batches as :func:`verl.utils.tensordict_utils.make_iterator` does."""
        orders = tu.iterate_indices(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self.select_idxs(index) for index in orders)


def _pick(mapping: dict[str, Any], keys: Sequence[str] | None, what: str) -> dict[str, Any]:
    if keys is None:
        return dict(mapping)
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise KeyError(f"{what} {missing} are not in the batch; it has {sorted(mapping)}")
    return {key: mapping[key] for key in keys}


def _concat_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    metrics: list[Any] = []
    timing: dict[str, float] = {}
    for meta in metas:
        for key, value in meta.items():
            if key == "metrics":
                metrics.extend(value if isinstance(value, list) else [value])
            elif key == "timing":
                timing.update({name: max(seconds, timing.get(name, seconds)) for name, seconds in value.items()})
            elif key in merged and not tu.same_value(merged[key], value):
                raise ValueError(
                    f"meta_info '{key}' must be equal in the batches to concatenate: {merged[key]!r} and {value!r}"
                )
            else:
                merged[key] = value
    if metrics:
        merged["metrics"] = metrics
    if timing:
        merged["timing"] = timing
    return merged


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows until the rows are a multiple of ``size_divisor``; returns the added count too.

    Raises:
        ValueError: the batch is empty or the divisor below 1.
    """
    rows = len(data)
    if rows == 0 or size_divisor < 1:
        raise ValueError(f"cannot pad a batch of {rows} rows to a multiple of {size_divisor}")
    pad_size = -rows % size_divisor
    return (data.select_idxs(torch.arange(rows + pad_size) % rows) if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last ``pad_size`` rows: the inverse of :func:`pad_dataproto_to_divisor`."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


@dataclass
class DataProtoFuture:
    """The result of a call that has not finished: a controller passes it on without waiting for it.

    Attributes:
        collect_fn: joins the list of the workers' results.
        futures: Ray object references, one per result.
        dispatch_fn: takes one piece out of the joined result; None keeps it whole.
    """

    collect_fn: Callable[[list], Any]
    futures: list
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list) -> "DataProtoFuture":
        """Make the future of the concatenation of several object references."""
        return DataProtoFuture(collect_fn=concat_data, futures=list(data))

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Return the futures of the ``chunks`` pieces of the result."""

        def piece(number: int) -> Callable[[Any], Any]:
            return lambda whole: chunk_data(whole, chunks)[number]

        return [DataProtoFuture(self.collect_fn, self.futures, piece(i)) for i in range(chunks)]

    def get(self) -> Any:
        """Wait for the results and return them joined."""
        import ray

        result = self.collect_fn(ray.get(self.futures))
        return result if self.dispatch_fn is None else self.dispatch_fn(result)


def chunk_data(data: Any, chunks: int) -> list:
    """Cut a DataProto, DataProtoFuture or TensorDict into ``chunks`` pieces. Raises TypeError for anything else."""
    if isinstance(data, DataProto | DataProtoFuture):
        return data.chunk(chunks)
    if isinstance(data, TensorDict):
        return tu.chunk_tensordict(data, chunks)
    raise TypeError(f"expected a DataProto or a TensorDict to divide among workers, got {type(data).__name__}")


def concat_data(data: list) -> Any:
    """Join a list of DataProtos or of TensorDicts; a list of None gives None. Raises TypeError for anything else."""
    if data and all(piece is None for piece in data):
        return None
    if data and all(isinstance(piece, DataProto) for piece in data):
        return DataProto.concat(data)
    if data and all(isinstance(piece, TensorDict) for piece in data):
        return tu.concat_tensordict(data)
    kinds = sorted({type(piece).__name__ for piece in data})
    raise TypeError(f"expected DataProtos or TensorDicts from all workers, got {kinds or 'an empty list'}")
