# SPDX-License-Identifier: Apache-2.0
"""Cutting a batch into micro-batches, and putting their outputs back in order."""

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.jagged import jagged_parts, make_jagged
from verl.utils.seqlen_balancing import ceildiv, rearrange_micro_batches, restore_dynamic_batch

__all__ = ["micro_batches_on_device", "restore_order", "row_lengths", "split_micro_batches"]

_ROW_LENGTHS = "row_lengths"


def split_micro_batches(
    data: TensorDict, dp_group: dist.ProcessGroup | None, *, budget_factor: int = 1, divisor: int = 1
) -> tuple[list[TensorDict], list[list[int]]]:
    """Micro-batches of a batch, the same number on every data-parallel rank.

    By token budget if ``use_dynamic_bsz`` is set in ``data`` (``max_token_len_per_gpu`` times ``budget_factor``, since
    context-parallel ranks share a sequence), else by ``micro_batch_size_per_gpu`` rows; without either, one
    micro-batch.

    Args:
        data: this rank's batch; ranks hold the same number of rows.
        dp_group: ranks that must agree on the number.
        budget_factor: context-parallel size.
        divisor: the number must be a multiple of it (pipeline size under virtual stages).

    Returns:
        the micro-batches and, for each, the rows of ``data`` that it holds.

    Raises:
        ValueError: a sequence above the budget, or a number of micro-batches that ``divisor`` does not divide.
    """
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", False):
        budget = tu.get_non_tensor_data(data, "max_token_len_per_gpu", None)
        if budget is None:
            raise ValueError("use_dynamic_bsz=True needs max_token_len_per_gpu")
        return rearrange_micro_batches(
            data, budget * budget_factor, dp_group=dp_group, num_batches_divided_by=divisor if divisor > 1 else None
        )
    rows = data.batch_size[0]
    size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None) or max(rows, 1)
    count = max(ceildiv(rows, size), 1)
    if count % divisor:
        raise ValueError(
            f"micro_batch_size_per_gpu={size} makes {count} micro-batches of {rows} rows; virtual pipeline stages "
            f"need a multiple of {divisor}: use {max(rows // (ceildiv(count, divisor) * divisor), 1)}"
        )
    indices = [list(range(i * size, min((i + 1) * size, rows))) for i in range(count)]
    if count == 1:
        return [data], indices
    return [tu.slice_tensordict(data, part[0], part[-1] + 1) for part in indices], indices


def micro_batches_on_device(parts: list[TensorDict], device: str) -> list[TensorDict]:
    """Move micro-batches to ``device``; the lengths of their rows stay on the host too, see :func:`row_lengths`."""
    for part in parts:
        tu.assign_non_tensor_data(part, _ROW_LENGTHS, part["input_ids"].offsets().diff().tolist())
    return [part.to(device) for part in parts] if device != "cpu" else parts


def row_lengths(micro_batch: TensorDict) -> tuple[torch.Tensor, list[int]]:
    """Tokens of each row: [b] int64 on the micro-batch's device, and the same numbers on the host."""
    lengths = micro_batch["input_ids"].offsets().diff().long()
    known = tu.get_non_tensor_data(micro_batch, _ROW_LENGTHS, None)
    return lengths, lengths.tolist() if known is None else known


def restore_order(parts: list[torch.Tensor], indices: list[list[int]]) -> torch.Tensor:
    """Concatenate the micro-batches' jagged outputs [b, j] and bring the rows back to the order of the batch."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([jagged_parts(part)[0] for part in parts])
    lengths = torch.cat([jagged_parts(part)[1].diff() for part in parts])
    joined = make_jagged(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    return restore_dynamic_batch(joined, indices)
