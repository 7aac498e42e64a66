# SPDX-License-Identifier: Apache-2.0
"""agg_loss: reference values, independence of the split, masked positions, empty steps, refusals."""

import math

import pytest
import torch

from verl.algos.aggregation import LOSS_AGG_MODES, agg_loss

NAN = float("nan")
HORIZON = 3
# Two sequences with losses (4) and (1, 2, 3); the values are 10/4, 10, 10/2, 10/2/3 and (4 + 2)/2.
EXPECTED = {
    "token-mean": 2.5,
    "token-sum": 10.0,
    "seq-mean-token-sum": 5.0,
    "seq-mean-token-sum-norm": 5.0 / 3.0,
    "seq-mean-token-mean": 3.0,
}
STEP = {"batch_num_tokens": 4, "global_batch_size": 2, "loss_scale_factor": HORIZON}


def two_rows(filler: float = NAN) -> tuple[torch.Tensor, torch.Tensor]:
    losses = torch.tensor([[4.0, filler, filler], [1.0, 2.0, 3.0]], dtype=torch.float64)
    return losses, torch.tensor([[1, 0, 0], [1, 1, 1]])


def random_rows(rows: int = 8, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([5, 1, 0, 3, 2, 5, 0, 4])[:rows, None]
    return losses, (torch.arange(width) < lengths).long()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("counts", [STEP, {"loss_scale_factor": HORIZON}], ids=["global counts", "whole batch"])
@pytest.mark.parametrize("filler", [0.0, 1e30, NAN, math.inf])
def test_reference_values(mode, counts, filler):
    losses, mask = two_rows(filler)
    result = agg_loss(losses, mask, mode, **counts)
    assert result.dtype == torch.float64 and result.shape == ()
    assert result.item() == pytest.approx(EXPECTED[mode], rel=1e-15)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_mask_dtype_does_not_matter(mode, mask_dtype):
    losses, mask = two_rows()
    assert agg_loss(losses, mask.to(mask_dtype), mode, **STEP).item() == pytest.approx(EXPECTED[mode], rel=1e-15)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_counts_may_be_tensors(mode):
    losses, mask = two_rows()
    counts = STEP | {"batch_num_tokens": torch.tensor(4), "global_batch_size": torch.tensor(2)}
    result = agg_loss(losses, mask, mode, **counts)
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(EXPECTED[mode], rel=1e-15)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_invariant_to_micro_batches_and_ranks(mode, dp_size, num_micro_batches):
    losses, mask = random_rows()
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask), "loss_scale_factor": 7}

    whole_input = losses.clone().requires_grad_()
    whole = agg_loss(whole_input, mask, mode, **counts)
    whole.backward()

    split_input = losses.clone().requires_grad_()
    pieces = dp_size * num_micro_batches
    parts = [
        agg_loss(part, part_mask, mode, dp_size=dp_size, **counts)
        for part, part_mask in zip(split_input.chunk(pieces), mask.chunk(pieces), strict=True)
    ]
    split = torch.stack(parts).sum() / dp_size  # micro-batches add up, ranks are averaged
    split.backward()
    torch.testing.assert_close(split, whole, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(split_input.grad, whole_input.grad, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_is_the_weight_over_the_count(mode):
    losses, mask = two_rows()
    losses.requires_grad_()
    agg_loss(losses, mask, mode, **STEP).backward()
    weight = {
        "token-mean": [[1 / 4, 0, 0], [1 / 4] * 3],
        "token-sum": [[1, 0, 0], [1] * 3],
        "seq-mean-token-sum": [[1 / 2, 0, 0], [1 / 2] * 3],
        "seq-mean-token-sum-norm": [[1 / 6, 0, 0], [1 / 6] * 3],
        "seq-mean-token-mean": [[1 / 2, 0, 0], [1 / 6] * 3],
    }[mode]
    torch.testing.assert_close(losses.grad, torch.tensor(weight, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"batch_num_tokens": 0, "global_batch_size": 0},
        {"batch_num_tokens": torch.tensor(0), "global_batch_size": torch.tensor(0)},
        {"batch_num_tokens": 5, "global_batch_size": 9},
    ],
)
def test_nothing_to_train_on_gives_zero_with_a_graph(mode, counts):
    losses = torch.full((2, 3), NAN, requires_grad=True)
    result = agg_loss(losses, torch.zeros(2, 3), mode, loss_scale_factor=HORIZON, **counts)
    result.backward()
    assert result.item() == 0.0
    assert torch.equal(losses.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_no_row_at_all(mode):
    losses = torch.zeros(0, 3, requires_grad=True)
    assert agg_loss(losses, torch.zeros(0, 3), mode, loss_scale_factor=HORIZON).item() == 0.0


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 3, "global_batch_size": 4}])
def test_fully_masked_sequence_counts_as_a_sequence(mode, counts):
    losses, mask = torch.ones(4, 1), torch.tensor([[1], [1], [0], [1]])
    assert agg_loss(losses, mask, mode, loss_scale_factor=1, **counts).item() == 0.75


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_equal_losses_on_four_ranks_give_one(mode):
    parts = [
        agg_loss(torch.ones(8, 1), torch.ones(8, 1), mode, dp_size=4, batch_num_tokens=32, global_batch_size=32)
        for _ in range(4)
    ]
    assert torch.stack(parts).mean().item() == 1.0


def test_norm_mode_does_not_grow_with_the_batch_and_ignores_the_padded_width():
    row, mask = torch.ones(1, 4), torch.ones(1, 4)
    one = agg_loss(row, mask, "seq-mean-token-sum-norm", max_response_length=8)
    two = agg_loss(row.repeat(2, 1), mask.repeat(2, 1), "seq-mean-token-sum-norm", max_response_length=8)
    pad = torch.zeros(1, 9)
    wide = agg_loss(
        torch.cat([row, pad], 1), torch.cat([mask, pad], 1), "seq-mean-token-sum-norm", max_response_length=8
    )
    assert one.item() == two.item() == wide.item() == 0.5
    both = agg_loss(row, mask, "seq-mean-token-sum-norm", max_response_length=8, loss_scale_factor=2.0)
    assert both.item() == 2.0


def test_rows_that_hold_part_of_a_sequence_use_the_full_count():
    losses, mask = random_rows()
    whole = agg_loss(losses, mask, "seq-mean-token-mean")
    tokens = mask.sum(-1)
    counts = {"global_batch_size": len(mask), "batch_num_tokens": int(tokens.sum()), "seq_num_tokens": tokens}
    halves = [agg_loss(losses[:, s], mask[:, s], "seq-mean-token-mean", **counts) for s in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("mode", [mode for mode in LOSS_AGG_MODES if mode != "token-sum"])
@pytest.mark.parametrize("dp_size, given", [(2, {}), (1, "other")])
def test_a_piece_without_the_count_of_the_step_is_refused(mode, dp_size, given):
    needed, other = "batch_num_tokens", "global_batch_size"
    if mode != "token-mean":
        needed, other = other, needed
    losses, mask = two_rows()
    with pytest.raises(ValueError, match=needed):
        agg_loss(losses, mask, mode, dp_size, loss_scale_factor=3, **({other: 4} if given == "other" else {}))


def test_unknown_mode_and_missing_horizon_are_refused():
    losses, mask = two_rows()
    with pytest.raises(ValueError, match=r"loss_agg_mode='seq-mean-token-avg'.*'token-sum'.*'seq-mean-token-mean'\?"):
        agg_loss(losses, mask, "seq-mean-token-avg")
    with pytest.raises(ValueError, match="loss_scale_factor.*max_response_length"):
        agg_loss(losses, mask, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="max_response_length=0"):
        agg_loss(losses, mask, "seq-mean-token-sum-norm", max_response_length=0)
