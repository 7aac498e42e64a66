# SPDX-License-Identifier: Apache-2.0
"""What a safetensors file holds, and whether it is whole, from its header alone: no torch, no tensor read.

The format: 8 bytes with the header's length (little-endian), the header (JSON: name -> dtype, shape, data_offsets, the
offsets counted from the header's end), the tensors.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TensorHead", "read_header"]

# Bits of an element by dtype.
_BITS = {"BOOL": 8, "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "F4": 4}
_BITS |= {f"{kind}{bits}": bits for kind in "IU" for bits in (8, 16, 32, 64)}
_MAX_HEADER = 100_000_000
_LFS = b"version https://git-lfs"


class TensorHead(NamedTuple):
    """``dtype`` as safetensors names it ("BF16") and ``shape`` of one tensor."""

    dtype: str
    shape: list[int]


def read_header(file: Path) -> dict[str, TensorHead]:
    """The tensors of a file by name; none for a weight file of another format than .safetensors.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not whole, or only stands for a file that Git LFS has not fetched; a sentence about the file
            without its name.
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(len(_LFS))
        if start == _LFS:
            raise ValueError("is a pointer of Git LFS; fetch the file itself with: git lfs pull")
        if not size:
            raise ValueError("is empty")
        if file.suffix != ".safetensors":
            return {}
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > _MAX_HEADER:
            raise ValueError("does not begin like a safetensors file")
        if 8 + length > size:
            raise ValueError(f"is cut off: {size} bytes, and the header alone has {8 + length}")
        content.seek(8)
        try:
            header = json.loads(content.read(length))
        except ValueError:
            raise ValueError("has a header that is no JSON") from None
    if not isinstance(header, dict):
        raise ValueError("has a header that is no JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((_checked_end(name, entry) for name, entry in tensors.items()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"is cut off: {size} bytes of the {8 + length + end} that its header announces")
    return {name: TensorHead(entry["dtype"], entry["shape"]) for name, entry in tensors.items()}


def _checked_end(name: str, entry: Any) -> int:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = _BITS.get(dtype, 8 if str(dtype).startswith("F8") else None)
        right = bits is None or (end - begin) * 8 == prod(shape) * bits
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"has no dtype, shape and data_offsets for {name}") from None
    if not right or begin < 0:
        raise ValueError(f"gives {name} of shape {shape} in {dtype} {end - begin} bytes")
    return int(end)
