# SPDX-License-Identifier: Apache-2.0
"""Every policy loss against its formula written token by token, its split into micro-batches and ranks, and masks.

The slow references give the loss of each token (or sequence) as a function of plain numbers; their gradients come from
autograd over scalars, with constants where the paper holds a factor constant.
"""

import dataclasses
import inspect
import math

import pytest
import torch

from verl.algos import policy_loss as losses
from verl.algos.aggregation import LOSS_AGG_MODES
from verl.algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils.metric import merge_metrics
from verl.workers.config import McoreActorConfig, PolicyLossConfig, RolloutCorrectionConfig

NAN = float("nan")
ROWS, WIDTH, HORIZON = 8, 6, 9
LENGTHS = [6, 1, 3, 2, 5, 6, 4, 1]
MASKED_ROW = 5
SPLITS = [(1, 2), (1, 4), (2, 1), (2, 2)]
BYPASS = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=1.4, rollout_rs="token_k1", rollout_rs_threshold="0.3_2.5"
)
NAMES = POLICY_LOSS_REGISTRY.names()
# Which tokens these choose depends on the micro-batch; everything else is as invariant as the others.
MICRO_BATCH_LOCAL = ("clip_cov", "kl_cov")
# Their aggregation is part of the method.
FIXED_MODE = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "one a sequence"}


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def actor(name="vanilla", **policy):
    settings = {"dro_beta": 0.3, "clip_cov_ratio": 0.2, "clip_cov_lb": -0.5, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
    settings |= {"rollout_correction": BYPASS} | policy
    config = PolicyLossConfig(loss_mode=name, **settings)
    return McoreActorConfig(
        clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0, tau_pos=1.2, tau_neg=1.9, policy_loss=config
    )


def batch(**changes):
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    mask[MASKED_ROW] = 0
    mask[0, 2] = 0
    old = -random(ROWS, WIDTH, seed=1).abs() - 0.01
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.6 * random(ROWS, WIDTH, seed=2)).clamp(max=-1e-3),
        "advantages": random(ROWS, WIDTH, seed=3),
        "response_mask": mask,
        "rollout_is_weights": random(ROWS, WIDTH, seed=4).sigmoid() + 0.5,
    } | changes


def counts(data, dp_size=1):
    return {
        "dp_size": dp_size,
        "batch_num_tokens": (data["response_mask"] != 0).sum(),
        "global_batch_size": len(data["log_prob"]),
        "max_response_length": HORIZON,
    }


def run(name, data, mode="token-mean", dp_size=1, num_micro_batches=1, config=None):
    """(loss of the step, gradient, metrics), cut into pieces as an engine does it."""
    data = data | {"log_prob": data["log_prob"].clone().requires_grad_()}
    whole, total, parts = counts(data, dp_size), 0.0, []
    for rows in torch.arange(ROWS).chunk(dp_size * num_micro_batches):
        piece = {key: value[rows] for key, value in data.items() if value is not None}
        loss, metrics = get_policy_loss_fn(name)(**piece, loss_agg_mode=mode, config=config or actor(name), **whole)
        (loss / dp_size).backward()  # gradients are averaged over the ranks
        assert loss.dtype == torch.float64 and loss.shape == ()
        assert not any(isinstance(m.total, torch.Tensor) and m.total.requires_grad for m in metrics.values())
        total = total + loss.detach() / dp_size
        parts.append(metrics)
    assert all(part.keys() == parts[0].keys() for part in parts)
    return total, data["log_prob"].grad, {key: m.value for key, m in merge_metrics(parts).items()}


# ---- slow references: the loss of one token from plain 0-d tensors -------------------------------------------------


def clipped(new, old, a, dual=None):
    ratio = (new - old).exp()
    bounded = min(max(ratio, torch.tensor(0.9, dtype=ratio.dtype)), torch.tensor(1.3, dtype=ratio.dtype))
    loss = max(-a * ratio, -a * bounded)
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


def cispo(new, old, a):
    return -min(max(math.exp(new.item() - old), 0.9), 1.3) * a * new


def sapo(new, old, a):
    tau = 1.2 if a > 0 else 1.9
    return -a * 4 / tau / (1 + (-tau * ((new - old).exp() - 1)).exp())


def dppo(new, old, a, divergence):
    is_near = divergence(new.item(), old.item(), a.item())
    return -a * min(math.exp(new.item() - old), 2.0) * new * (1.0 if is_near else 0.0)


def tv_near(new, old, a):
    moved = math.exp(new) - math.exp(old)
    return moved <= 0.3 if a > 0 else moved >= -0.1


def kl_near(new, old, a):
    p, q = math.exp(new), math.exp(old)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return (kl <= 0.3 or p <= q) if a > 0 else (kl <= 0.1 or p >= q)


def bypass_ppo(new, old, a):
    kept = 0.3 <= math.exp(new.item() - old) <= 2.5
    return clipped(new, old, a if kept else torch.zeros_like(a), dual=2.0)


TOKEN_LOSSES = {
    "vanilla": lambda new, old, a: clipped(new, old, a, dual=2.0),
    "gpg": lambda new, old, a: -a * new,
    "dro": lambda new, old, a: -(a * new - 0.15 * (new - old) ** 2),
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": lambda new, old, a: dppo(new, old, a, tv_near),
    "dppo_kl": lambda new, old, a: dppo(new, old, a, kl_near),
    "bypass_mode": bypass_ppo,
}


def places(data):
    return [[t for t in range(WIDTH) if data["response_mask"][row, t]] for row in range(ROWS)]


def aggregate(per_row, mode):
    """The step's loss from the losses of each sequence's tokens."""
    sums = [sum(row) for row in per_row]
    if mode == "token-mean":
        return sum(sums) / sum(len(row) for row in per_row)
    if mode == "token-sum":
        return sum(sums)
    if mode == "seq-mean-token-sum":
        return sum(sums) / ROWS
    if mode == "seq-mean-token-sum-norm":
        return sum(sums) / ROWS / HORIZON
    return sum(s / max(len(row), 1) for s, row in zip(sums, per_row, strict=True)) / ROWS


def slow_step(data, mode, row_losses):
    new = data["log_prob"].clone().requires_grad_()
    loss = aggregate([row_losses(new[row], row, spots) for row, spots in enumerate(places(data))], mode)
    loss.backward()
    return loss.detach(), new.grad


def weight_of(data, row, t):
    return 1.0 if data["rollout_is_weights"] is None else data["rollout_is_weights"][row, t]


def assert_equals(result, expected):
    torch.testing.assert_close(result[0], expected[0], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(result[1], expected[1], rtol=1e-12, atol=1e-15)
    assert expected[1].abs().sum() > 0


@pytest.mark.parametrize("name", sorted(TOKEN_LOSSES))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("weighted", [True, False])
def test_token_losses_equal_the_formula(name, mode, weighted):
    data = batch() if weighted else batch(rollout_is_weights=None)
    token_loss = TOKEN_LOSSES[name]

    def row_losses(new, row, spots):
        values = []
        for t in spots:
            weight = 1.0 if name == "bypass_mode" else weight_of(data, row, t)
            values.append(weight * token_loss(new[t], data["old_log_prob"][row, t], data["advantages"][row, t]))
        return values

    assert_equals(run(name, data, mode), slow_step(data, FIXED_MODE.get(name, mode), row_losses))


def test_gspo_equals_the_formula():
    data = batch()

    def row_losses(new, row, spots):
        old = data["old_log_prob"][row]
        if not spots:
            return []
        mean = (sum(new[t] - old[t] for t in spots) / len(spots)).detach()
        values = []
        for t in spots:
            ratio = (mean + new[t] - new[t].detach()).exp()
            a = data["advantages"][row, t]
            values.append(weight_of(data, row, t) * max(-a * ratio, -a * ratio.clamp(0.9, 1.3)))
        return values

    assert_equals(run("gspo", data), slow_step(data, "seq-mean-token-mean", row_losses))


def test_gspo_with_one_advantage_a_sequence_has_the_gradient_of_the_sequence_ratio():
    # Without clipping, the mean over tokens of s * d log p is d s: the sequence form of the paper.
    data = batch(rollout_is_weights=None)
    data["advantages"] = data["advantages"][:, :1].expand(ROWS, WIDTH).clone()
    config = dataclasses.replace(actor("gspo"), clip_ratio_low=1.0, clip_ratio_high=1e9)
    new = data["log_prob"].clone().requires_grad_()
    loss = 0.0
    for row, spots in enumerate(places(data)):
        if spots:
            ratio = (sum(new[row, t] - data["old_log_prob"][row, t] for t in spots) / len(spots)).exp()
            loss = loss - data["advantages"][row, 0] * ratio / ROWS
    loss.backward()
    assert_equals(run("gspo", data, config=config), (loss.detach(), new.grad))


def slow_geo_mean(data):
    new = data["log_prob"].clone().requires_grad_()
    loss = 0.0
    for row, spots in enumerate(places(data)):
        if not spots:
            continue
        logs, log_weights, advantages = [], [], []
        for t in spots:
            log_ratio, a = new[row, t] - data["old_log_prob"][row, t], data["advantages"][row, t]
            bounded = log_ratio.clamp(-0.1, 0.3)
            logs.append(min(log_ratio, bounded) if a > 0 else max(log_ratio, bounded))
            log_weights.append(math.log(weight_of(data, row, t)))
            advantages.append(a)
        weight = math.exp(sum(log_weights) / len(spots))
        loss = loss - weight * sum(advantages) / len(spots) * (sum(logs) / len(spots)).exp() / ROWS
    loss.backward()
    return loss.detach(), new.grad


@pytest.mark.parametrize("weighted", [True, False])
def test_geo_mean_equals_the_formula(weighted):
    data = batch() if weighted else batch(rollout_is_weights=None)
    assert_equals(run("geo_mean", data), slow_geo_mean(data))


def test_geo_mean_of_eight_sequences_has_the_gradient_of_the_whole_in_eight_micro_batches():
    data = batch()
    whole, cut = run("geo_mean", data), run("geo_mean", data, num_micro_batches=8)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-14, atol=1e-16)


def covariances(data):
    spots = [(row, t) for row, row_spots in enumerate(places(data)) for t in row_spots]
    a = [data["advantages"][spot].item() for spot in spots]
    p = [data["log_prob"][spot].item() for spot in spots]
    mean_a, mean_p = sum(a) / len(a), sum(p) / len(p)
    return {spot: (x - mean_a) * (y - mean_p) for spot, x, y in zip(spots, a, p, strict=True)}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_kl_cov_equals_the_formula(mode):
    data = batch()
    covariance = covariances(data)
    held = sorted(covariance, key=covariance.get)[-int(0.2 * len(covariance)) :]
    assert len(held) == 4

    def row_losses(new, row, spots):
        values = []
        for t in spots:
            log_ratio = new[t] - data["old_log_prob"][row, t]
            penalty = 0.7 * log_ratio.abs() if (row, t) in held else 0.0
            values.append(weight_of(data, row, t) * (-data["advantages"][row, t] * log_ratio.exp() + penalty))
        return values

    assert_equals(run("kl_cov", data, mode), slow_step(data, mode, row_losses))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_clip_cov_equals_the_formula_for_the_tokens_it_drew(mode):
    data = batch()
    covariance = covariances(data)
    result = run("clip_cov", data, mode)
    in_band, free = set(), set()
    for spot, value in covariance.items():
        ratio, a = math.exp(data["log_prob"][spot] - data["old_log_prob"][spot]), data["advantages"][spot].item()
        if -a * min(max(ratio, 0.9), 1.3) <= -a * ratio:
            free.add(spot)
            if -0.5 < value < 5.0:
                in_band.add(spot)
    # A token that is neither clipped nor dropped has a gradient.
    dropped = {spot for spot in free if result[1][spot] == 0}
    assert len(dropped) == int(0.2 * len(covariance)) == 4 and dropped < in_band

    def row_losses(new, row, spots):
        values = []
        for t in spots:
            loss = clipped(new[t], data["old_log_prob"][row, t], data["advantages"][row, t])
            values.append(weight_of(data, row, t) * loss * (0.0 if (row, t) in dropped else 1.0))
        return values

    assert_equals(result, slow_step(data, mode, row_losses))
    assert result[2]["actor/pg_clipfrac"] == pytest.approx(4 / len(covariance))


def test_clip_cov_draws_the_same_tokens_whatever_the_global_generator_and_others_for_other_data():
    first = run("clip_cov", batch())[1]
    torch.manual_seed(1234)
    assert torch.equal(run("clip_cov", batch())[1], first)
    drawn = set()
    for shift in range(6):
        data = batch()
        data["old_log_prob"] = data["old_log_prob"] - 1e-9 * shift
        drawn.add(tuple((run("clip_cov", data)[1] == 0).flatten().tolist()))
    assert len(drawn) > 1


def test_covariance_losses_choose_inside_the_micro_batch():
    # Ten tokens, ratio 0.1: one token in the whole, one in each half.
    old = torch.zeros(10, 1, dtype=torch.float64) - 1.0
    data = {
        "old_log_prob": old,
        "log_prob": old + 0.1 * random(10, 1, seed=7),
        "advantages": random(10, 1, seed=8),
        "response_mask": torch.ones(10, 1),
    }
    config = actor("kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=1e6)

    def held(pieces):
        found = 0
        for rows in torch.arange(10).chunk(pieces):
            new = data["log_prob"][rows].clone().requires_grad_()
            piece = {key: value[rows] for key, value in data.items()} | {"log_prob": new}
            loss, _ = losses.compute_policy_loss_kl_cov(**piece, config=config, batch_num_tokens=10)
            loss.backward()
            found += int((new.grad.abs() > 1e4).sum())
        return found

    assert (held(1), held(2)) == (1, 2)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(
    "advantage, new, is_kept", [(1, 0.1, True), (1, 0.99, False), (-1, 0.1, False), (-1, 0.99, True)]
)
def test_dppo_drops_what_went_far_the_way_its_advantage_pushes(name, advantage, new, is_kept):
    # From 0.5 to 0.1 or 0.99: both are outside of every bound.
    log_prob = torch.tensor([[math.log(new)]], requires_grad=True)
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=torch.tensor([[math.log(0.5)]]),
        log_prob=log_prob,
        advantages=torch.tensor([[float(advantage)]]),
        response_mask=torch.ones(1, 1),
        config=actor(name),
    )
    loss.backward()
    assert log_prob.grad.item() == pytest.approx(-advantage * new / 0.5 if is_kept else 0.0)
    assert metrics["actor/pg_clipfrac"].value == 1 - is_kept


@pytest.mark.parametrize("level", ["token", "sequence", None])
def test_bypass_mode_reinforce_equals_the_formula(level):
    rules = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_threshold=1.4, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.7_1.6",
        rollout_token_veto_threshold=0.25, loss_type="reinforce", bypass_mode=True,
    )  # fmt: skip
    data = batch()
    seen = set()

    def row_losses(new, row, spots):
        logs = {t: (new[t] - data["old_log_prob"][row, t]).item() for t in spots}
        if not spots:
            return []
        mean = math.exp(sum(logs.values()) / len(spots))
        kept = 0.7 <= mean <= 1.6 and min(logs.values()) >= math.log(0.25)
        seen.add(kept)
        values = []
        for t in spots:
            log_ratio = {"token": logs[t], "sequence": sum(logs.values()), None: 0.0}[level]
            weight = min(math.exp(log_ratio), 1.4) if kept else 0.0
            values.append(-weight * data["advantages"][row, t] * new[t])
        return values

    config = actor("bypass_mode", rollout_correction=rules)
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert_equals(run("bypass_mode", data, mode, config=config), slow_step(data, mode, row_losses))
    assert seen == {True, False}


# ---- what holds for all of them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MICRO_BATCH_LOCAL])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("dp_size, num_micro_batches", SPLITS)
def test_does_not_depend_on_the_split(name, mode, dp_size, num_micro_batches):
    whole, cut = run(name, batch(), mode), run(name, batch(), mode, dp_size, num_micro_batches)
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-14, atol=1e-16)
    assert cut[2] == pytest.approx(whole[2], rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("dp_size, num_micro_batches", SPLITS)
def test_covariance_losses_do_not_depend_on_the_split_where_they_choose_nothing(dp_size, num_micro_batches):
    for name, config in (("clip_cov", actor(clip_cov_lb=1e8, clip_cov_ub=1e9)), ("kl_cov", actor(ppo_kl_coef=0.0))):
        whole = run(name, batch(), config=config)
        cut = run(name, batch(), dp_size=dp_size, num_micro_batches=num_micro_batches, config=config)
        torch.testing.assert_close(cut[1], whole[1], rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e4])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_stands_at_masked_positions_changes_nothing(name, garbage):
    clean, dirty = batch(), batch()
    for key in ("old_log_prob", "log_prob", "advantages", "rollout_is_weights"):
        clean[key] = torch.where(clean["response_mask"] != 0, clean[key], 0.0)
        dirty[key] = torch.where(dirty["response_mask"] != 0, dirty[key], garbage)
    expected = run(name, clean)
    with torch.autograd.detect_anomaly():  # no NaN on the way either, where a later change could let it out
        result = run(name, dirty)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    assert result[2] == expected[2]


@pytest.mark.parametrize("name", NAMES)
def test_everything_masked_gives_zero_loss_zero_gradient_and_nan_means(name):
    data = batch()
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    loss, gradient, metrics = run(name, data)
    assert loss.item() == 0.0 and not gradient.any()
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_log_ratio_stays_finite(name):
    data = batch()
    data["log_prob"][0, 0] = data["old_log_prob"][0, 0] - 2000.0
    data["old_log_prob"][2, 1] = data["log_prob"][2, 1] - 2000.0
    loss, gradient, _ = run(name, data)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_takes_the_full_keyword_set_and_passes_new_counts_on(name):
    data = batch()
    loss, metrics = get_policy_loss_fn(name)(
        **data,
        loss_agg_mode="token-mean",
        config=actor(name),
        dp_size=2,
        batch_num_tokens=50,
        global_batch_size=12,
        loss_scale_factor=None,
        max_response_length=7,
        seq_num_tokens=None,
    )
    assert loss.shape == ()
    assert "actor/ppo_kl" in metrics, f"{name}: every loss reports actor/ppo_kl, which TokenBatch.ppo_kl() makes"
    parameters = inspect.signature(get_policy_loss_fn(name)).parameters.values()
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_the_counts_of_the_step_are_used_and_required(name):
    data = batch()
    loss = {}
    for factor in (1, 2):
        whole = {key: value * factor for key, value in counts(data).items() if key != "max_response_length"}
        whole["dp_size"] = 1
        loss[factor], _ = get_policy_loss_fn(name)(**data, config=actor(name), **whole)
    assert loss[2].item() == pytest.approx(loss[1].item() / 2, rel=1e-14)
    with pytest.raises(ValueError, match="the count over the whole optimiser step"):
        get_policy_loss_fn(name)(**data, config=actor(name), dp_size=2)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_nothing_is_measured_between_the_policies(name):
    data = batch()
    data["log_prob"] = data["old_log_prob"].clone()
    assert run(name, data)[2].get("actor/ppo_kl") == 0.0  # TokenBatch.ppo_kl() makes it


def test_settings_that_are_missing_or_out_of_range_are_named():
    with pytest.raises(ValueError, match="dro_beta=None must be a positive number"):
        PolicyLossConfig(loss_mode="dro")
    with pytest.raises(ValueError, match="clip_cov_lb=5 must be below clip_cov_ub=2"):
        PolicyLossConfig(clip_cov_lb=5, clip_cov_ub=2)
    with pytest.raises(ValueError, match="tau_neg=0"):
        McoreActorConfig(tau_neg=0)
    with pytest.raises(ValueError, match="needs actor.policy_loss.rollout_correction"):
        losses.compute_policy_loss_bypass_mode(**batch(), config=actor("bypass_mode", rollout_correction=None))
