# SPDX-License-Identifier: Apache-2.0
"""Importance weights, rejection and gap metrics against loops over tokens in plain Python."""

import math

import pytest
import torch

from verl.algos.rollout_correction import correct_rollout, importance_weights, off_policy_metrics, rejection_mask
from verl.workers.config import RolloutCorrectionConfig
from verl.workers.config.rollout_correction import REJECTIONS

ROWS, WIDTH = 7, 5
LENGTHS = [5, 1, 3, 0, 4, 2, 5]
NAN = float("nan")


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(spread=0.5):
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    mask[0, 1] = 0
    rollout = -random(ROWS, WIDTH, seed=1).abs()
    old = rollout + spread * random(ROWS, WIDTH, seed=2)
    hidden = mask == 0
    return old.masked_fill(hidden, NAN), rollout.masked_fill(hidden, NAN), mask


def log_ratios(old, rollout, mask):
    """Of each row, {position: log-ratio}."""
    return [{t: (old[i, t] - rollout[i, t]).item() for t in range(WIDTH) if mask[i, t]} for i in range(ROWS)]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights(level, normalize):
    old, rollout, mask = batch()
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1.1, rollout_is_batch_normalize=normalize)
    weights, metrics = importance_weights(old, rollout, mask, config)
    expected, samples, num_cut = torch.zeros(ROWS, WIDTH, dtype=torch.float64), [], 0
    for i, row in enumerate(log_ratios(old, rollout, mask)):
        for t, log_ratio in row.items():
            raw = math.exp(log_ratio if level == "token" else sum(row.values()))
            expected[i, t] = min(raw, 1.1)
            if level == "token" or t == min(row):
                samples.append(min(raw, 1.1))
                num_cut += raw > 1.1
    if normalize:
        expected = expected / mean(samples)
    torch.testing.assert_close(weights, expected, rtol=1e-13, atol=0)
    assert 0 < num_cut < len(samples)
    assert metrics["rollout_is_mean"].item() == pytest.approx(mean(samples), rel=1e-13)
    assert metrics["rollout_is_max"].item() == pytest.approx(max(samples))
    assert metrics["rollout_is_min"].item() == pytest.approx(min(samples))
    spread = math.sqrt(mean([(w - mean(samples)) ** 2 for w in samples]))
    assert metrics["rollout_is_std"].item() == pytest.approx(spread, rel=1e-12)
    effective = sum(samples) ** 2 / sum(w * w for w in samples) / len(samples)
    assert metrics["rollout_is_eff_sample_size"].item() == pytest.approx(effective, rel=1e-12)
    assert metrics["rollout_is_truncated_fraction"].item() == pytest.approx(num_cut / len(samples))


STATISTIC = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
OVER_SEQUENCE = {"seq_sum": sum, "seq_mean": mean, "seq_max": max}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(name):
    old, rollout, mask = batch()
    level, _, kind = name.rpartition("_")
    lower, upper = (0.8, 1.5) if kind == "k1" else (0.0, {"seq_sum": 0.4}.get(level, 0.12))
    bound = "0.8_1.5" if kind == "k1" else upper
    kept, metrics = rejection_mask(
        old, rollout, mask, RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=bound)
    )
    expected = torch.zeros_like(mask)
    for i, row in enumerate(log_ratios(old, rollout, mask)):
        values = {t: STATISTIC[kind](x) for t, x in row.items()}
        if level != "token" and values:
            values = dict.fromkeys(values, OVER_SEQUENCE[level](list(values.values())))
        for t, value in values.items():
            expected[i, t] = math.log(lower) <= value <= math.log(upper) if kind == "k1" else value <= upper
    assert torch.equal(kept, expected) and kept.dtype == mask.dtype
    assert 0 < kept.sum() < mask.sum()
    assert metrics["rollout_rs_masked_fraction"].item() == pytest.approx(1 - (kept.sum() / mask.sum()).item())
    lost = ((mask.sum(-1) > 0) & (kept.sum(-1) == 0)).sum() / (mask.sum(-1) > 0).sum()
    assert metrics["rollout_rs_seq_masked_fraction"].item() == pytest.approx(lost.item())


@pytest.mark.parametrize(
    "old_name, name", [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_older_names_and_bounds(old_name, name):
    def rules(**settings):
        (rule,) = RolloutCorrectionConfig(**settings).rejections()
        return rule.name, rule.lower, rule.upper

    assert rules(rollout_rs=old_name, rollout_rs_threshold=2.0) == (name, 0.5, 2.0)
    assert rules(rollout_rs=old_name, rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.9) == (name, 0.9, 2.0)
    assert rules(rollout_rs=name, rollout_rs_threshold="0.7_3") == (name, 0.7, 3.0)


def test_several_rules_reject_together():
    old, rollout, mask = batch()
    both = RolloutCorrectionConfig(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.8_1.5,0.3")
    one = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.8_1.5")
    two = RolloutCorrectionConfig(rollout_rs="seq_max_k2", rollout_rs_threshold=0.3)
    masks = [rejection_mask(old, rollout, mask, config)[0] for config in (both, one, two)]
    assert torch.equal(masks[0], masks[1] * masks[2]) and not torch.equal(masks[1], masks[2])


def test_veto_takes_the_whole_sequence_for_one_token():
    old, rollout, mask = batch(spread=0.0)
    old[4, 2] = rollout[4, 2] - 10.0
    kept, _ = rejection_mask(old, rollout, mask, RolloutCorrectionConfig(rollout_token_veto_threshold=1e-4))
    expected = mask.clone()
    expected[4] = 0
    assert torch.equal(kept, expected)


def test_a_rows_verdict_does_not_depend_on_the_batch():
    old, rollout, mask = batch()
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)
    whole = [f(old, rollout, mask, config)[0] for f in (importance_weights, rejection_mask)]
    for i in range(ROWS):
        row = slice(i, i + 1)
        for f, expected in zip((importance_weights, rejection_mask), whole, strict=True):
            assert torch.equal(f(old[row], rollout[row], mask[row], config)[0], expected[row])


def test_off_policy_metrics():
    old, rollout, mask = batch()
    metrics = {key: value.item() for key, value in off_policy_metrics(old, rollout, mask).items()}
    rows = [row for row in log_ratios(old, rollout, mask) if row]
    flat = [x for row in rows for x in row.values()]
    assert metrics["kl"] == pytest.approx(-mean(flat), rel=1e-12)
    assert metrics["k3_kl"] == pytest.approx(mean([math.exp(x) - 1 - x for x in flat]), rel=1e-12)
    assert metrics["chi2_token"] == pytest.approx(mean([math.exp(2 * x) for x in flat]) - 1, rel=1e-12)
    assert metrics["chi2_seq"] == pytest.approx(mean([math.exp(2 * sum(r.values())) for r in rows]) - 1, rel=1e-12)
    gaps = [-mean(list(row.values())) for row in rows]
    assert metrics["log_ppl_diff"] == pytest.approx(mean(gaps), rel=1e-12)
    assert metrics["ppl_ratio"] == pytest.approx(mean([math.exp(gap) for gap in gaps]), rel=1e-12)
    for key, column in (("training_ppl", old), ("rollout_ppl", rollout)):
        spots = [[column[i, t].item() for t in range(WIDTH) if mask[i, t]] for i in range(ROWS)]
        assert metrics[key] == pytest.approx(mean([math.exp(-mean(row)) for row in spots if row]), rel=1e-12)


def test_without_a_gap_everything_stays():
    old, _, mask = batch()
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="token_k1,seq_max_k3", rollout_rs_threshold="2.0,0.1", rollout_is_threshold=2.0
    )
    weights, kept, metrics = correct_rollout(old, old, mask, config)
    assert torch.equal(weights, mask.double()) and torch.equal(kept, mask)
    assert metrics["rollout_corr/kl"] == metrics["rollout_corr/chi2_seq"] == 0.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == metrics["rollout_corr/ppl_ratio"] == 1.0


def test_nothing_configured_gives_metrics_only():
    old, rollout, mask = batch()
    weights, kept, metrics = correct_rollout(old, rollout, mask, RolloutCorrectionConfig())
    assert weights is None and kept is mask and "rollout_corr/kl" in metrics


def test_an_empty_mask_gives_nan_metrics_and_no_error():
    old, rollout, mask = batch()
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0
    )
    weights, kept, metrics = correct_rollout(old, rollout, torch.zeros_like(mask), config)
    assert not weights.any() and not kept.any()
    assert all(math.isnan(value) for value in metrics.values())


def test_a_huge_gap_stays_finite():
    old, rollout, mask = batch()
    old = old - 3000.0
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs="token_k3", rollout_rs_threshold=1.0
    )
    weights, kept, metrics = correct_rollout(old, rollout, mask, config)
    assert torch.isfinite(weights).all() and not kept.any()
    assert math.isfinite(metrics["rollout_corr/chi2_token"])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rollout_is": "tokens"}, "rollout_is='tokens'.*Did you mean 'token'"),
        ({"rollout_is_threshold": 0}, "rollout_is_threshold=0 must be positive"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold must be set"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "rollout_rs='token_k4'"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "a"}, "'a' must be a number"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, "0 < lower < upper"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"}, "one positive number for token_k2"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"}, "holds 2 bounds for the 3 rules"),
        ({"rollout_token_veto_threshold": 2}, "veto_threshold=2 must lie between 0 and 1"),
        ({"loss_type": "ppo"}, "loss_type='ppo'.*'ppo_clip'"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        RolloutCorrectionConfig(**settings)
