# SPDX-License-Identifier: Apache-2.0
"""Writing a Hugging Face model folder from a stream of weights."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from verl.utils.checkpoint.agreement import raise_everywhere
from verl.utils.hf_config import MTP_COUNTS, read_hf_config, text_config

__all__ = ["holds_mtp", "save_hf_folder", "write_hf_folder"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")
_BUFFERS = ("rotary_emb.inv_freq",)  # computed, not learnt; in folders of older transformers


def save_hf_folder(weights: Iterable[tuple[str, torch.Tensor]], source: str, target: str, **kwargs: Any) -> None:
    """:func:`write_hf_folder` as a collective call.

    The stream is read to its end on every rank also after a failure, since its tensors come out of collectives.

    Raises:
        ValueError: on every rank, what the writer refuses.
        OSError: on every rank, when the writer cannot write.
    """
    stream = iter(weights)
    failure: Exception | None = None
    try:
        write_hf_folder(stream, source, target, **kwargs)
    except ValueError as error:
        failure = error
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        failure = OSError(f"{target} cannot be written: {error}")
    for _ in stream:
        pass
    raise_everywhere(failure)


def write_hf_folder(
    weights: Iterable[tuple[str, torch.Tensor]],
    source: str,
    target: str,
    *,
    is_writer: bool = True,
    max_shard_bytes: int = 5 << 30,
    removed: Collection[str] = (),
    added: Collection[str] = (),
    config: Any = None,
    tokenizer_source: str | None = None,
    without_mtp: bool = False,
) -> None:
    """Write ``weights`` and the non-weight files of ``source`` (config, tokenizer, generation config) to ``target``.

    Weights are written shard by shard while they come, so one shard is held in memory. The names are checked against
    those of ``source``. Every rank must consume ``weights``; only the writer writes.

    Args:
        weights: (hub name, whole tensor).
        source: the Hugging Face folder that the model was loaded from.
        target: folder to write; made if missing.
        is_writer: whether this process writes.
        max_shard_bytes: largest weight file.
        removed: names of ``source`` that are not in ``weights``, where there are such.
        added: names that are in ``weights`` besides.
        config: Hugging Face configuration to write instead of that of ``source``.
        tokenizer_source: folder of the tokenizer, if it is another.
        without_mtp: the model was built without its multi-token-prediction layers: their tensors are not missed, and
            the configuration that is written has none.

    Raises:
        ValueError: when a tensor of ``source`` was not in ``weights``, or the other way round; lists them.
    """
    if not is_writer:
        for _ in weights:
            pass
        return
    os.makedirs(target, exist_ok=True)
    for stale in Path(target).glob("*.safetensors*"):
        stale.unlink()
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0
    for name, weight in weights:
        tensor = weight.detach().to("cpu", copy=True).contiguous()
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_shard_bytes:
            shards.append(_write_shard(shard, target, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor
        size, total = size + num_bytes, total + num_bytes
    shards.append(_write_shard(shard, target, len(shards)))
    _check_names({name for names in shards for name in names}, source, set(removed), set(added), without_mtp)
    _name_shards(shards, target, total)
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, Path(target) / file.name)
    for file in sorted(Path(tokenizer_source).iterdir()) if tokenizer_source else ():
        if file.is_file() and file.name.startswith(_TOKENIZER_PREFIXES):
            shutil.copy2(file, Path(target) / file.name)
    if config is not None:
        config.save_pretrained(target)
    if without_mtp:
        _drop_mtp_layers(Path(target) / "config.json")


def _drop_mtp_layers(path: Path) -> None:
    written = read_hf_config(path)
    for section in (written, written.get("text_config") or {}):
        for key in MTP_COUNTS:
            if section.get(key):
                section[key] = 0
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _part(index: int) -> str:
    return f"part-{index:05d}.safetensors"


def _write_shard(shard: dict[str, torch.Tensor], target: str, index: int) -> list[str]:
    save_file(shard, os.path.join(target, _part(index)), metadata={"format": "pt"})
    return list(shard)


def _name_shards(shards: list[list[str]], target: str, total_bytes: int) -> None:
    if len(shards) == 1:
        os.replace(os.path.join(target, _part(0)), os.path.join(target, "model.safetensors"))
        return
    weight_map = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(os.path.join(target, _part(index)), os.path.join(target, final))
        weight_map.update(dict.fromkeys(names, final))
    with open(os.path.join(target, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, file, indent=2, sort_keys=True)


def holds_mtp(names: Iterable[str], source: str | Path) -> bool:
    """Whether multi-token-prediction layers are among the tensors ``names`` of the Hugging Face folder ``source``."""
    num_layers = _num_layers(source)
    return any(_is_mtp(name, num_layers) for name in names)


def _num_layers(source: str | Path) -> int:
    return int(text_config(read_hf_config(Path(source) / "config.json"))["num_hidden_layers"])


def _is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer: named so, or a layer after the last."""
    layer = re.search(r"\blayers\.(\d+)\.", name)
    return ".mtp" in f".{name}" or (layer is not None and int(layer.group(1)) >= num_layers)


def _check_names(written: set[str], source: str, removed: set[str], added: set[str], without_mtp: bool) -> None:
    expected: set[str] = set()
    for file in Path(source).glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            expected.update(content.keys())
    if not expected:
        return  # the source holds another weight format; its names cannot be read cheaply
    expected = (expected - removed) | added
    missing = {name for name in expected - written if not name.endswith(_BUFFERS)}
    if without_mtp and missing:
        num_layers = _num_layers(source)
        missing = {name for name in missing if not _is_mtp(name, num_layers)}
    extra = written - expected
    if missing or extra:
        raise ValueError(
            f"export of {source}: missing {sorted(missing)[:5]} ({len(missing)}), "
            f"unexpected {sorted(extra)[:5]} ({len(extra)})"
        )
