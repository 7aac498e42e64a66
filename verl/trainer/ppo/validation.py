# SPDX-License-Identifier: Apache-2.0
"""Scoring of the held-out prompts, and files of generated texts."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.batching import prompt_batch
from verl.trainer.ppo.metric_utils import flatten_validation_metrics, process_validation_metrics
from verl.trainer.ppo.reward import compute_reward, reward_metrics

OWN_COLUMNS = ("uid", "data_source", "reward", "prompts", "responses")
PROMPT_KEYS = ("input_ids", "attention_mask", "position_ids")


def generate(actor_wg: Any, batch: DataProto, meta_info: dict[str, Any]) -> DataProto:
    """Have the workers answer the prompts of ``batch`` (input_ids, attention_mask, position_ids, [B, P]).

    Returns the batch with the rollout's columns in place of the prompt columns, same rows, same order. The workers'
    ``metrics`` are in ``meta_info``.
    """
    prompts = batch.select(batch_keys=list(PROMPT_KEYS), non_tensor_batch_keys=[], meta_info_keys=[])
    prompts.meta_info = dict(meta_info)
    padded, num_padding = pad_dataproto_to_divisor(prompts, actor_wg.world_size)
    answers = unpad_dataproto(actor_wg.generate_sequences(padded), num_padding)
    others = [key for key in batch.batch.keys() if key not in answers.batch.keys()]
    kept = batch.select(batch_keys=others) if others else DataProto(non_tensor_batch=batch.non_tensor_batch)
    answers.non_tensor_batch = dict(kept.non_tensor_batch)
    for key in others:
        answers.batch[key] = kept.batch[key]
    return answers


def validate(
    actor_wg: Any, batches: Iterable[dict], reward_fn: Callable, meta_info: dict[str, Any], n: int
) -> tuple[dict[str, float], dict[str, list]]:
    """Score the rollout on held-out prompts.

    Args:
        actor_wg: worker group with ``generate_sequences`` and ``world_size``.
        batches: collated prompts.
        reward_fn: reward manager.
        meta_info: for the rollout; ``validate`` is set here.
        n: samples for each prompt.

    Returns:
        (metrics for the log, columns of all samples: uid, data_source, reward, the reward function's extra columns, and
        prompts, responses as token ids without padding; None where a row has no value for an extra column). Rows that
        could not be scored are counted in the metrics, if the reward manager counts them: val-aux/reward/...
    """
    columns: dict[str, list] = defaultdict(list)
    failures: Counter[str] = Counter()
    for number, rows in enumerate(batches):
        batch = prompt_batch(rows, n, uid_prefix=str(number))
        batch = generate(actor_wg, batch, meta_info | {"validate": True})
        scores, extras = compute_reward(batch, reward_fn)
        failures.update(reward_metrics(reward_fn))
        done = len(columns["uid"])
        columns["uid"] += batch.non_tensor_batch["uid"].tolist()
        columns["data_source"] += batch.non_tensor_batch["data_source"].tolist()
        columns["reward"] += scores.sum(-1).tolist()
        prompts, responses = token_lists(batch)
        columns["prompts"] += prompts
        columns["responses"] += responses
        for name, values in extras.items():
            if name not in OWN_COLUMNS:
                columns[name] = columns.get(name, [None] * done) + list(values)
        for values in columns.values():  # a batch need not have the extra columns of another
            values += [None] * (len(columns["uid"]) - len(values))
    numbers = {name: values for name, values in columns.items() if name not in ("uid", "prompts", "responses")}
    by_source = process_validation_metrics(columns["data_source"], columns["uid"], numbers)
    return flatten_validation_metrics(by_source) | _failure_metrics(failures, len(columns["uid"])), dict(columns)


def _failure_metrics(counts: Mapping[str, float], rows: int) -> dict[str, float]:
    """Counts of the reward manager, summed over batches, under names for the log; none if it does not count."""
    found = {name: counts[name] for name in ("reward/num_failures", "reward/num_timeouts") if name in counts}
    if found:
        found["reward/failed_share"] = sum(found.values()) / max(rows, 1)
    return {f"val-aux/{name}": float(value) for name, value in found.items()}


def token_lists(batch: DataProto) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and responses, without padding."""
    data = batch.batch
    width = data["prompts"].shape[-1]
    attention = data["attention_mask"].bool()
    prompts = [row[mask].tolist() for row, mask in zip(data["prompts"], attention[:, :width], strict=True)]
    responses = [row[mask].tolist() for row, mask in zip(data["responses"], attention[:, width:], strict=True)]
    return prompts, responses


def write_generations(path: str, tokenizer: Any, columns: dict[str, list], num_samples: int) -> None:
    """Write the first ``num_samples`` of the columns that `validate` returns as JSON lines, with texts for token
    ids."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    texts = {
        "input": tokenizer.batch_decode(columns["prompts"][:num_samples], skip_special_tokens=True),
        "output": tokenizer.batch_decode(columns["responses"][:num_samples], skip_special_tokens=True),
    }
    others = {name: values for name, values in columns.items() if name not in ("prompts", "responses")}
    whole = texts | {name: v[:num_samples] for name, v in others.items() if len(v) == len(columns["responses"])}
    with open(path, "w", encoding="utf-8") as f:
        for values in zip(*whole.values(), strict=True):
            f.write(json.dumps(dict(zip(whole, values, strict=True)), ensure_ascii=False, default=str) + "\n")
