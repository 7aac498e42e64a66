# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the weights and the tokenizer of a model folder, from the files' heads: no torch, no tensor read.

Each function returns the rest of a sentence about the folder, or nothing.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

__all__ = ["safetensors_problem", "tokenizer_problem", "weights_problem"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "transformer.wte.weight")

# Bits of an element of the safetensors format.
_BITS = {"BOOL": 8, "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "F4": 4}
_BITS |= {f"{kind}{bits}": bits for kind in "IU" for bits in (8, 16, 32, 64)}
_MAX_HEADER = 100_000_000
_LFS = b"version https://git-lfs"


def weights_problem(folder: Path, sizes: Mapping[str, Any] | None = None) -> str:
    """Whether all the weights are there and whole, and of the model that config.json describes.

    Args:
        folder: a Hugging Face folder.
        sizes: ``vocab_size`` and ``hidden_size`` of its config.json, to hold the embedding against; None for another's.
    """
    index = next((name for name in _INDEXES if (folder / name).is_file()), None)
    named: dict[str, str] = {}
    if index:
        try:
            named = dict(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            return f"has an index {index} that cannot be read: {error!r}"
        missing = sorted({shard for shard in named.values() if not (folder / shard).is_file()})
        if missing:
            return f"lacks {len(missing)} of the files that {index} names, among them {missing[0]}"
    files = sorted(set(named.values())) or [file.name for file in sorted(folder.glob("*.safetensors"))]
    files = files or [file.name for file in sorted(folder.glob("pytorch_model*.bin"))]
    if not files:
        return "has no weights (*.safetensors)"
    shapes: dict[str, list[int]] = {}
    for name in files:
        try:
            shapes |= _read_header(folder / name)
        except (OSError, ValueError) as error:
            return f"has weights that cannot be read: {name} {error}"
    absent = sorted(name for name, shard in named.items() if shard.endswith(".safetensors") and name not in shapes)
    if absent:
        return f"lacks {len(absent)} tensors that {index} names, among them {absent[0]} of {named[absent[0]]}"
    return _embedding_problem(shapes, sizes or {})


def safetensors_problem(file: Path) -> str:
    """Whether a .safetensors file is whole: its header against its length."""
    try:
        _read_header(file)
    except (OSError, ValueError) as error:
        return f"{file.name} {error}"
    return ""


def _read_header(file: Path) -> dict[str, list[int]]:
    """Shapes by name; none for a file of another format. Raises ``ValueError`` for one that is not whole."""
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
    return {name: entry["shape"] for name, entry in tensors.items()}


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


def _embedding_problem(shapes: Mapping[str, list[int]], sizes: Mapping[str, Any]) -> str:
    expected = [sizes.get("vocab_size"), sizes.get("hidden_size")]
    for name in _EMBEDDINGS:
        if name in shapes and None not in expected and list(shapes[name]) != expected:
            return (
                f"holds the weights of another model than its config.json: {name} has the shape {shapes[name]}, and "
                f"vocab_size and hidden_size are {expected}"
            )
    return ""


def tokenizer_problem(file: Path, vocab_size: int | None) -> str:
    """Whether a tokenizer.json can be read, and whether the model has an embedding for each of its own tokens.

    Tokens that were added to a tokenizer may lie above the model's vocabulary; texts need not contain them.
    """
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"has a {file.name} that cannot be read: {str(error).splitlines()[0]}"
    largest = max(_token_ids(tokenizer), default=-1)
    if vocab_size is None or largest < vocab_size:
        return ""
    return (
        f"has a tokenizer of {largest + 1} tokens, more than the {vocab_size} that the model has embeddings for "
        "(vocab_size in config.json); it belongs to another model"
    )


def _token_ids(tokenizer: Any) -> Iterator[int]:
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from (value for value in vocab.values() if isinstance(value, int))
    elif isinstance(vocab, list):
        yield len(vocab) - 1
