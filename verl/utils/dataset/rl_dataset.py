# SPDX-License-Identifier: Apache-2.0
"""Prompts for reinforcement learning: chat messages in files, left-padded token ids out."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.utils.dataset.common import (
    as_plain_dict,
    choose_rows,
    clean_messages,
    encode_texts,
    iter_chunks,
    kept_slices,
    open_data_files,
    overlong_error,
    render_chat,
    require_chat_template,
    require_truncation,
)
from verl.utils.model import compute_position_id_with_mask

logger = logging.getLogger(__name__)

__all__ = ["RLHFDataset", "collate_fn"]


def collate_fn(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Stack rows of `RLHFDataset` into one dict for `DataProto.from_single_dict`.

    Args:
        rows: dicts with the same keys; tensors under a key have the same shape.

    Returns:
        Tensors [B, ...]; everything else as object arrays [B].
    """
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if isinstance(first, torch.Tensor):
            batch[key] = torch.stack(values)
        else:
            # np.array(values) would turn lists of equal length into a second dimension.
            batch[key] = np.empty(len(values), dtype=object)
            batch[key][:] = values
    return batch


class RLHFDataset(Dataset):
    """Rows of parquet, json or jsonl files in verl's schema, as prompts of one fixed width.

    Each row needs `prompt` (chat messages), `data_source` and `reward_model` (with `ground_truth`); other columns are
    handed through. Columns and, for `truncation="error"` without filtering, all lengths are checked when the data set
    is opened. Filtering and reading share one tokenisation (`_encode`), so that no row passes the one and fails the
    other.

    Args:
        data_files: one path or several.
        tokenizer: a transformers tokenizer with a chat template and a pad token.
        config: the `data` config: prompt_key, reward_fn_key, max_prompt_length, filter_overlong_prompts, truncation
            (error, left, right, middle), apply_chat_template_kwargs, shuffle, seed, image_key, video_key.
        processor: accepted as verl passes it; text prompts do not need it, rows with images or videos are refused.
        max_samples: keep at most so many rows (drawn by `seed` if `shuffle`, else the first ones); all when negative.

    Attributes:
        num_dropped: rows that the filter left out.

    Raises:
        ValueError: a file, column or row is not as it must be, or a prompt is too long under `truncation="error"`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any | None = None,
        max_samples: int = -1,
    ):
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_key = config.get("prompt_key", "prompt")
        self.max_prompt_length = config.get("max_prompt_length", 512)
        self.truncation = config.get("truncation", "error")
        self.template_kwargs = as_plain_dict(config.get("apply_chat_template_kwargs"))
        require_truncation(self.truncation)
        require_chat_template(tokenizer)

        source_key = config.get("reward_fn_key", "data_source")
        example_row = {
            self.prompt_key: [{"role": "user", "content": "17+25="}],
            source_key: "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": "240"},
        }
        self.table = open_data_files(data_files, example_row)
        self._refuse_media([config.get("image_key", "images"), config.get("video_key", "videos")])
        shuffle, seed = config.get("shuffle", True), config.get("seed")
        self.rows = choose_rows(self.table.num_rows, max_samples, shuffle, 0 if seed is None else seed)
        self._check_rows()

        self.num_dropped = 0
        if config.get("filter_overlong_prompts", False):
            self._drop_overlong()
        elif self.truncation == "error":
            self._require_all_fit()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """One prompt.

        Returns:
            input_ids, attention_mask, position_ids: int64 [max_prompt_length], left-padded; raw_prompt: the chat
            messages; extra_info: dict; index: `extra_info["index"]`, else the row's number in the files; and the
            file's other columns.
        """
        row = self.rows[item]
        fields = self._fields(row)
        messages = clean_messages(fields.pop(self.prompt_key), self._where(row))
        ids = self._encode([row], [messages])[0]
        if len(ids) > self.max_prompt_length and self.truncation == "error":
            raise self._overlong_error(row, len(ids))
        ids = [token for kept in kept_slices(len(ids), self.max_prompt_length, self.truncation) for token in ids[kept]]

        num_pad = self.max_prompt_length - len(ids)
        attention_mask = torch.tensor([0] * num_pad + [1] * len(ids), dtype=torch.int64)
        extra_info = fields.get("extra_info") or {}
        return fields | {
            "input_ids": torch.tensor([self.tokenizer.pad_token_id] * num_pad + ids, dtype=torch.int64),
            "attention_mask": attention_mask,
            "position_ids": compute_position_id_with_mask(attention_mask),
            "raw_prompt": messages,
            "extra_info": extra_info,
            "index": extra_info.get("index", row),
        }

    def column(self, name: str) -> list[Any]:
        """The values of one column for the rows that are kept (for instance to check the data sources)."""
        return self.table.column(name).take(self.rows).to_pylist()

    def _fields(self, row: int) -> dict[str, Any]:
        return self.table.slice(row, 1).to_pylist()[0]

    def _where(self, row: int) -> str:
        return f"the prompt of row {row} (column {self.prompt_key!r})"

    def _encode(self, rows: Sequence[int], chats: Sequence[list[dict]]) -> list[list[int]]:
        texts = [
            render_chat(self.tokenizer, messages, self._where(row), add_generation_prompt=True, **self.template_kwargs)
            for row, messages in zip(rows, chats, strict=True)
        ]
        return encode_texts(self.tokenizer, texts)

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        prompts = self.table.column(self.prompt_key).take(rows).to_pylist()
        chats = [clean_messages(prompt, self._where(row)) for row, prompt in zip(rows, prompts, strict=True)]
        lengths = [len(ids) for ids in self._encode(rows, chats)]
        if 0 in lengths:
            raise ValueError(f"{self._where(rows[lengths.index(0)])} is empty: the chat template makes no token of it")
        return lengths

    def _overlong_error(self, row: int, num_tokens: int) -> ValueError:
        remedy = "set data.filter_overlong_prompts=True, or choose truncation left, right or middle"
        return overlong_error(self._where(row), num_tokens, "data.max_prompt_length", self.max_prompt_length, remedy)

    def _require_all_fit(self) -> None:
        for rows in iter_chunks(self.rows):
            for row, length in zip(rows, self._lengths(rows), strict=True):
                if length > self.max_prompt_length:
                    raise self._overlong_error(row, length)

    def _drop_overlong(self) -> None:
        lengths = [length for rows in iter_chunks(self.rows) for length in self._lengths(rows)]
        kept = [row for row, length in zip(self.rows, lengths, strict=True) if length <= self.max_prompt_length]
        if not kept:
            raise ValueError(
                f"data.filter_overlong_prompts left no row: the shortest of {len(lengths)} prompts has {min(lengths)} "
                f"tokens, data.max_prompt_length={self.max_prompt_length}"
            )
        self.num_dropped = len(lengths) - len(kept)
        self.rows = kept
        logger.info(
            "filter_overlong_prompts dropped %d of %d rows longer than %d tokens",
            self.num_dropped,
            len(lengths),
            self.max_prompt_length,
        )

    def _check_rows(self) -> None:
        """Whether each row has the form that is read later, when a run has gone on for hours."""
        for rows in iter_chunks(self.rows):
            prompts, answers = (self.table.column(name).take(rows) for name in (self.prompt_key, "reward_model"))
            for row, prompt, answer in zip(rows, prompts.to_pylist(), answers.to_pylist(), strict=True):
                clean_messages(prompt, self._where(row))
                if not isinstance(answer, dict) or "ground_truth" not in answer:
                    raise ValueError(
                        f"row {row}: column 'reward_model' must hold {{'style': 'rule', 'ground_truth': ...}}, "
                        f"got {str(answer)[:100]!r}"
                    )
            if "extra_info" in self.table.column_names:
                for row, extra in zip(rows, self.table.column("extra_info").take(rows).to_pylist(), strict=True):
                    if not isinstance(extra, dict | None):
                        raise ValueError(
                            f"row {row}: column 'extra_info' must hold an object, got {str(extra)[:100]!r}"
                        )

    def _refuse_media(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self.table.column_names and any(self.table.column(key).to_pylist()):
                raise ValueError(f"column {key!r} holds images or videos; only text prompts are supported")
