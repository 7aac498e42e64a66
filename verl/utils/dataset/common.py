# SPDX-License-Identifier: Apache-2.0
"""What the data sets share: opening files, checking columns, rendering chats, fitting to a length."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig

from verl.utils.config import to_tree

__all__ = [
    "as_plain_dict",
    "choose_rows",
    "clean_messages",
    "encode_texts",
    "iter_chunks",
    "kept_slices",
    "open_data_files",
    "overlong_error",
    "render_chat",
    "require_chat_template",
    "require_truncation",
]

TRUNCATIONS = ("error", "left", "right", "middle")


def open_data_files(data_files: str | Sequence[str], example_row: Mapping[str, Any]) -> pa.Table:
    """Open parquet, json (a list of objects) or jsonl files as one table and check that the columns are there.

    Args:
        data_files: one path or several; `~` is expanded.
        example_row: the required columns, each with a value that shows its form; quoted in the error.

    Returns:
        A pyarrow table, the files' rows one after the other.

    Raises:
        ValueError: a file is missing, unreadable, of an unknown kind, empty, or lacks a required column.
    """
    paths = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files or [])
    if not paths:
        raise ValueError("no data file was given; set data.train_files (and data.val_files)")
    tables = []
    for path in paths:
        table = _read_file(Path(path).expanduser())
        missing = [column for column in example_row if column not in table.column_names]
        if missing:
            raise ValueError(
                f"{str(path)!r} has no column {', '.join(map(repr, missing))}; its columns are "
                f"{', '.join(table.column_names)}. A row must look like {json.dumps(example_row)}"
            )
        if table.num_rows == 0:
            raise ValueError(f"{str(path)!r} holds no rows")
        tables.append(table)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"{', '.join(map(str, paths))}: the files' columns do not go together: {error}") from error


def _read_file(path: Path) -> pa.Table:
    if not path.is_file():
        raise ValueError(f"the data file {str(path)!r} does not exist")
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path)
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                return _table_from_rows([json.loads(line) for line in lines if line.strip()])
        if path.suffix == ".json":
            return _table_from_rows(json.loads(path.read_text(encoding="utf-8")))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} could not be read: {str(error).splitlines()[0]}") from error
    raise ValueError(f"{str(path)!r} is of an unknown kind; .parquet, .json and .jsonl files are read")


def _table_from_rows(rows: Any) -> pa.Table:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected a list of objects, one per row")
    # pa.Table.from_pylist would take the columns of the first row only.
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({column: [row.get(column) for row in rows] for column in columns})


def choose_rows(num_rows: int, max_samples: int, shuffle: bool, seed: int) -> list[int]:
    """Which rows to keep when at most `max_samples` are wanted.

    Args:
        num_rows: rows there are.
        max_samples: at most so many; all when negative.
        shuffle: draw them by `seed` rather than take the first ones.
        seed: of the draw.

    Returns:
        Row numbers.

    Raises:
        ValueError: no row is wanted.
    """
    if max_samples == 0:
        raise ValueError("max_samples=0 keeps no row; use -1 for all of them, or leave the files out")
    if max_samples < 0 or max_samples >= num_rows:
        return list(range(num_rows))
    if not shuffle:
        return list(range(max_samples))
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:max_samples].tolist()


def clean_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Check the form of a chat and drop the null fields that parquet adds.

    Args:
        value: what the column holds; a non-empty list of {"role": ..., "content": ...} is right.
        where: file column and row, for the error.

    Returns:
        The messages. A field that is null is left out (parquet gives every message the fields that any of them has),
        except `content`, which chat templates expect.

    Raises:
        ValueError: the value is not a chat.
    """
    is_chat = isinstance(value, list) and value and all(isinstance(m, dict) and m.get("role") for m in value)
    if not is_chat:
        raise ValueError(
            f'{where}: expected a list of chat messages such as [{{"role": "user", "content": "..."}}], '
            f"got {str(value)[:100]!r}"
        )
    for number, message in enumerate(value):
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{where}: message {number}, of role {message['role']!r}, has no content (null)")
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def require_chat_template(tokenizer: Any) -> None:
    """Raise ValueError when `tokenizer` has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; add chat_template.jinja to its folder"
        )


def render_chat(
    tokenizer: Any, messages: list[dict], where: str, add_generation_prompt: bool, **template_kwargs: Any
) -> str:
    """Render a whole conversation as text with the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: the conversation.
        where: column and row, for the error.
        add_generation_prompt: end with what opens an assistant's turn.
        **template_kwargs: given to the template.

    Raises:
        ValueError: the template refuses the conversation.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return text
    except Exception as error:  # templates raise what they like: jinja errors, TypeErrors, their own
        raise ValueError(f"{where}: the chat template of {tokenizer.name_or_path!r} failed: {error}") from error


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered chats: nothing is added, the template has put in every special token."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def require_truncation(truncation: str) -> None:
    """Raise ValueError unless `truncation` is one of `TRUNCATIONS`."""
    if truncation not in TRUNCATIONS:
        raise ValueError(f"data.truncation={truncation!r} is unknown; choose one of {', '.join(TRUNCATIONS)}")


def overlong_error(where: str, num_tokens: int, key: str, limit: int, remedy: str) -> ValueError:
    """The error for a row that is too long while `data.truncation` is "error"."""
    return ValueError(
        f"{where} has {num_tokens} tokens, more than {key}={limit}, and data.truncation='error'; raise {key}, {remedy}"
    )


def kept_slices(num_tokens: int, limit: int, truncation: str) -> list[slice]:
    """Which tokens stay of a sequence that may be too long: "left", "right" and "middle" say where tokens are cut.

    Args:
        num_tokens: length of the sequence.
        limit: most tokens to keep.
        truncation: "left", "right" or "middle" (half of `limit` stays at each end, the odd token at the tail).

    Returns:
        Slices whose lengths sum to `min(num_tokens, limit)`.
    """
    if num_tokens <= limit:
        return [slice(0, num_tokens)]
    if truncation == "left":
        return [slice(num_tokens - limit, num_tokens)]
    if truncation == "right":
        return [slice(0, limit)]
    assert truncation == "middle", truncation
    head = limit // 2
    return [slice(0, head), slice(num_tokens - (limit - head), num_tokens)]


def iter_chunks(items: Sequence, size: int = 1024) -> Iterator[Sequence]:
    """Consecutive pieces of `items`, at most `size` long."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def as_plain_dict(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A dict out of a mapping or None; OmegaConf nodes are resolved, at every depth."""
    if isinstance(value, DictConfig):
        return to_tree(value)
    return dict(value or {})
