# SPDX-License-Identifier: Apache-2.0
"""Balanced partitions, and micro-batches that keep a token budget and agree over the data-parallel ranks."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests.utils_dist import run_world
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import (
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    rearrange_micro_batches,
    restore_dynamic_batch,
)


def _batch(lens: list[int]) -> TensorDict:
    ids = [torch.full((n,), i) for i, n in enumerate(lens)]
    return tu.get_tensordict({"input_ids": tu.nested_tensor_from_tensor_list(ids), "row": torch.arange(len(lens))})


def _sums(parts: list[list[int]], lens: list[int]) -> list[int]:
    return [sum(lens[i] for i in part) for part in parts]


def test_ceildiv_and_reverse_index():
    assert [ceildiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_differencing_on_the_textbook_example():
    # 8, 7, 6, 5, 4: differencing leaves 2 (16 and 14), greedy filling leaves 4.
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(_sums(parts, [8, 7, 6, 5, 4])) == [14, 16]


@pytest.mark.parametrize("k", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions_hold_every_sequence_once_and_are_even(k, equal_size):
    rng = random.Random(k)
    lens = [rng.randint(1, 100) for _ in range(64 // k * k)]
    parts = get_seqlen_balanced_partitions(lens, k, equal_size)
    assert len(parts) == k and all(parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lens)))
    assert all(part == sorted(part) for part in parts)
    sums = _sums(parts, lens)
    if equal_size:
        assert {len(part) for part in parts} == {len(lens) // k}
    if k <= 7:
        assert max(sums) - min(sums) <= 15
    assert parts == get_seqlen_balanced_partitions(lens, k, equal_size)


@pytest.mark.parametrize("lens", [[0, 0, 0, 0], [9, 0, 0, 0], [5, 5, 5, 5]])
def test_no_partition_is_empty(lens):
    for k in range(1, 5):
        parts = get_seqlen_balanced_partitions(lens, k, False)
        assert all(parts) and sorted(itertools.chain(*parts)) == [0, 1, 2, 3]


def test_partition_errors_name_the_numbers():
    with pytest.raises(ValueError, match="2 sequences cannot be divided into 3 parts"):
        get_seqlen_balanced_partitions([1, 2], 3, False)
    with pytest.raises(ValueError, match="5 sequences cannot be divided into 2 parts of equal size: use 4 or 6"):
        get_seqlen_balanced_partitions([1, 2, 3, 4, 5], 2, True)


def test_budget_that_the_average_would_break():
    # 6 x 7 tokens and a budget of 10: ceil(42 / 10) = 5 parts, but two sequences together are 14 tokens.
    batches, parts = rearrange_micro_batches(_batch([7] * 6), 10)
    assert parts == [[i] for i in range(6)] and [b["row"].tolist() for b in batches] == parts


@pytest.mark.parametrize("seed", range(20))
def test_budget_is_never_exceeded(seed):
    rng = random.Random(seed)
    lens = [rng.choice([1, rng.randint(1, 60), 60]) for _ in range(rng.randint(1, 40))]
    budget = rng.choice([60, 61, 90, 200, 10_000])
    divisor = rng.choice([1, 1, 2, 4])
    try:
        batches, parts = rearrange_micro_batches(_batch(lens), budget, num_batches_divided_by=divisor)
    except ValueError as error:
        assert divisor > 1 and f"only {len(lens)} rows" in str(error)
        return
    assert max(_sums(parts, lens)) <= budget and len(parts) % divisor == 0 and all(parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lens)))
    for batch, part in zip(batches, parts, strict=True):
        assert batch["row"].tolist() == part
        assert batch["input_ids"].values().tolist() == [i for i in part for _ in range(lens[i])]
    assert _sums(parts, lens) == sorted(_sums(parts, lens), reverse=True)


def test_first_fit_is_used_where_differencing_misses_the_budget():
    # 8 + 7 and 6 + 5 + 4 fill two micro-batches of 15; differencing into two makes one of 16.
    lens = [8, 7, 6, 5, 4]
    assert max(_sums(get_seqlen_balanced_partitions(lens, 2, False), lens)) == 16
    _, parts = rearrange_micro_batches(_batch(lens), 15)
    assert _sums(parts, lens) == [15, 15]


def test_growing_by_halving_keeps_the_budget(monkeypatch):
    lens = [8, 7, 6, 5, 4, 1]
    monkeypatch.setattr(seqlen_balancing, "_fits", lambda *_: False)
    parts = seqlen_balancing._grow_to([[0, 1], [2, 3, 4, 5]], lens, 16, 4)
    assert len(parts) == 4 and sorted(itertools.chain(*parts)) == list(range(6))
    assert all({*part} <= {0, 1} or {*part} <= {2, 3, 4, 5} for part in parts)
    assert sorted(_sums(parts, lens)) == [7, 7, 8, 9]


def test_count_is_rounded_up_for_interleaved_pipelines():
    lens = [10] * 10
    assert len(rearrange_micro_batches(_batch(lens), 20)[1]) == 5
    assert len(rearrange_micro_batches(_batch(lens), 20, num_batches_divided_by=4)[1]) == 8
    with pytest.raises(ValueError, match="5 micro-batches.*are needed, 12 as a multiple of 12.*only 10 rows"):
        rearrange_micro_batches(_batch(lens), 20, num_batches_divided_by=12)


def test_minimum_count_is_kept_as_far_as_there_are_rows():
    assert len(rearrange_micro_batches(_batch([1] * 4), 100, min_num_micro_batch=3)[1]) == 3
    assert len(rearrange_micro_batches(_batch([1] * 4), 100, min_num_micro_batch=9)[1]) == 4


def test_padded_batches_count_real_tokens():
    mask = (torch.arange(8) < torch.tensor([[3], [8], [5], [1]])).long()
    td = TensorDict({"attention_mask": mask, "row": torch.arange(4)}, batch_size=[4])
    _, parts = rearrange_micro_batches(td, 9)
    assert max(_sums(parts, [3, 8, 5, 1])) <= 9 and len(parts) == 2


def test_too_long_a_sequence_is_named():
    with pytest.raises(ValueError, match="11 tokens, more than max_token_len=10"):
        rearrange_micro_batches(_batch([3, 11]), 10)


def test_restoring_the_order_of_dense_and_jagged_results():
    lens = [5, 1, 9, 2, 7, 7, 3]
    batches, parts = rearrange_micro_batches(_batch(lens), 12)
    assert len(parts) > 1 and list(itertools.chain(*parts)) != list(range(7))
    joined = tu.concat_tensordict(batches)
    assert restore_dynamic_batch(joined["row"], parts).tolist() == list(range(7))
    wide = restore_dynamic_batch(torch.stack([joined["row"], joined["row"] * 2], 1), parts)
    assert wide.tolist() == [[i, 2 * i] for i in range(7)]
    back = restore_dynamic_batch(joined["input_ids"], parts)
    assert [row.tolist() for row in back.unbind()] == [[i] * n for i, n in enumerate(lens)]
    with pytest.raises(ValueError, match="6 rows but the micro-batches had 7"):
        restore_dynamic_batch(joined["row"][:6], parts)


def test_restoring_is_differentiable():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (restore_dynamic_batch(x, [[2], [0, 1]]) * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad.tolist() == [100.0, 1.0, 10.0]


def _on_rank(rank: int, world_size: int) -> dict:
    group = dist.group.WORLD
    result: dict = {}
    lens = [[10] * 6, [2] * 6][rank]
    result["common"] = rearrange_micro_batches(_batch(lens), 20, group)[1]
    result["own"] = len(rearrange_micro_batches(_batch(lens), 20, group, same_micro_num_in_dp=False)[1])
    result["rounded"] = len(rearrange_micro_batches(_batch(lens), 20, group, num_batches_divided_by=4)[1])
    # Growing to the other rank's count must keep the budget: this rank fits in fewer parts, evenly filled or not.
    uneven = [[9, 9, 9, 9], [7, 5, 4, 4]][rank]
    result["grown"] = _sums(rearrange_micro_batches(_batch(uneven), 10, group)[1], uneven)
    for name, rows, limit in (("too long", [[3, 3], [3, 30]], 20), ("too few rows", [[15] * 4, [3, 3]], 20)):
        try:
            rearrange_micro_batches(_batch(rows[rank]), limit, group)
        except ValueError as error:
            result[name] = str(error)
    return result


@pytest.mark.gloo
def test_ranks_agree_on_the_count_and_fail_together():
    first, second = run_world(_on_rank, 2, timeout_s=60)
    assert len(first["common"]) == len(second["common"]) == 3
    assert sorted(itertools.chain(*second["common"])) == list(range(6)) and all(second["common"])
    assert (first["own"], second["own"]) == (3, 1)
    assert first["rounded"] == second["rounded"] == 4
    assert first["grown"] == [9, 9, 9, 9] and len(second["grown"]) == 4
    assert first["too long"] == second["too long"] and "30 tokens" in first["too long"]
    assert first["too few rows"] == second["too few rows"] and "only 2 rows" in first["too few rows"]
