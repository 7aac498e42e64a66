# SPDX-License-Identifier: Apache-2.0
"""Packing and the zigzag split, all context-parallel ranks in one process."""

import pytest
import torch

from verl.models.mcore.packing import PackLayout, alignment, make_layout, roll_left_within_sequences, zigzag_indices


def layouts(lengths: list[int], tp: int, cp: int, dense: bool = False) -> list[PackLayout]:
    return [make_layout(torch.tensor(lengths), tp_size=tp, cp_size=cp, cp_rank=r, dense=dense) for r in range(cp)]


@pytest.mark.parametrize(
    ("tp", "cp", "length", "padded"),
    [(1, 1, 5, 5), (4, 1, 5, 8), (1, 2, 5, 8), (4, 2, 17, 32), (2, 2, 3, 8), (1, 4, 3, 8)],
)
def test_a_sequence_is_padded_to_tp_times_two_cp(tp: int, cp: int, length: int, padded: int) -> None:
    assert alignment(tp, cp) == (tp if cp == 1 else tp * 2 * cp)
    assert make_layout(torch.tensor([length]), tp_size=tp, cp_size=cp).padded_lengths.tolist() == [padded]


def test_zigzag_positions_of_eight_and_sixteen_tokens() -> None:
    assert [zigzag_indices(torch.tensor([8]), 2, r).tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [zigzag_indices(torch.tensor([16]), 4, r).tolist() for r in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_position_ids_are_those_of_the_zigzag() -> None:
    first, second = layouts([8, 4], 1, 2)
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]


def test_labels_on_the_seam_are_the_true_next_tokens() -> None:
    tokens = torch.arange(10, 18)
    labels = roll_left_within_sequences(tokens, torch.tensor([8]))
    first, second = layouts([8], 1, 2)
    assert first.pack(labels).tolist() == [[11, 12, 17, 10]]
    assert second.pack(labels).tolist() == [[13, 14, 15, 16]]


def test_labels_do_not_cross_sequences() -> None:
    rolled = roll_left_within_sequences(torch.tensor([1, 2, 3, 7, 8, 5]), torch.tensor([3, 2, 0, 1]))
    assert rolled.tolist() == [2, 3, 1, 8, 7, 5]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("lengths", [[7, 12, 5], [1], [3, 0, 9], [64] + [1] * 30, [2, 2]])
def test_packing_then_unpacking_gives_the_tokens_back(lengths: list[int], tp: int, cp: int, dense: bool) -> None:
    values = torch.randn(sum(lengths), 3, dtype=torch.float64)
    parts = layouts(lengths, tp, cp, dense)
    packed = [layout.pack(values) for layout in parts]
    expected_rows = len(lengths) if dense else 1
    assert {p.shape[0] for p in packed} == {expected_rows} and len({p.shape for p in packed}) == 1
    gathered = torch.cat([p.flatten(0, 1) for p in packed])
    assert torch.equal(parts[0].unpack(gathered), values)


@pytest.mark.parametrize("lengths", [[7], [3, 1], [5, 5, 5], [3], [4097], [0, 2]])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_local_token_counts_add_up_exactly(lengths: list[int], cp: int) -> None:
    counts = [int(layout.num_local_tokens) for layout in layouts(lengths, 1, cp)]
    assert sum(counts) == sum(lengths)
    if lengths == [3] and cp == 4:
        assert counts == [1, 1, 1, 0]  # a rank without a real token; 3 // 4 would have counted none anywhere


def test_padding_mask_marks_exactly_the_padding() -> None:
    values = torch.ones(12, dtype=torch.int64)
    for layout in layouts([5, 7], 2, 2):
        assert torch.equal(layout.pack(values) == 0, layout.padding_mask)


def test_a_batch_without_tokens_still_has_one_padded_slot() -> None:
    layout = make_layout(torch.tensor([0, 0]), tp_size=1, cp_size=2)
    assert layout.padding_mask.all() and layout.padding_mask.shape == (1, 2)
    assert layout.num_local_tokens == 0
