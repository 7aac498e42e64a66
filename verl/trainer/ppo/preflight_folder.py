# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the weights and the tokenizer of a model folder, from the files' heads: no torch, no tensor read.

Each function returns the rest of a sentence about the folder, or nothing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.utils.safetensors_header import TensorHead, read_header

__all__ = ["safetensors_problem", "tokenizer_problem", "weights_problem"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "transformer.wte.weight")


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
    tensors: dict[str, TensorHead] = {}
    for name in files:
        try:
            tensors |= read_header(folder / name)
        except (OSError, ValueError) as error:
            return f"has weights that cannot be read: {name} {error}"
    absent = sorted(name for name, shard in named.items() if shard.endswith(".safetensors") and name not in tensors)
    if absent:
        return f"lacks {len(absent)} tensors that {index} names, among them {absent[0]} of {named[absent[0]]}"
    return _embedding_problem(tensors, sizes or {})


def safetensors_problem(file: Path) -> str:
    """Whether a .safetensors file is whole: its header against its length."""
    try:
        read_header(file)
    except (OSError, ValueError) as error:
        return f"{file.name} {error}"
    return ""


def _embedding_problem(tensors: Mapping[str, TensorHead], sizes: Mapping[str, Any]) -> str:
    expected = [sizes.get("vocab_size"), sizes.get("hidden_size")]
    for name in _EMBEDDINGS:
        if name in tensors and None not in expected and (shape := tensors[name].shape) != expected:
            return (
                f"holds the weights of another model than its config.json: {name} has the shape {shape}, and "
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
