# SPDX-License-Identifier: Apache-2.0
"""The reference of the exactness checks against numbers worked out by hand."""

import math

import pytest
import torch

from tests.models.exactness.reference import HORIZON, Row, aggregate, balancing_loss, first_adam_step, z_loss


def rows(*masks: list[int]) -> list[Row]:
    return [Row(*[torch.zeros(len(m))] * 2, torch.tensor(m).bool(), *[torch.zeros(len(m))] * 3) for m in masks]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2.5),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", 5.0),
        ("seq-mean-token-sum-norm", 5.0 / HORIZON),
        ("seq-mean-token-mean", 3.0),
    ],
)
def test_aggregation_of_one_and_three_tokens(mode: str, expected: float) -> None:
    losses = [torch.tensor([4.0, math.nan, 0.0]), torch.tensor([1.0, 2.0, 3.0])]
    assert float(aggregate(rows([1, 0, 0], [1, 1, 1]), losses, mode)) == pytest.approx(expected)


def test_a_masked_sequence_counts_and_an_empty_step_is_zero() -> None:
    ones = [torch.ones(1)] * 4
    assert float(aggregate(rows([1], [1], [1], [0]), ones, "seq-mean-token-sum")) == 0.75
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float(aggregate(rows([0], [0]), ones[:2], mode)) == 0


def test_z_loss_of_uniform_logits() -> None:
    uniform = [[torch.zeros(3, 4), torch.zeros(5, 4)]] * 2
    assert float(z_loss(uniform, 0.1)) == pytest.approx(2 * 0.1 * math.log(4) ** 2)


KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense", [True, False])
def test_balancing_kinds_weigh_alike_for_one_sequence_on_one_rank(kind: str, dense: bool) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0], [2.0, 0.0, 1.0, 0.0]])
    p, counts = logits.softmax(-1).mean(0), torch.tensor([2.0, 2.0, 2.0, 0.0])
    by_hand = 0.1 * 4 * (counts / (2 * 3) * p).sum()
    assert float(balancing_loss([[logits]], kind, 0.1, 2, [[[0]]], dense)) == pytest.approx(float(by_hand))


@pytest.mark.parametrize("kind", KINDS)
def test_balancing_losses_are_not_sums_over_tokens(kind: str) -> None:
    torch.manual_seed(0)
    layer = [torch.randn(5, 4), torch.randn(9, 4)]
    together = float(balancing_loss([layer], kind, 1.0, 2, [[[0, 1]]], False))
    apart = float(balancing_loss([layer], kind, 1.0, 2, [[[0]], [[1]]], False))
    assert abs(together / apart - 1) > 1e-3
    on_two_ranks = float(balancing_loss([layer], kind, 1.0, 2, [[[0], [1]]], False))
    # Ranks are like micro-batches for the first two; the global one sees all ranks at once.
    assert on_two_ranks == pytest.approx(together if kind == "global_aux_loss" else apart)


def test_first_adam_step_clips_then_moves_by_the_sign() -> None:
    weights, gradients = {"w": torch.ones(2, 1)}, {"w": torch.tensor([[3.0], [-4.0]])}
    norm, updated = first_adam_step(weights, gradients, lr=0.1, eps=0.0, decay=0.5, clip=1.0)
    assert norm == 5
    assert updated["w"].flatten().tolist() == pytest.approx([0.85, 1.05])
