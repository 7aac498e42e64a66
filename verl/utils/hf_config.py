# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model's config.json as a plain dict, without torch or transformers and without the network."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["EXPERT_COUNTS", "MTP_COUNTS", "architecture_of", "find_hf_config", "read_hf_config", "text_config"]

# Names under which families write one number; transformers 5 writes other ones than models were published with.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")


def find_hf_config(model: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The ``config.json`` of a ``model`` node with the node's ``override_config`` in it, also in a ``text_config``.

    Looked for in ``hf_config_path``, else in ``path``; a name on the hub is looked up in the local cache.

    Returns:
        (the config, the file it is from), or (None, why there is none).
    """
    path = str(model.get("hf_config_path") or model.get("path") or "")
    if not path:
        return None, "no model is named"
    file = Path(path).expanduser() / "config.json"
    if not file.parent.is_dir():
        cached = _cached_on_hub(path)
        if cached is None:
            return None, f"{path} is neither a folder nor in the local Hugging Face cache"
        file = cached
    try:
        config = read_hf_config(file)
    except ValueError as error:
        return None, str(error)
    override = copy.deepcopy(dict(model.get("override_config") or {}))
    if text_config(config) is not config:
        config["text_config"] = config["text_config"] | override
    return config | override, str(file)


def read_hf_config(file: Path) -> dict[str, Any]:
    """A config.json as it is written.

    Raises:
        ValueError: naming the file, which is missing, cannot be read or holds something else than an object.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} cannot be read: it holds no JSON object")
    return config


def _cached_on_hub(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # not installed; not the form of a hub name
        return None
    return Path(found) if isinstance(found, str) else None


def architecture_of(config: Mapping[str, Any] | None) -> str | None:
    """The first of the config's ``architectures``."""
    names = (config or {}).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of the language model, which vision-language models nest in ``text_config``."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) and nested else config
