# SPDX-License-Identifier: Apache-2.0
"""Conversations for supervised fine-tuning: ids of the whole conversation, loss mask over the assistant's tokens."""

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
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
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

__all__ = ["MultiTurnSFTDataset", "SFTTensorCollator"]

# Encoded rows are kept for the next epochs up to this many tokens (about 80 MiB); larger data sets are encoded again.
_MAX_CACHED_TOKENS = 16 * 2**20

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SFTTensorCollator:
    """Makes jagged tensors of rows of `MultiTurnSFTDataset`.

    Args:
        pad_mode: "no_padding" is the only mode.

    Raises:
        ValueError: another pad mode.
    """

    def __init__(self, pad_mode: str = "no_padding"):
        if pad_mode != "no_padding":
            raise ValueError(f"data.pad_mode={pad_mode!r} is not supported; use 'no_padding'")

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Rows of [j] tensors to jagged nested tensors [B, j], key by key."""
        return {key: nested_tensor_from_tensor_list([row[key] for row in rows]) for key in rows[0]}


class MultiTurnSFTDataset(Dataset):
    """Conversations in parquet, json or jsonl files.

    The chat template is applied once, to the whole conversation, and the ids are those of that text: rendering turn by
    turn breaks templates that look at other messages. The loss mask covers what the assistant produces, the token that
    ends its turn included:

    - a template with `{% generation %}` marks says itself which tokens these are; an EOS right behind a mark belongs
      to the turn;
    - for other templates, the text up to an assistant message (with the generation prompt) and the text with it must be
      the beginning of the whole text, and the message is what lies between. Where the second is not (templates that
      drop the reasoning of earlier turns), the turn ends at the first EOS before the next message.

    White space that a template puts behind the end of a turn is not trained on.

    Args:
        parquet_files: one path or several (parquet, json, jsonl).
        tokenizer: a transformers tokenizer with a chat template; a fast one (it must know character offsets).
        config: the `data` config: messages_key, tools_key, max_length, truncation (error, left, right, middle),
            pad_mode, apply_chat_template_kwargs, shuffle, seed.
        processor: accepted as verl passes it; conversations are text.
        max_samples: keep at most so many rows (drawn by `seed` if `shuffle`, else the first ones); all when negative.

    Raises:
        ValueError: a file, column or row is not as it must be, or a row is too long under `truncation="error"`.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any | None = None,
        max_samples: int = -1,
    ):
        self.tokenizer = tokenizer
        self.processor = processor
        self.messages_key = config.get("messages_key", "messages")
        self.tools_key = config.get("tools_key", "tools")
        self.max_length = config.get("max_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.template_kwargs = as_plain_dict(config.get("apply_chat_template_kwargs"))
        require_truncation(self.truncation)
        require_chat_template(tokenizer)
        SFTTensorCollator(config.get("pad_mode", "no_padding"))
        if not tokenizer.is_fast:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no fast version, which SFT data needs")
        template = tokenizer.get_chat_template()
        self._template_marks_generation = _GENERATION_MARK.search(template) is not None
        self._special_tokens = tuple(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)

        example = [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}]
        self.table = open_data_files(parquet_files, {self.messages_key: example})
        shuffle, seed = config.get("shuffle", True), config.get("seed")
        self.rows = choose_rows(self.table.num_rows, max_samples, shuffle, 0 if seed is None else seed)
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_cached_tokens = 0
        self._check_rows()
        self[0]  # a template or a schema that does not work shows at once
        if self.truncation == "error":
            self._require_all_fit()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """One conversation.

        Returns:
            input_ids, position_ids, loss_mask: int64 [j], j <= max_length. loss_mask[t] is 1 where token t itself is
            one that the assistant produced.
        """
        row = self.rows[item]
        input_ids, loss_mask = self._cache.get(row) or self._encode(row)
        if row not in self._cache and self._num_cached_tokens < _MAX_CACHED_TOKENS:
            self._cache[row] = input_ids, loss_mask
            self._num_cached_tokens += len(input_ids)
        return {
            "input_ids": input_ids.long(),
            "position_ids": torch.arange(len(input_ids)),
            "loss_mask": loss_mask.long(),
        }

    def _where(self, row: int) -> str:
        return f"the conversation of row {row} (column {self.messages_key!r})"

    def _conversation(self, row: int) -> tuple[list[dict], dict[str, Any]]:
        """The messages of a row and what else the template is given."""
        fields = self.table.slice(row, 1).to_pylist()[0]
        messages = clean_messages(fields[self.messages_key], self._where(row))
        tools = fields.get(self.tools_key)
        return messages, self.template_kwargs | ({"tools": tools} if tools else {})

    def _check_rows(self) -> None:
        """Whether each row has the form that is read later, when a run has gone on for hours."""
        for rows in iter_chunks(self.rows):
            for row, value in zip(rows, self.table.column(self.messages_key).take(rows).to_pylist(), strict=True):
                messages = clean_messages(value, self._where(row))
                if not any(message["role"] == "assistant" for message in messages):
                    raise ValueError(f"{self._where(row)} has no assistant message, so there is nothing to learn from")

    def _require_all_fit(self) -> None:
        for rows in iter_chunks(self.rows):
            texts = []
            for row in rows:
                messages, kwargs = self._conversation(row)
                texts.append(render_chat(self.tokenizer, messages, self._where(row), False, **kwargs))
            for row, ids in zip(rows, encode_texts(self.tokenizer, texts), strict=True):
                if len(ids) > self.max_length:
                    raise self._overlong_error(row, len(ids))

    def _overlong_error(self, row: int, num_tokens: int) -> ValueError:
        remedy = "or choose truncation left, right or middle"
        return overlong_error(self._where(row), num_tokens, "data.max_length", self.max_length, remedy)

    def _encode(self, row: int) -> tuple[Tensor, Tensor]:
        """Token ids (int32 [j]) and loss mask (bool [j]) of a row, cut to `max_length`; small types to be kept."""
        messages, kwargs = self._conversation(row)
        where = self._where(row)
        if self._template_marks_generation:
            ids, mask = self._mask_from_marks(messages, where, kwargs)
        else:
            ids, mask = self._mask_from_prefixes(messages, where, kwargs)
        if len(ids) > self.max_length and self.truncation == "error":
            raise self._overlong_error(row, len(ids))
        kept = kept_slices(len(ids), self.max_length, self.truncation)
        input_ids, loss_mask = torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool)
        return torch.cat([input_ids[k] for k in kept]), torch.cat([loss_mask[k] for k in kept])

    def _mask_from_marks(self, messages: list[dict], where: str, kwargs: dict) -> tuple[list[int], list[int]]:
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(
                f"{where}: the chat template of {self.tokenizer.name_or_path!r} failed: {error}"
            ) from error
        ids, mask = encoded["input_ids"], list(encoded["assistant_masks"])
        if not any(mask):
            raise ValueError(f"{where}: the chat template's generation marks cover no token")
        for t in range(1, len(ids)):
            if mask[t - 1] and ids[t] == self.tokenizer.eos_token_id and ids[t - 1] != ids[t]:
                mask[t] = 1
        return ids, mask

    def _mask_from_prefixes(self, messages: list[dict], where: str, kwargs: dict) -> tuple[list[int], list[int]]:
        text = render_chat(self.tokenizer, messages, where, False, **kwargs)
        spans = [
            self._assistant_span(text, messages, k, where, kwargs)
            for k, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = [0] * len(encoded["input_ids"])
        # A token that begins before the span is part of the prompt at generation time, so it is not the assistant's.
        for t, (begin, end) in enumerate(encoded["offset_mapping"]):
            mask[t] = int(end > begin and any(start <= begin < stop for start, stop in spans))
        return encoded["input_ids"], mask

    def _assistant_span(self, text: str, messages: list[dict], k: int, where: str, kwargs: dict) -> tuple[int, int]:
        """Characters [start, stop) of `text` that assistant message `k` produces, the end of its turn included."""
        where = f"{where}, message {k}"
        remedy = "mark the assistant's part in the chat template with {% generation %} ... {% endgeneration %}"
        if k == 0:
            raise ValueError(f"{where}: the conversation begins with the assistant; {remedy}")
        head = render_chat(self.tokenizer, messages[:k], where, True, **kwargs)
        if not text.startswith(head):
            raise ValueError(
                f"{where}: the messages before it render differently alone than in the whole conversation, so its "
                f"tokens cannot be told apart; {remedy}"
            )
        body = render_chat(self.tokenizer, messages[: k + 1], where, False, **kwargs)
        stop = len(body) if text.startswith(body) else self._stop_at_eos(text, len(head), messages, k, where, kwargs)
        if stop is None:
            raise ValueError(
                f"{where}: it renders differently alone than in the whole conversation, and no EOS ends it, so its "
                f"tokens cannot be told apart; {remedy}"
            )
        turn = text[len(head) : stop].rstrip()
        return len(head), len(head) + len(turn) if turn.endswith(self._special_tokens) else stop

    def _stop_at_eos(self, text: str, start: int, messages: list[dict], k: int, where: str, kwargs: dict) -> int | None:
        """Where the EOS that ends message `k` stops in `text`; None if there is none before the next message."""
        following = messages[k + 1]  # there is one: the last message's rendering is the whole text
        changed = [*messages[: k + 1], following | {"content": f"\0{following['content']}"}, *messages[k + 2 :]]
        following_start = len(commonprefix([text, render_chat(self.tokenizer, changed, where, False, **kwargs)]))
        eos = self.tokenizer.eos_token
        found = text.find(eos, start, following_start) if eos else -1
        return found + len(eos) if found >= 0 else None
