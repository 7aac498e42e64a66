# SPDX-License-Identifier: Apache-2.0
"""How the controller's batch becomes the workers' batch: order of the rows, choice of columns, jagged form."""

from collections.abc import Sequence

import numpy as np
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.utils.padding import left_right_2_no_padding

MODEL_KEYS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")


def prompt_batch(rows: dict, n: int, uid_prefix: str) -> DataProto:
    """Batch of prompts from a collated dictionary, each prompt n times in a row, with a ``uid`` per prompt."""
    batch = DataProto.from_single_dict(rows)
    uids = [f"{uid_prefix}-{i}" for i in range(len(batch))]
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    return batch.repeat(n, interleave=True) if n > 1 else batch


def dp_row_order(lengths: Sequence[int], dp_size: int, mini_batch_rows: int, balance: bool) -> list[int]:
    """Order of the rows that gives every data-parallel rank its part of every mini-batch.

    Workers receive contiguous parts of the batch and cut each part into mini-batches. In this order the k-th mini-batch
    over all ranks consists of the batch's rows ``[k * mini_batch_rows, (k+1) * mini_batch_rows)``, whatever the
    number of ranks, so an update does not depend on it.

    Args:
        lengths: [B] tokens of each row.
        dp_size: number of data-parallel ranks.
        mini_batch_rows: rows in a mini-batch over all ranks; a multiple of dp_size that divides B.
        balance: give the ranks parts of about equal token counts (and equal row counts) in each mini-batch.

    Returns:
        [B] row numbers: the rows of rank 0, then those of rank 1, ...
    """
    num_rows = len(lengths)
    assert num_rows % mini_batch_rows == 0 and mini_batch_rows % dp_size == 0, (num_rows, mini_batch_rows, dp_size)
    if dp_size == 1:
        return list(range(num_rows))
    per_rank: list[list[int]] = [[] for _ in range(dp_size)]
    for start in range(0, num_rows, mini_batch_rows):
        part_lengths = list(lengths[start : start + mini_batch_rows])
        if balance:
            parts = get_seqlen_balanced_partitions(part_lengths, dp_size, equal_size=True)
        else:
            size = mini_batch_rows // dp_size
            parts = [list(range(rank * size, (rank + 1) * size)) for rank in range(dp_size)]
        for rank, part in enumerate(parts):
            per_rank[rank].extend(start + row for row in sorted(part))
    return [row for rows in per_rank for row in rows]


def token_imbalance(lengths: Sequence[int], order: Sequence[int], dp_size: int) -> dict[str, float]:
    """Tokens of the fullest and the emptiest rank, and of the average one."""
    tokens = np.asarray(lengths)[np.asarray(order)].reshape(dp_size, -1).sum(-1)
    return {
        "global_seqlen/balanced_max": float(tokens.max()),
        "global_seqlen/balanced_min": float(tokens.min()),
        "global_seqlen/mean": float(tokens.mean()),
    }


def model_batch(batch: DataProto) -> TensorDict:
    """The columns the model reads, without padding: what every worker call starts from.

    Other columns stay on the driver: data sources, texts and the like would be pickled row by row.
    """
    columns = batch.select(batch_keys=list(MODEL_KEYS), non_tensor_batch_keys=[], meta_info_keys=[])
    return left_right_2_no_padding(columns.to_tensordict())
