# SPDX-License-Identifier: Apache-2.0
"""Divide sequences of uneven length into parts of even work: balanced partitions and dynamic micro-batches."""

import heapq
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.jagged import JaggedRowPick, is_jagged, jagged_parts


def ceildiv(a: int, b: int) -> int:
    """Divide integers, rounding up."""
    return -(a // -b)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divide items into k parts of nearly equal sums by the largest differencing method (Karmarkar and Karp, 1982).

    Args:
        seqlen_list: the weights, one per item.
        k_partitions: number of parts; some come out empty only where there are fewer items than parts.
        equal_size: every part gets the same number of items (their number must be divisible by k).

    Returns:
        k lists of item numbers. Ties are broken by position, so that every rank finds the same parts.
    """
    if equal_size and len(seqlen_list) % k_partitions:
        raise ValueError(
            f"{len(seqlen_list)} sequences cannot be divided into {k_partitions} parts of equal size: use "
            f"{tu.nearest_multiples(len(seqlen_list), k_partitions)} sequences"
        )
    order = sorted(range(len(seqlen_list)), key=lambda i: (-seqlen_list[i], i))
    group = k_partitions if equal_size else 1
    # A state is the list of its non-empty parts as (sum, items), largest sum first. Merging the two states of largest
    # spread, the large parts of one with the small parts of the other, lets their differences cancel.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), group):
        state = [(seqlen_list[i], [i]) for i in order[start : start + group]]
        heap.append((-_spread(state, k_partitions), start, state))
    heapq.heapify(heap)
    number = len(order)
    while len(heap) > 1:
        state = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2], k_partitions)
        heapq.heappush(heap, (-_spread(state, k_partitions), number, state))
        number += 1
    parts = [items for _, items in heap[0][2]] if heap else []
    return parts + [[] for _ in range(k_partitions - len(parts))]


def _spread(state: list[tuple[int, list[int]]], k: int) -> int:
    return state[0][0] - (state[-1][0] if len(state) == k else 0)


def _merge(a: list[tuple[int, list[int]]], b: list[tuple[int, list[int]]], k: int) -> list[tuple[int, list[int]]]:
    """Join part i of ``a`` with part k-1-i of ``b``; the parts that either state lacks are empty."""
    alone = k - len(b)
    state = a[:alone] + b[: k - len(a)]
    state += [(x[0] + b[k - 1 - i][0], x[1] + b[k - 1 - i][1]) for i, x in enumerate(a[alone:], alone)]
    state.sort(key=lambda part: -part[0])
    return state


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divide sequences into k parts of nearly equal token counts; no part is empty, item numbers ascend in each.

    Raises:
        ValueError: fewer sequences than parts, or ``equal_size`` and not divisible; the message has the right numbers.
    """
    if k_partitions < 1 or len(seqlen_list) < k_partitions:
        raise ValueError(
            f"{len(seqlen_list)} sequences cannot be divided into {k_partitions} parts: use at least {k_partitions} "
            f"sequences, or from 1 to {len(seqlen_list)} parts"
        )
    parts = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    assert all(parts)  # a merge of states leaves a part empty only while there are fewer items than parts
    return [sorted(part) for part in parts]


def _first_fit(lens: Sequence[int], budget: int) -> list[list[int]]:
    """Fill bins, longest sequence first, each into the first bin with room. Every bin keeps the budget."""
    room: list[int] = []
    bins: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lambda i: (-lens[i], i)):
        slot = next((s for s, free in enumerate(room) if free >= lens[i]), len(bins))
        if slot == len(bins):
            bins.append([])
            room.append(budget)
        bins[slot].append(i)
        room[slot] -= lens[i]
    return bins


def _fits(parts: list[list[int]], lens: Sequence[int], budget: int) -> bool:
    return all(sum(lens[i] for i in part) <= budget for part in parts)


def _smallest_fitting(lens: Sequence[int], budget: int) -> list[list[int]]:
    """Find the fewest parts that keep the budget: balanced ones where possible, else those of first fit."""
    bins = _first_fit(lens, budget)
    for k in range(ceildiv(sum(lens), budget) or 1, len(bins) + 1):
        parts = get_seqlen_balanced_partitions(lens, k, equal_size=False)
        if _fits(parts, lens, budget):
            return parts
    return bins


def _grow_to(parts: list[list[int]], lens: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Make ``count`` parts out of the fewer parts given: balanced anew if that keeps the budget, else by halving."""
    if len(parts) == count:
        return parts
    balanced = get_seqlen_balanced_partitions(lens, count, equal_size=False)
    if _fits(balanced, lens, budget):
        return balanced
    parts = [list(part) for part in parts]
    while len(parts) < count:
        big = max((p for p in parts if len(p) > 1), key=lambda p: sum(lens[i] for i in p))
        parts.remove(big)
        halves = get_seqlen_balanced_partitions([lens[i] for i in big], 2, equal_size=False)
        parts += [[big[i] for i in half] for half in halves]
    return parts


def _max_over_group(values: list[int], group: dist.ProcessGroup) -> list[int]:
    from verl.utils.device import get_device_name

    device = "cpu" if "gloo" in dist.get_backend(group) else get_device_name()
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    largest: list[int] = tensor.tolist()
    return largest


def _sequence_lengths(batch: TensorDict) -> list[int]:
    """Real tokens per row, from jagged ``input_ids`` or else from ``attention_mask``."""
    ids = batch.get("input_ids", None)
    if is_jagged(ids):
        lengths: list[int] = jagged_parts(ids)[1].diff().tolist()
        return lengths
    tu.get_keys(batch, ["attention_mask"])
    lengths = batch["attention_mask"].bool().sum(dim=1).tolist()
    return lengths


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Divide a batch into micro-batches of at most ``max_token_len`` real tokens, evenly filled.

    Args:
        batch: jagged ``input_ids`` [B, j], or padded with ``attention_mask`` [B, S].
        max_token_len: tokens per micro-batch; never exceeded.
        dp_group: ranks that must agree on the number of micro-batches (one MAX all-reduce); every rank of it calls.
        num_batches_divided_by: the number is rounded up to a multiple of this (interleaved pipelines need it).
        same_micro_num_in_dp: agree with ``dp_group``; if False each rank takes what it needs.
        min_num_micro_batch: at least so many, as far as there are rows.

    Returns:
        The micro-batches, fullest first, and for each the row numbers it took, ascending. No part is ever empty.

    Raises:
        ValueError: on all ranks of ``dp_group`` alike, where a sequence of any rank is longer than ``max_token_len``,
            or a rank has fewer rows than the common number (data-parallel ranks get equal shares, so this happens
            only when rounding up to ``num_batches_divided_by``).
    """
    lens = _sequence_lengths(batch)
    if not lens or max_token_len < 1:
        raise ValueError(f"cannot divide a batch of {len(lens)} rows by max_token_len={max_token_len}")
    group = dp_group if same_micro_num_in_dp else None
    longest = max(lens)
    parts = _smallest_fitting(lens, max_token_len) if longest <= max_token_len else []
    count = max(len(parts), min(min_num_micro_batch or 1, len(lens)))
    rows = len(lens)
    if group is not None:
        count, longest, rows = _max_over_group([count, longest, -rows], group)
        rows = -rows
    if longest > max_token_len:
        raise ValueError(
            f"a sequence has {longest} tokens, more than max_token_len={max_token_len} of a micro-batch: set "
            f"max_token_len_per_gpu (times context parallel size) to {longest} or more"
        )
    needed, count = count, ceildiv(count, num_batches_divided_by or 1) * (num_batches_divided_by or 1)
    if count > rows:
        raise ValueError(
            f"{needed} micro-batches of max_token_len={max_token_len} are needed, {count} as a multiple of "
            f"{num_batches_divided_by or 1}, but a data-parallel rank has only {rows} rows: give each rank at least "
            f"{count} rows, or raise max_token_len"
        )
    parts = _grow_to(parts, lens, max_token_len, count)
    parts = sorted((sorted(part) for part in parts), key=lambda part: (-sum(lens[i] for i in part), part))
    return [tu.index_select_tensor_dict(batch, part) for part in parts], parts


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Invert a permutation: the result at ``idx_map[i]`` is i."""
    reverse = [0] * len(idx_map)
    for i, position in enumerate(idx_map):
        reverse[position] = i
    return reverse


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Bring the rows of concatenated micro-batch results back to the order of the batch. Differentiable.

    Args:
        data: dense [B, ...] or jagged [B, j, ...], in the order of the micro-batches.
        batch_idx_list: the row numbers that :func:`rearrange_micro_batches` returned.

    Raises:
        ValueError: the number of rows is not that of the index lists.
    """
    taken = [i for part in batch_idx_list for i in part]
    if data.size(0) != len(taken):
        raise ValueError(f"data has {data.size(0)} rows but the micro-batches had {len(taken)} together")
    index = torch.tensor(get_reverse_idx(taken), device=data.device)
    return JaggedRowPick(index)(data) if is_jagged(data) else data.index_select(0, index)
