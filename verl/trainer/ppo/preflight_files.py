# SPDX-License-Identifier: Apache-2.0
"""Checks of data files, model folder and reward file. Each returns sentences about what is wrong."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.trainer.ppo.preflight_folder import tokenizer_problem, weights_problem
from verl.trainer.ppo.preflight_reward import check_score_function
from verl.trainer.ppo.preflight_sources import supported_architectures
from verl.utils.checkpoint.dist_weights import dist_checkpoint_problem
from verl.utils.config import did_you_mean
from verl.utils.hf_config import architecture_of, find_hf_config, read_hf_config, text_config

# A text file is looked through only so far; parquet knows its columns and rows without being read.
MAX_TEXT_ROWS = 20_000

PROMPT_ROW = {
    "prompt": [{"role": "user", "content": "17+25="}],
    "data_source": "arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "240"},
}

_EXAMPLE = "a row must look like"

CHAT = "a list of chat messages, each with role and content"


@dataclass(frozen=True)
class DataFile:
    """What is known of a file without loading it.

    ``fields`` maps each column to the names inside it (of a struct, or of a list's structs; empty for plain values).
    ``unique(column)`` gives the distinct values of a plain column.
    """

    num_rows: int
    fields: Mapping[str, frozenset[str]]
    unique: Callable[[str], set]


def open_data_file(path: Path) -> DataFile:
    """Read the outline of a .parquet, .json or .jsonl file. Raises ``ValueError`` if it cannot be read."""
    try:
        if path.suffix == ".parquet":
            return _open_parquet(path)
        if path.suffix in (".json", ".jsonl"):
            return _open_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} could not be read: {str(error).splitlines()[0]}") from error
    raise ValueError(f"{path} is of an unknown kind; .parquet, .json and .jsonl files are read")


def _open_parquet(path: Path) -> DataFile:
    import pyarrow.parquet as pq
    import pyarrow.types as types

    file = pq.ParquetFile(path)

    def names(kind: Any) -> frozenset[str]:
        if types.is_list(kind) or types.is_large_list(kind):
            kind = kind.value_type
        return frozenset(field.name for field in kind) if types.is_struct(kind) else frozenset()

    return DataFile(
        num_rows=file.metadata.num_rows,
        fields={field.name: names(field.type) for field in file.schema_arrow},
        unique=lambda column: set(file.read(columns=[column]).column(column).unique().to_pylist()),
    )


def _open_text(path: Path) -> DataFile:
    with path.open(encoding="utf-8") as lines:
        if path.suffix == ".json":
            rows = json.load(lines)
            num_rows = len(rows) if isinstance(rows, list) else 0
        else:
            rows, num_rows = [], 0
            for line in filter(str.strip, lines):
                num_rows += 1
                if num_rows <= MAX_TEXT_ROWS:
                    rows.append(json.loads(line))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected one object for each row")

    def names(value: Any) -> frozenset[str]:
        value = value[0] if isinstance(value, list) and value else value
        return frozenset(value) if isinstance(value, dict) else frozenset()

    return DataFile(
        num_rows=num_rows,
        fields={name: names(value) for name, value in (rows[0] if rows else {}).items()},
        unique=lambda column: {row.get(column) for row in rows},
    )


def as_paths(value: Any) -> list[str]:
    """The paths of a key that takes one path, a list of them, or null."""
    return list(value) if isinstance(value, list | tuple) else [str(value)] if value else []


def open_data_files(key: str, value: Any, needed: Mapping[str, Any], errors: list[str]) -> list[DataFile]:
    """Open the files of ``key`` and check their columns.

    Args:
        key: the config key.
        value: a path, a list of paths, or None.
        needed: an example row; a list of dicts or a dict in it must be one in the file, with the same names inside.
        errors: takes what is wrong.
    """
    files = []
    # A column without a name is reported where the keys are checked.
    needed = needed if all(isinstance(column, str) and column for column in needed) else {}
    for name in as_paths(value):
        if not isinstance(name, str) or not name:
            errors.append(f"{key}: {name!r} is not the path of a file")
            continue
        path = Path(name).expanduser()
        if not path.is_file():
            what = "is a folder; name the files in it" if path.is_dir() else f"does not exist{_nearest_file(path)}"
            errors.append(f"{key}: {path} {what}")
            continue
        try:
            file = open_data_file(path)
        except ValueError as error:
            errors.append(f"{key}: {error}")
            continue
        files.append(file)
        errors += _check_columns(f"{key}: {path}", file, needed, not any(_EXAMPLE in error for error in errors))
    return files


def _check_columns(where: str, file: DataFile, needed: Mapping[str, Any], is_first: bool) -> list[str]:
    """What is wrong with a file's columns; with an example of a row for the first file that lacks one."""
    if not file.num_rows:
        return [f"{where} holds no rows"]
    example = f"{_EXAMPLE} {json.dumps(needed)}"
    in_full = f" In full, {example}" if is_first else ""
    missing = [column for column in needed if column not in file.fields]
    if missing:
        hint = did_you_mean(missing[0], file.fields)
        return [
            f"{where} has no column {', '.join(map(repr, missing))}; its columns are {', '.join(file.fields)}.{hint}"
            f"{in_full}"
        ]
    for column, value in needed.items():
        inner = value[0] if isinstance(value, list) else value
        required = {"ground_truth"} if "ground_truth" in inner else set(inner) if isinstance(inner, dict) else set()
        if required - file.fields[column]:
            words = f"{where}: column {column!r} must hold {', '.join(sorted(required))}"
            return [f"{words}; {example}" if is_first else words]
    return []


def _nearest_file(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" (nor does its folder {parent})" if str(parent) != "." else ""
    near = did_you_mean(path.name, [entry.name for entry in parent.iterdir()])
    return f".{near}" if near else ""


def check_num_rows(key: str, files: Iterable[DataFile], max_samples: int, batch_key: str, batch_size: int) -> list[str]:
    """Whether the files hold at least one batch."""
    num_rows = sum(file.num_rows for file in files)
    if max_samples == 0:
        return []  # said where the values are checked
    if 0 < max_samples < num_rows:
        num_rows = max_samples
    if num_rows >= batch_size:
        return []
    if num_rows == 0:
        return [f"{key} holds no rows; name a file with at least {batch_key}={batch_size} rows"]
    return [
        f"{key} holds {num_rows} rows, fewer than {batch_key}={batch_size}; use {batch_key}={num_rows} or more data"
    ]


def check_data_sources(
    key: str, column: str, files: Iterable[DataFile], key_of_own: str = "reward.custom_reward_function"
) -> list[str]:
    """Whether there is a reward rule for every data source in the files."""
    from verl.utils.reward_score import is_known_data_source, known_data_sources, missing_package

    try:
        sources = set().union(*(file.unique(column) for file in files if column in file.fields))
    except OSError as error:
        return [f"{key}: column {column!r} could not be read: {str(error).splitlines()[0]}"]
    except (TypeError, NotImplementedError):
        return [f"{key}: column {column!r} must hold text, the name of each row's data source"]
    unknown = [
        f"{key}: there is no reward rule for {column}={source!r}; known are {', '.join(known_data_sources())}."
        f"{did_you_mean(str(source), known_data_sources())} For your own rule set {key_of_own}.path"
        for source in sorted(sources, key=str)
        if not is_known_data_source(source)
    ]
    missing = {source: missing_package(source) for source in sorted(sources, key=str) if missing_package(source)}
    return unknown + [
        f"{key}: {column}={source!r} is scored with {package}, which is not installed: pip install {package}"
        for source, package in missing.items()
    ]


def check_reward_file(custom: Mapping[str, Any], key: str, manager: str | None = None) -> list[str]:
    """Whether the file of a custom reward function is there and defines it; arguments as in `check_score_function`."""
    file = Path(str(custom["path"])).expanduser()
    if not file.is_file():
        what = "is a folder; name the .py file in it" if file.is_dir() else f"does not exist{_nearest_file(file)}"
        return [f"{key}.path={custom['path']} {what}"]
    if file.suffix != ".py":
        return [f"{key}.path={custom['path']} is not a Python file; its name must end in .py"]
    return check_score_function(custom, key, manager)


def check_model_folder(path: str, model: Mapping[str, Any], notes: list[str] | None = None) -> list[str]:
    """Whether a Hugging Face folder holds a config, all its weights and a tokenizer.

    Args:
        path: the key of the model's node, for instance "actor_rollout_ref.model".
        model: the node.
        notes: of a dry run; takes what is wrong with the weights, which it does without, and that a name on the hub
            is not checked. None makes the former an error.
    """
    folder = Path(str(model["path"])).expanduser()
    if not folder.is_dir():
        return _check_hub_name(path, model, folder, notes)
    if not any(folder.iterdir()):
        return [f"{path}.path={folder} is an empty folder; name one with config.json, *.safetensors and tokenizer.json"]
    errors = []
    config = Path(str(model["hf_config_path"] or folder)).expanduser() / "config.json"
    if not config.is_file():
        return [f"{path}.path={folder} is no Hugging Face model: it has no config.json"]
    try:
        whole = read_hf_config(config)
    except ValueError as error:
        return [f"{path}.path: {error}"]
    errors += _check_architecture(path, config, whole)
    own = not model["hf_config_path"] and not errors
    sizes = dict(text_config(whole)) | (model["override_config"] or {}) if own else {}
    if problem := weights_problem(folder, sizes):
        (errors if notes is None else notes).append(f"{path}.path={folder} {problem}")
    return errors + _check_tokenizer(path, model, folder, sizes.get("vocab_size"))


def _check_hub_name(path: str, model: Mapping[str, Any], folder: Path, notes: list[str] | None) -> list[str]:
    """Of a model that is no folder: whether it may be a name on the hub, and what is in the local cache of it."""
    name = str(model["path"])
    if not _is_hub_name(name):
        near = _nearest_file(folder)
        return [f"{path}.path={name} {'does not exist' if near.startswith(' (') else 'is not a folder'}{near}"]
    if find_hf_config({"path": name})[0] is None and os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return [
            f"{path}.path={name} is neither a folder nor a model in the local Hugging Face cache, and HF_HUB_OFFLINE "
            "is set; name the model's folder, or unset HF_HUB_OFFLINE"
        ]
    config, file = find_hf_config(model)
    if config is not None:
        return _check_architecture(path, Path(file), config)
    if notes is not None:
        notes.append(
            f"not checked: the model {name} is not on this machine; put its config.json and tokenizer into a folder "
            f"and name that in {path}.path for layers and memory"
        )
    return []


def _check_tokenizer(path: str, model: Mapping[str, Any], folder: Path, vocab_size: Any) -> list[str]:
    own = model["tokenizer_path"]
    tokenizer = Path(str(own or folder)).expanduser()
    key = "tokenizer_path" if own else "path"
    needed = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((tokenizer / name).is_file() for name in needed):
        if own and not tokenizer.is_dir() and _is_hub_name(str(own)):
            return []
        return [
            f"{path}.{key}={tokenizer} has no tokenizer (no {' or '.join(needed[:3])}); put one there, or set "
            f"{path}.tokenizer_path to a folder that has one"
        ]
    file = tokenizer / needed[0]
    problem = tokenizer_problem(file, vocab_size if isinstance(vocab_size, int) else None) if file.is_file() else ""
    return [f"{path}.{key}={tokenizer} {problem}"] if problem else []


def check_dist_checkpoints(tree: Mapping[str, Any], engines: Iterable[str]) -> list[str]:
    """Whether the megatron-core checkpoints that engines read their first weights from are there.

    Args:
        tree: the config.
        engines: keys of the engines' nodes. A path that several of them name is reported once.
    """
    errors: dict[str, str] = {}
    for path in engines:
        node: Any = tree
        for part in path.split("."):
            node = node[part]
        folder = node["dist_checkpointing_path"] if node["use_dist_checkpointing"] else None
        if folder and (problem := dist_checkpoint_problem(folder)):
            errors.setdefault(folder, f"{path}.dist_checkpointing_path={folder}: {problem}")
    return list(errors.values())


def _is_hub_name(path: str) -> bool:
    """Whether a path that is no folder reads like ORGANISATION/MODEL on the Hugging Face hub."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path)) and not Path(path.split("/")[0]).exists()


def _check_architecture(path: str, file: Path, config: Mapping[str, Any]) -> list[str]:
    architecture = architecture_of(config)
    if architecture is None:
        return [f'{path}.path: {file} names no architectures, for instance ["Qwen3MoeForCausalLM"]']
    known = supported_architectures()
    if known and architecture not in known:
        return [
            f"{path}.path: {file} asks for {architecture}, which megatron-bridge cannot load."
            f"{did_you_mean(architecture, known)} It loads {len(known)} others, among them LlamaForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM and Qwen3MoeForCausalLM; all of them are printed by: python3 -m "
            "verl.trainer.ppo.preflight_sources"
        ]
    return []
