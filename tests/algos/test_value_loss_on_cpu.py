# SPDX-License-Identifier: Apache-2.0
import math
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from verl.algos.value_loss import compute_value_loss
from verl.utils import tensordict_utils as tu
from verl.utils.jagged import make_jagged, offsets_from_lengths
from verl.utils.metric import merge_metrics, reduce_metrics
from verl.workers.config import McoreCriticConfig
from verl.workers.config.names import LOSS_AGG_MODES
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding

LENGTHS = ((2, 3), (1, 1), (3, 4), (2, 2), (1, 4), (4, 1))
CLIP = 0.3


def _batch() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    rows, p_width, r_width = len(LENGTHS), 4, 5
    mask = torch.zeros(rows, p_width + r_width).long()
    response_mask = torch.zeros(rows, r_width).long()
    for i, (p, r) in enumerate(LENGTHS):
        mask[i, p_width - p : p_width + r] = 1
        response_mask[i, :r] = 1
    response_mask[2, 1] = 0
    response_mask[3] = 0
    columns = {
        name: torch.randn(rows, r_width, generator=generator, dtype=torch.float64) for name in ("values", "returns")
    }
    return TensorDict(
        {
            "prompts": mask[:, :p_width].clone(),
            "responses": mask[:, p_width:].clone(),
            "input_ids": mask.clone(),
            "attention_mask": mask,
            "position_ids": mask.clone(),
            "response_mask": response_mask,
            **columns,
        },
        batch_size=[rows],
    )


def _loss(batch: TensorDict, predictions: list[torch.Tensor], mode: str = "token-mean", **counts):
    config = McoreCriticConfig(loss_agg_mode=mode, cliprange_value=CLIP, max_response_length=7)
    data = left_right_2_no_padding(batch)
    tu.assign_non_tensor(data, **counts)
    jagged = make_jagged(torch.cat(predictions), offsets_from_lengths(batch["attention_mask"].sum(-1)))
    return partial(value_loss, config=config)(model_output={"values": jagged}, data=data, dp_group=None)


def _predictions() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(p + r, generator=generator, dtype=torch.float64, requires_grad=True) for p, r in LENGTHS]


def test_each_response_token_is_valued_at_the_position_before_it():
    batch, predictions = _batch(), _predictions()
    total, clipped, num_tokens, seen = 0.0, 0, 0, 0.0
    for i, (p, r) in enumerate(LENGTHS):
        for t in range(r):
            if not batch["response_mask"][i, t]:
                continue
            value, old, target = (
                float(x) for x in (predictions[i].data[p + t - 1], batch["values"][i, t], batch["returns"][i, t])
            )
            plain, held = (value - target) ** 2, (min(max(value, old - CLIP), old + CLIP) - target) ** 2
            total, seen = total + max(plain, held) / 2, seen + value
            clipped, num_tokens = clipped + (held > plain), num_tokens + 1
    loss, metrics = _loss(batch, predictions)
    numbers = reduce_metrics(metrics)
    assert loss.item() == pytest.approx(total / num_tokens, rel=1e-14)
    assert numbers["critic/vf_loss"] == loss.item()
    assert numbers["critic/vf_clipfrac"] == pytest.approx(clipped / num_tokens) and 0 < clipped < num_tokens
    assert numbers["critic/vpred_mean"] == pytest.approx(seen / num_tokens)
    loss.backward()
    for i, (p, r) in enumerate(LENGTHS):
        assert predictions[i].grad[: p - 1].eq(0).all() and predictions[i].grad[p + r - 1] == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_split_does_not_matter(mode: str):
    batch = _batch()
    counts = {"batch_num_tokens": int(batch["response_mask"].sum()), "global_batch_size": len(LENGTHS)}
    results = []
    for parts, dp_size in (([range(6)], 1), ([[0], [1, 2, 3], [4, 5]], 1), ([[5, 0], [3], [1, 2], [4]], 2)):
        predictions, total, metrics = _predictions(), 0.0, []
        for rows in parts:
            part = tu.index_select_tensor_dict(batch, list(rows))
            loss, reported = _loss(part, [predictions[i] for i in rows], mode, dp_size=dp_size, **counts)
            total = total + loss / dp_size
            metrics.append(reported)
        total.backward()
        results.append(
            (total.detach(), torch.cat([x.grad for x in predictions]), reduce_metrics(merge_metrics(metrics)))
        )
    for loss, gradient, numbers in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-14, atol=0)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-14, atol=1e-17)
        assert numbers == pytest.approx(results[0][2], rel=1e-14)


@pytest.mark.parametrize("name", ["values", "returns", "predictions"])
def test_what_stands_at_masked_positions_changes_nothing(name: str):
    batch, predictions = _batch(), _predictions()
    expected, _ = _loss(batch, predictions)
    expected.backward()
    spoiled, again = _batch(), _predictions()
    if name == "predictions":
        for i, (p, r) in enumerate(LENGTHS):
            used = torch.zeros(p + r, dtype=torch.bool)
            used[p - 1 : p + r - 1] = batch["response_mask"][i, :r].bool()
            again[i].data[~used] = math.nan
    else:
        spoiled[name][spoiled["response_mask"] == 0] = math.nan
    loss, metrics = _loss(spoiled, again)
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(again, predictions, strict=True))
    assert all(math.isfinite(x) for x in reduce_metrics(metrics).values())


def test_no_trained_token_is_a_loss_of_zero_with_a_graph():
    batch, predictions = _batch(), _predictions()
    batch["response_mask"].zero_()
    loss, _ = _loss(batch, predictions, batch_num_tokens=0, global_batch_size=6)
    loss.backward()
    assert loss == 0 and all(p.grad.eq(0).all() for p in predictions)


def test_a_prediction_beyond_the_clip_gets_no_gradient_towards_the_old_value_only():
    old, mask = torch.zeros(1, 4), torch.ones(1, 4)
    returns = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    predicted = torch.tensor([[0.2, 0.8, 0.8, -0.8]], requires_grad=True)
    loss, metrics = compute_value_loss(predicted, returns, old, mask, cliprange_value=0.5, loss_agg_mode="token-sum")
    loss.backward()
    # Inside the clip: the plain error. Beyond it and closer to the return: the held value's error is larger and has no
    # gradient. Beyond it and away from the return: the plain error, which pulls it back.
    assert predicted.grad[0].tolist() == pytest.approx([0.2 - 1.0, 0.0, 0.8 + 1.0, -0.8 - 1.0])
    assert metrics["critic/vf_clipfrac"].value == 0.25
