# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction without a model: targets, counts, weights, the legacy form, patching in and out."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from verl.models.mcore import mtp_patch
from verl.models.mcore.bridge import _check_overrides, _mtp_settings
from verl.models.mcore.mtp_patch import count_targets, legacy_mtp_loss, loss_metrics, prepare, trained_targets
from verl.models.mcore.packing import make_layout, shift_left_within_sequences
from verl.utils.hf_config import MTP_COUNTS
from verl.utils.metric import merge_metrics
from verl.workers.config import MtpConfig
from verl.workers.engine.megatron import loss_scale
from verl.workers.engine.megatron.loss_scale import LossScale, count_step


def jagged(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_shifts_stay_inside_their_sequence() -> None:
    lengths = torch.tensor([3, 0, 1, 4])
    tokens = torch.arange(1, 9)
    assert shift_left_within_sequences(tokens, lengths, 0).tolist() == tokens.tolist()
    assert shift_left_within_sequences(tokens, lengths, 1).tolist() == [2, 3, 0, 0, 6, 7, 8, 0]
    assert shift_left_within_sequences(tokens, lengths, 2).tolist() == [3, 0, 0, 0, 7, 8, 0, 0]
    assert shift_left_within_sequences(tokens, lengths, 9).tolist() == [0] * 8
    assert shift_left_within_sequences(tokens[:0], lengths[:0], 1).tolist() == []


def test_targets_are_exactly_the_trained_tokens_that_lie_far_enough_ahead() -> None:
    # p p r r r: depth 1 predicts tokens 2, 3, 4 from positions 0, 1, 2; depth 2 predicts 3 and 4 from 0 and 1.
    mask, lengths = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([5])
    assert trained_targets(mask, lengths, 1).tolist() == [True, True, True, False, False]
    assert trained_targets(mask, lengths, 2).tolist() == [True, True, False, False, False]
    assert count_targets(mask, lengths, 3).tolist() == [3, 2, 1]
    # A prompt that is trained by nobody, and a hole inside a response.
    assert count_targets(torch.tensor([0, 0, 0, 0, 1, 0, 1, 1]), torch.tensor([8]), 2).tolist() == [3, 3]
    assert count_targets(torch.zeros(5), lengths, 2).tolist() == [0, 0]
    assert count_targets(torch.tensor([0, 1, 0, 1]), torch.tensor([2, 2]), 1).tolist() == [0]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_share_holds_its_part_of_the_whole_shift(cp_size: int, dense: bool) -> None:
    lengths, depths = torch.tensor([7, 1, 12, 2]), 2
    tokens = torch.arange(1, 23)
    mask = (tokens % 3 > 0).long()
    parts = []
    for rank in range(cp_size):
        layout = make_layout(lengths, cp_size=cp_size, cp_rank=rank, dense=dense)
        input_ids = layout.pack(tokens)
        parts.append((layout, prepare(input_ids, tokens=tokens, loss_mask=mask, layout=layout, weights=(1.0, 1.0))))
        assert [d.input_ids for d in mtp_patch._depths_of(input_ids)] == [d.input_ids for d in parts[-1][1]]
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    for k in range(1, depths + 1):
        expected = {
            "input_ids": shift_left_within_sequences(tokens, lengths, k),
            "position_ids": shift_left_within_sequences(positions, lengths, k),
            "targets": shift_left_within_sequences(tokens, lengths, k + 1),
            "valid": trained_targets(mask, lengths, k),
            "padding_mask": shift_left_within_sequences(torch.ones_like(tokens), lengths, k) == 0,
        }
        for name, whole in expected.items():
            local = [getattr(made[k - 1], name) for _, made in parts]
            assert all(part.shape == parts[0][0].padding_mask.shape for part in local)
            joined = torch.cat([part.flatten() for part in local])
            assert parts[0][0].unpack(joined).tolist() == whole.tolist(), name
        # Every slot of padding is padding at every depth, and trains nothing.
        unpadded = sum(int((~made[k - 1].padding_mask).sum()) for _, made in parts)
        assert unpadded == int((lengths - k).clamp(min=0).sum())
        assert sum(int(made[k - 1].valid.sum()) for _, made in parts) == count_targets(mask, lengths, 2)[k - 1]


def test_a_share_without_a_target_contributes_nothing() -> None:
    # One trained token, at position 2 of 8: the second of two context-parallel ranks holds positions 2 to 5.
    mask, tokens, lengths = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0]), torch.arange(8), torch.tensor([8])
    counts = []
    for rank in range(2):
        layout = make_layout(lengths, cp_size=2, cp_rank=rank)
        (depth,) = prepare(layout.pack(tokens), tokens=tokens, loss_mask=mask, layout=layout, weights=(1.0,))
        counts.append(int(depth.valid.sum()))
        depth.loss_sum = torch.tensor(2.5) * counts[-1]
        assert loss_metrics([depth], (1,))["mtp/loss"].value == 2.5 * counts[-1]
    assert counts == [1, 0]
    nowhere = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])  # the first token is nobody's target
    assert count_targets(nowhere, lengths, 2).tolist() == [0, 0]
    depth.loss_sum = torch.tensor(0.0)
    assert loss_metrics([depth], (0,))["mtp/loss"].value == 0.0


# ------------------------------------------------------------------ counts and factors
def test_depths_are_counted_in_the_one_collective_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        calls.append(tensor.clone())
        tensor *= 2

    class Pair:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(loss_scale.dist, "all_reduce", all_reduce)
    data = TensorDict(
        {"input_ids": jagged([[5, 6, 7, 8, 9], [5, 6]]), "loss_mask": jagged([[0, 0, 1, 1, 1], [0, 1]])}, batch_size=[2]
    )
    counts = count_step(data, Pair(), mtp_depths=2)
    assert len(calls) == 1 and calls[0].dtype == torch.int64 and calls[0].tolist() == [4, 7, 2, 0, 3, 2]
    assert counts.mtp_targets == (6, 4) and counts.routed_tokens == 14
    assert count_step(data, None).mtp_targets == ()


@pytest.mark.parametrize("per_token", [False, True])
def test_what_megatron_leaves_of_a_weight_is_scale_by_depths_by_targets(per_token: bool) -> None:
    scale = LossScale(
        per_token, num_micro_batches=3, dp_size=2, routed_tokens=77, cp_size=4, mtp_targets=(11, 0), mtp_factor=0.3
    )
    # What the schedule and the reduction of gradients multiply by afterwards.
    after = 1 / scale.divisor if per_token else 1 / (3 * 2 * 4)
    assert scale.mtp_weights[0] * scale.mtp * after == pytest.approx(0.3 / 2 / 11, rel=1e-15)
    assert scale.mtp_weights[1] == 0.0


def test_the_logged_loss_is_a_mean_over_tokens_not_of_means() -> None:
    # Micro-batches of 2 and 6 targets with means 1 and 3: 2.5, where the mean of means is 2.
    layout = make_layout(torch.tensor([4]))
    logged = []
    for count, mean in ((2, 1.0), (6, 3.0)):
        tokens = torch.arange(4)
        (depth,) = prepare(layout.pack(tokens), tokens=tokens, loss_mask=tokens, layout=layout, weights=(1.0,))
        depth.loss_sum = torch.tensor(count * mean)
        logged.append(loss_metrics([depth], (8,)))
    merged = merge_metrics(logged)
    assert merged["mtp/loss"].value == 2.5 and merged["mtp/loss_1"].value == 2.5


# ------------------------------------------------------------------ the legacy form
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_legacy_depths_weigh_as_much_as_the_main_loss(depth: int) -> None:
    mask = torch.ones(8)
    rolled = torch.cat([mask[depth:], torch.zeros(depth)])
    attached, logged = legacy_mtp_loss(torch.ones(8), rolled, mask.sum(), scale=1.0, per_token=True)
    assert attached.sum() / 8 == 1.0 and logged == 1.0  # Megatron divides by the 8 tokens of the main loss
    assert rolled.sum() / 8 == {1: 0.875, 2: 0.75, 3: 0.625}[depth]  # the weight without the factor
    attached, logged = legacy_mtp_loss(torch.ones(8), rolled, mask.sum(), scale=0.5, per_token=False)
    assert attached.sum() == 0.5 and logged == 1.0


@pytest.mark.parametrize("per_token", [False, True])
def test_legacy_form_is_finite_where_a_share_has_no_target(per_token: bool) -> None:
    losses = torch.tensor([1.0, math.nan, 2.0, 3.0], requires_grad=True)
    attached, logged = legacy_mtp_loss(losses, torch.zeros(4), torch.tensor(0.0), scale=0.1, per_token=per_token)
    attached.sum().backward()
    assert attached.tolist() == [0.0] * 4 and losses.grad.tolist() == [0.0] * 4 and logged == 0.0
    unclamped = torch.zeros(4) * (torch.tensor(1.0) / torch.zeros(4).sum())
    assert unclamped.isnan().all()


def test_legacy_form_depends_on_the_split_and_the_step_count_does_not() -> None:
    # Four ranks with 1, 1, 3, 3 targets and losses that sum up to 32: 4 over the 8 targets, 14/3 as mean of means.
    sums, counts = (6.0, 6.0, 10.0, 10.0), (1, 1, 3, 3)
    means = []
    for total, count in zip(sums, counts, strict=True):
        losses, mask = torch.full((4,), total / count, dtype=torch.float64), torch.arange(4) < count
        attached, _ = legacy_mtp_loss(losses, mask.double(), mask.double().sum(), scale=1.0, per_token=False)
        means.append(float(attached.sum()))
    assert sum(means) / 4 == pytest.approx(14 / 3)
    scale = LossScale(False, 1, dp_size=4, routed_tokens=32, mtp_targets=(8,), mtp_factor=1.0)
    assert sum(sums) * scale.mtp_weights[0] * scale.mtp / 4 == 4.0


# ------------------------------------------------------------------ switches
def test_patches_go_in_and_come_out() -> None:
    places = mtp_patch._places()

    def current() -> list[Any]:
        return [getattr(owner, name) for owner, name, _ in places.values()]

    mtp_patch.remove()
    stock = current()
    mtp_patch.apply()
    mtp_patch.apply()
    assert current() == [ours for _, _, ours in places.values()] and not set(current()) & set(stock)
    mtp_patch.remove()
    mtp_patch.remove()
    assert current() == stock
    mtp_patch.apply()
    mtp_patch.remove()
    assert current() == stock


def test_layers_that_are_not_built_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="enable=True"):
        MtpConfig(enable_train=True)


@pytest.mark.parametrize("mtp", [None, MtpConfig()])
def test_off_clears_every_name_of_the_layer_count(mtp: MtpConfig | None) -> None:
    settings = _mtp_settings(SimpleNamespace(mtp_num_layers=2), mtp)
    assert settings == dict.fromkeys(MTP_COUNTS)


def test_enabling_layers_that_the_model_lacks_is_an_error() -> None:
    enabled = MtpConfig(enable=True, mtp_loss_scaling_factor=0.3)
    assert _mtp_settings(SimpleNamespace(mtp_num_layers=2), enabled) == {"mtp_loss_scaling_factor": 0.3}
    for provider in (SimpleNamespace(mtp_num_layers=None), SimpleNamespace(mtp_num_layers=0), SimpleNamespace()):
        with pytest.raises(ValueError, match="model.mtp.enable=True: the model has no multi-token prediction layer"):
            _mtp_settings(provider, enabled)


@pytest.mark.parametrize("name", ["mtp_num_layers", "mtp_loss_scaling_factor", "mtp_detach_heads"])
def test_the_layers_are_not_set_behind_the_configuration(name: str) -> None:
    with pytest.raises(ValueError, match=f"override_transformer_config.{name}.*model.mtp.enable"):
        _check_overrides(SimpleNamespace(**{name: None}), {name: 1})
