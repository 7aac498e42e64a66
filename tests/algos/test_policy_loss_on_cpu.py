# SPDX-License-Identifier: Apache-2.0
"""The clipped policy loss against its formula, written token by token, and its registry."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algos.aggregation import LOSS_AGG_MODES
from verl.algos.policy_loss import (
    POLICY_LOSS_REGISTRY,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)

NAN = float("nan")


def actor(**changes):
    settings = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    return SimpleNamespace(**(settings | changes))


def batch(rows=6, width=7, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = (torch.randn(rows, width, dtype=torch.float64, generator=generator) for _ in range(3))
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return {
        "old_log_prob": old - 3.0,
        "log_prob": old - 3.0 + spread * new,
        "advantages": advantages,
        "response_mask": (torch.arange(width) < lengths).long(),
    }


def slow_token(new, old, advantage, low, high, dual):
    """Loss of one token, its derivative by the log-probability, clipped?, held by the dual clip?"""
    ratio = math.exp(new - old)
    free, cut = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    loss, slope, clipped, bounded = (cut, 0.0, True, False) if cut > free else (free, free, False, False)
    if dual is not None and advantage < 0 and loss > -advantage * dual:
        loss, slope, bounded = -advantage * dual, 0.0, True
    return loss, slope, clipped, bounded


def slow_reference(data, low, high, dual, weights=None):
    """Token-mean loss, gradient, clip fractions and KL by a loop over the tokens."""
    tokens = [(int(i), int(t)) for i, t in data["response_mask"].nonzero()]
    gradient = torch.zeros_like(data["log_prob"])
    loss = clipped = bounded = kl = 0.0
    for i, t in tokens:
        new, old = data["log_prob"][i, t].item(), data["old_log_prob"][i, t].item()
        value, slope, is_clipped, is_bounded = slow_token(new, old, data["advantages"][i, t].item(), low, high, dual)
        weight = 1.0 if weights is None else weights[i, t].item()
        loss += value * weight / len(tokens)
        gradient[i, t] = slope * weight / len(tokens)
        clipped, bounded, kl = clipped + is_clipped, bounded + is_bounded, kl + old - new
    return loss, gradient, clipped / len(tokens), bounded / len(tokens), kl / len(tokens)


@pytest.mark.parametrize(
    "config, low, high, dual",
    [
        (actor(), 0.2, 0.2, 3.0),
        (actor(clip_ratio_low=0.1, clip_ratio_high=0.5), 0.1, 0.5, 3.0),
        (actor(clip_ratio_low=0.0), 0.0, 0.2, 3.0),
        (actor(clip_ratio_c=1.5), 0.2, 0.2, 1.5),
        (actor(clip_ratio_c=None), 0.2, 0.2, None),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_vanilla_equals_the_formula(config, low, high, dual, weighted):
    data = batch()
    weights = torch.rand(data["log_prob"].shape, dtype=torch.float64) + 0.5 if weighted else None
    loss, gradient, clipped, bounded, kl = slow_reference(data, low, high, dual, weights)
    assert clipped > 0 and (dual is None or bounded > 0), "the data must reach every branch"

    data["log_prob"].requires_grad_()
    result, metrics = compute_policy_loss_vanilla(**data, config=config, rollout_is_weights=weights)
    result.backward()
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(loss, rel=1e-14)
    torch.testing.assert_close(data["log_prob"].grad, gradient, rtol=1e-13, atol=1e-16)
    assert metrics["actor/pg_clipfrac"].value == pytest.approx(clipped, rel=1e-15)
    assert metrics["actor/pg_clipfrac_lower"].value == pytest.approx(bounded, rel=1e-15, abs=0)
    assert metrics["actor/ppo_kl"].value == pytest.approx(kl, rel=1e-13)
    assert not any(isinstance(m.total, torch.Tensor) and m.total.requires_grad for m in metrics.values())


def test_dual_clip_bounds_the_loss_of_a_bad_action():
    ratio_ten = {"old_log_prob": torch.zeros(1, 1), "log_prob": torch.full((1, 1), math.log(10.0))}
    rest = {"advantages": torch.tensor([[-2.0]]), "response_mask": torch.ones(1, 1)}
    bounded, _ = compute_policy_loss_vanilla(**ratio_ten, **rest, config=actor())
    free, _ = compute_policy_loss_vanilla(**ratio_ten, **rest, config=actor(clip_ratio_c=None))
    assert bounded.item() == pytest.approx(6.0)
    assert free.item() == pytest.approx(20.0)


def test_on_policy_the_gradient_is_minus_the_advantage_and_nothing_is_clipped():
    data = batch(spread=0.0)
    data["log_prob"] = data["log_prob"].clone().requires_grad_()
    loss, metrics = compute_policy_loss_vanilla(**data, config=actor(), loss_agg_mode="token-sum")
    loss.backward()
    expected = torch.where(data["response_mask"] != 0, -data["advantages"], 0.0)
    torch.testing.assert_close(data["log_prob"].grad, expected, rtol=1e-15, atol=0)
    assert [metrics[key].value for key in sorted(metrics)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e4, -1e4])
def test_what_stands_at_masked_positions_changes_nothing(mode, garbage):
    def run(filler):
        data = batch()
        weights = torch.full_like(data["log_prob"], 0.7)
        hidden = data["response_mask"] == 0
        assert hidden.any()
        for tensor in (data["old_log_prob"], data["log_prob"], data["advantages"], weights):
            tensor[hidden] = filler
        data["log_prob"].requires_grad_()
        with torch.autograd.detect_anomaly():  # no NaN on the way either, where a later change could let it out
            loss, metrics = compute_policy_loss_vanilla(
                **data, config=actor(), loss_agg_mode=mode, rollout_is_weights=weights, loss_scale_factor=7
            )
            loss.backward()
        return loss.item(), data["log_prob"].grad, {key: metric.value for key, metric in metrics.items()}

    loss, gradient, metrics = run(0.0)
    dirty_loss, dirty_gradient, dirty_metrics = run(garbage)
    assert gradient.abs().sum() > 0
    assert dirty_loss == loss and dirty_metrics == metrics
    assert torch.equal(dirty_gradient, gradient)


def test_a_huge_log_ratio_stays_finite():
    data = batch(rows=1, width=2) | {"response_mask": torch.ones(1, 2)}
    data["log_prob"] = data["old_log_prob"] + torch.tensor([[2000.0, -2000.0]])
    data["log_prob"].requires_grad_()
    data["advantages"] = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    loss, _ = compute_policy_loss_vanilla(**data, config=actor(clip_ratio_c=None))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * math.exp(20.0))
    assert torch.isfinite(data["log_prob"].grad).all()


def test_everything_masked_gives_zero_loss_and_nan_fractions():
    data = batch()
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    data["log_prob"].requires_grad_()
    loss, metrics = compute_policy_loss_vanilla(**data, config=actor())
    loss.backward()
    assert loss.item() == 0.0 and not data["log_prob"].grad.any()
    assert all(math.isnan(metric.value) for metric in metrics.values())


def test_dual_clip_constant_must_exceed_one():
    with pytest.raises(ValueError, match="clip_ratio_c=0.9"):
        compute_policy_loss_vanilla(**batch(), config=actor(clip_ratio_c=0.9))


def test_registry(monkeypatch):
    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_functions", dict(POLICY_LOSS_REGISTRY._functions))

    @register_policy_loss("mine")
    def mine(**kwargs):
        return kwargs

    assert get_policy_loss_fn("mine") is mine
    register_policy_loss("mine")(mine)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_policy_loss("mine")(lambda **kwargs: None)
    with pytest.raises(ValueError, match=r"actor.policy_loss.loss_mode='vanila'.*known: .*mine.*Did you mean vanilla"):
        get_policy_loss_fn("vanila")
