# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2): prompts whose responses all fare alike are replaced.

Such a group has advantage 0 everywhere under grpo. The batch is filled from further prompts instead, so that every
update sees `data.train_batch_size` prompts that say something.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl.protocol import DataProto

__all__ = ["fill_batch", "filters_groups", "loader_batch_size", "mixed_groups"]

# Names of verl for the sum of a response's scores.
SEQUENCE_REWARDS = ("seq_reward", "seq_final_reward")


def filters_groups(config: DictConfig) -> bool:
    """Whether groups are filtered."""
    return bool((config.algorithm.get("filter_groups") or {}).get("enable"))


def loader_batch_size(config: DictConfig) -> int:
    """Prompts that are drawn at a time: `data.gen_batch_size` under dynamic sampling, else `data.train_batch_size`."""
    return config.data.gen_batch_size if filters_groups(config) else config.data.train_batch_size


def fill_batch(
    draw: Callable[[dict, int], tuple[DataProto, dict[str, float]]],
    rows: dict,
    more: Iterator[dict] | None,
    config: DictConfig,
    batches_in_data: int,
) -> tuple[DataProto, dict[str, float]]:
    """Draw batches until there are enough prompts that pass the filter; without the filter, one batch as it is.

    Args:
        draw: (collated prompts, number of the draw) -> (their responses with scores, n rows for each prompt; counts
            for the log).
        rows: the first collated prompts.
        more: the next ones; not needed without the filter.
        config: reads algorithm.filter_groups, data.train_batch_size, data.gen_batch_size.
        batches_in_data: draws that go through all the training data.

    Returns:
        (a batch of train_batch_size prompts, in the order in which they were drawn; the draws' summed counts and, under
        the filter, `train/num_gen_batches`, `train/mixed_groups_share` and `train/score_before_filter`).

    Raises:
        ValueError: too few prompts pass within `max_num_gen_batches`, or none in the whole data; or no such metric.
    """
    batch, counts = draw(rows, 0)
    if not filters_groups(config):
        return batch, counts
    needed, groups = config.data.train_batch_size, config.algorithm.filter_groups
    kept: list[DataProto] = []
    num_kept, num_seen, scores = 0, 0, []
    for number in range(1, 1 << 62):
        scores += batch.batch["token_level_scores"].sum(-1).tolist()
        passing = mixed_groups(batch, groups.metric)
        num_seen += len(set(batch.non_tensor_batch["uid"]))
        kept.append(_take(batch, passing[: needed - num_kept]))
        num_kept += len(passing)
        if num_kept >= needed:
            break
        if number == groups.max_num_gen_batches or (num_kept == 0 and number >= batches_in_data):
            raise _too_few(config, number, num_kept)
        batch, new = draw(next(more), number)
        counts = {name: counts.get(name, 0.0) + value for name, value in new.items()}
    counts |= {
        "train/num_gen_batches": float(number),
        "train/mixed_groups_share": num_kept / num_seen,
        "train/score_before_filter": float(np.mean(scores)),
    }
    return _concat([part for part in kept if len(part)]), counts


def mixed_groups(batch: DataProto, metric: str) -> list[Any]:
    """The uids, in order, whose rows differ in ``metric``: `seq_reward`, or a column of the reward's extra values.

    Raises:
        ValueError: there is no such column, or a row has no number in it.
    """
    if metric in SEQUENCE_REWARDS or (metric == "score" and "score" not in batch.non_tensor_batch):
        values = batch.batch["token_level_scores"].sum(-1).tolist()
    elif metric in batch.non_tensor_batch:
        values = batch.non_tensor_batch[metric].tolist()
    else:
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r} is not among the reward's extra values, which are "
            f"{', '.join(batch.non_tensor_batch)}; use seq_reward, or reward.reward_manager.name=dapo, which gives acc"
        )
    by_uid: dict[Any, set[float]] = {}
    for row, (uid, value) in enumerate(zip(batch.non_tensor_batch["uid"], values, strict=True)):
        if not isinstance(value, int | float | np.number | np.bool_):
            raise ValueError(
                f"algorithm.filter_groups.metric={metric!r} is {value!r} in row {row}; the reward function must report "
                "a number for every response"
            )
        by_uid.setdefault(uid, set()).add(float(value))
    return [uid for uid, distinct in by_uid.items() if len(distinct) > 1]


def _take(batch: DataProto, uids: list[Any]) -> DataProto:
    return batch.select_idxs(np.isin(batch.non_tensor_batch["uid"].astype(str), [str(uid) for uid in uids]))


def _concat(parts: list[DataProto]) -> DataProto:
    """The parts' rows; a column that a part lacks (extra values of other rewards) is None there."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in names:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    return DataProto.concat(parts)


def _too_few(config: DictConfig, num_batches: int, num_kept: int) -> ValueError:
    groups, needed = config.algorithm.filter_groups, config.data.train_batch_size
    said = (
        f"{num_batches} batches of data.gen_batch_size={loader_batch_size(config)} prompts gave {num_kept} prompts "
        f"whose responses differ in {groups.metric!r}, of data.train_batch_size={needed}; "
    )
    if num_kept == 0:
        return ValueError(said + "the data are too easy or too hard for this policy, or the metric never varies")
    enough = math.ceil(num_batches * needed / num_kept)
    return ValueError(
        f"{said}at this rate algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches} would have to be "
        f"{enough} (0: no limit), or data.train_batch_size at most {num_kept}"
    )
