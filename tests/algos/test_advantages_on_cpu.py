# SPDX-License-Identifier: Apache-2.0
"""Every advantage estimator against its formula, written as loops over rows and tokens in plain Python."""

import inspect
import math
import statistics

import numpy as np
import pytest
import torch

from verl.algos import advantage as adv
from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

NAN = float("nan")
LABELS = ["a", "b", "a", "c", "b", "a", "b", "alone", "c"]
ROWS, WIDTH = len(LABELS), 7
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def multi_turn_batch():
    """Responses of different lengths with tool answers in between; every token, trained or not, may earn something."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([7, 3, 5, 1, 7, 6, 2, 4, 7])[:, None]
    attended = torch.arange(WIDTH) < lengths
    mask = attended & (torch.rand(ROWS, WIDTH, generator=generator) > 0.3)
    mask[:, 0] = True
    mask[0, 2] = mask[0, 6] = False  # a tool answer in the middle, and at the very end
    old_log_probs = -random(ROWS, WIDTH, seed=4).abs()
    # At least pi^2, and at most pi^2 + (1 - pi)^2: what a distribution with that pi can have.
    sum_pi_squared = old_log_probs.exp() ** 2 + (1 - old_log_probs.exp()) ** 2 * random(ROWS, WIDTH, seed=5).sigmoid()
    return {
        "token_level_rewards": torch.where(attended, random(ROWS, WIDTH, seed=2), 0.0),
        "response_mask": mask.long(),
        "index": np.array(LABELS, dtype=object),
        "config": {
            "gamma": 0.9,
            "lam": 0.8,
            "gdpo_reward_keys": ["right", "short"],
            "gdpo_reward_weights": [1.0, 0.25],
        },
        "values": random(ROWS, WIDTH, seed=3),
        "old_log_probs": old_log_probs,
        "sum_pi_squared": sum_pi_squared,
        "rollout_is_weights": None,
        "reward_baselines": random(ROWS, seed=6),
        "non_tensor_batch": {
            "right": np.array([1.0, 0, 1, 0, 1, 0, 0, 1, 1], dtype=object),
            "short": np.array(random(ROWS, seed=7).tolist(), dtype=object),
        },
    }


def steps(batch, row):
    """Trained positions of a row, and the reward of each with what came in before the next trained one."""
    mask, rewards = batch["response_mask"][row].tolist(), batch["token_level_rewards"][row].tolist()
    places = [t for t in range(WIDTH) if mask[t]]
    ends = places[1:] + [WIDTH]
    return places, [sum(rewards[start:end]) for start, end in zip(places, ends, strict=True)]


def scatter(batch, per_row):
    """[B, R] from a list of values at the trained positions of each row."""
    result = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, values in enumerate(per_row):
        for t, value in zip(steps(batch, row)[0], values, strict=True):
            result[row, t] = value
    return result


def whiten(batch, matrix):
    flat = [x for row in range(ROWS) for x in matrix[row, steps(batch, row)[0]].tolist()]
    mean, variance = statistics.mean(flat), statistics.variance(flat)
    return torch.where(batch["response_mask"] != 0, (matrix - mean) / math.sqrt(variance + 1e-8), 0.0)


def discounted(rewards, gamma):
    return [sum(gamma ** (j - i) * rewards[j] for j in range(i, len(rewards))) for i in range(len(rewards))]


def slow_gae(batch, gamma=0.9, lam=0.8):
    raw, returns = [], []
    for row in range(ROWS):
        places, rewards = steps(batch, row)
        values = batch["values"][row, places].tolist() + [0.0]
        delta = [r + gamma * values[i + 1] - values[i] for i, r in enumerate(rewards)]
        raw.append(discounted(delta, gamma * lam))
        returns.append([a + v for a, v in zip(raw[-1], values[:-1], strict=True)])
    return whiten(batch, scatter(batch, raw)), scatter(batch, returns)


def slow_reinforce_plus_plus(batch):
    returns = scatter(batch, [discounted(steps(batch, row)[1], 0.9) for row in range(ROWS)])
    return whiten(batch, returns), returns


def slow_remax(batch):
    returns = [discounted(steps(batch, row)[1], 1.0) for row in range(ROWS)]
    less = [[g - batch["reward_baselines"][row].item() for g in returns[row]] for row in range(ROWS)]
    return scatter(batch, less), scatter(batch, returns)


def optimal_baseline(batch, place):
    """`place` turns the trained positions of a row into the positions at which rows are compared."""
    returns, energies, where = [], [], []
    for row in range(ROWS):
        places, rewards = steps(batch, row)
        returns.append(discounted(rewards, 1.0))
        terms = [
            1 - 2 * math.exp(batch["old_log_probs"][row, t].item()) + batch["sum_pi_squared"][row, t].item()
            for t in places
        ]
        energies.append([sum(terms[: i + 1]) for i in range(len(terms))])
        where.append(place(places))
    result = []
    for row in range(ROWS):
        values = []
        for i, spot in enumerate(where[row]):
            there = [
                (returns[other][where[other].index(spot)], energies[other][where[other].index(spot)])
                for other in range(ROWS)
                if LABELS[other] == LABELS[row] and spot in where[other]
            ]
            total = sum(w for _, w in there)
            baseline = sum(g * w for g, w in there) / total if len(there) > 1 else 0.0
            values.append(returns[row][i] - baseline)
        result.append(values)
    return scatter(batch, result), scatter(batch, returns)


def slow_outcome(batch, formula):
    """`formula(row, scores of its group, members of its group)` -> one number for the row."""
    scores = batch["token_level_rewards"].sum(-1).tolist()
    values = []
    for row in range(ROWS):
        members = [i for i in range(ROWS) if LABELS[i] == LABELS[row]]
        values.append([formula(scores[row], [scores[i] for i in members], members)] * len(steps(batch, row)[0]))
    return scatter(batch, values)


def mean_of(group):
    return statistics.mean(group) if len(group) > 1 else 0.0


def std_of(group):
    return statistics.stdev(group) if len(group) > 1 else 1.0


def slow_grpo(batch):
    return slow_outcome(batch, lambda r, group, _: (r - mean_of(group)) / (std_of(group) + 1e-6))


def slow_rloo(batch):
    def formula(r, group, _):
        return r if len(group) == 1 else r - (sum(group) - r) / (len(group) - 1)

    return slow_outcome(batch, formula)


def slow_opo(batch):
    lengths = [len(steps(batch, row)[0]) for row in range(ROWS)]

    def formula(r, group, members):
        if len(group) == 1:
            return r
        return r - sum(lengths[i] * s for i, s in zip(members, group, strict=True)) / sum(lengths[i] for i in members)

    return slow_outcome(batch, formula)


def slow_gpg(batch):
    scores = batch["token_level_rewards"].sum(-1).tolist()
    scale = ROWS / sum(score != 0 for score in scores)
    return slow_outcome(batch, lambda r, group, _: scale * (r - mean_of(group)))


def slow_plus_plus_baseline(batch):
    return whiten(batch, slow_outcome(batch, lambda r, group, _: r - mean_of(group)))


def slow_gdpo(batch):
    total = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for key, weight in (("right", 1.0), ("short", 0.25)):
        rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        rewards[:, 0] = torch.tensor(batch["non_tensor_batch"][key].tolist(), dtype=torch.float64)
        total += weight * slow_grpo(batch | {"token_level_rewards": rewards})
    return whiten(batch, total)


SLOW = {
    "gae": slow_gae,
    "reinforce_plus_plus": slow_reinforce_plus_plus,
    "remax": slow_remax,
    "optimal_token_baseline": lambda batch: optimal_baseline(batch, lambda places: places),
    "tir_optimal_token_baseline": lambda batch: optimal_baseline(batch, lambda places: list(range(len(places)))),
    "grpo": slow_grpo,
    "grpo_vectorized": slow_grpo,
    "rloo": slow_rloo,
    "rloo_vectorized": slow_rloo,
    "opo": slow_opo,
    "gpg": slow_gpg,
    "reinforce_plus_plus_baseline": slow_plus_plus_baseline,
    "gdpo": slow_gdpo,
}
# grpo_passk refuses groups of one, which the batch above holds; it has its own tests.
NAMES = sorted(SLOW)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_formula(name):
    batch = multi_turn_batch()
    expected = SLOW[name](batch)
    expected = expected if isinstance(expected, tuple) else (expected, expected)
    for result, right in zip(get_adv_estimator_fn(name)(**batch), expected, strict=True):
        assert result.dtype == torch.float64
        torch.testing.assert_close(result, right, **CLOSE)


def test_all_registered_estimators_are_tested_here():
    untested = sorted(set(ADV_ESTIMATOR_REGISTRY.names()) - {*NAMES, "grpo_passk"})
    assert not untested, f"write the formula of {untested} a second time, row by row, and put it into SLOW above"


@pytest.mark.parametrize("name", ADV_ESTIMATOR_REGISTRY.names())
def test_takes_the_full_keyword_set_and_any_new_one(name):
    batch = multi_turn_batch() | {"index": np.array(list("aabbccdda"), dtype=object)}
    batch["rollout_is_weights"] = torch.ones(ROWS, WIDTH)
    advantages, returns = get_adv_estimator_fn(name)(**batch, batch={}, something_new=1)
    assert advantages.shape == returns.shape == (ROWS, WIDTH)
    parameters = inspect.signature(get_adv_estimator_fn(name)).parameters.values()
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_float32_rewards_are_treated_in_float64(name):
    batch = multi_turn_batch()
    batch["token_level_rewards"] = (batch["token_level_rewards"] + 100.0).float()
    single, double = (
        get_adv_estimator_fn(name)(**batch | {"token_level_rewards": batch["token_level_rewards"].to(dtype)})
        for dtype in (torch.float32, torch.float64)
    )
    for one, two in zip(single, double, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, two.float())


@pytest.mark.parametrize("name", NAMES)
def test_columns_at_masked_positions_are_never_read(name):
    batch = multi_turn_batch()
    expected = get_adv_estimator_fn(name)(**batch)
    for key in ("values", "old_log_probs", "sum_pi_squared"):
        batch[key] = torch.where(batch["response_mask"] != 0, batch[key], NAN)
    for result, right in zip(get_adv_estimator_fn(name)(**batch), expected, strict=True):
        assert torch.equal(result, right)
        assert not result[batch["response_mask"] == 0].any()


@pytest.mark.parametrize("name", NAMES)
def test_where_a_turn_ends_does_not_change_what_it_earned(name):
    # The same score on the last trained token, and on the tool's answer behind it.
    batch = multi_turn_batch()
    rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    moved = rewards.clone()
    scores = random(ROWS, seed=8)
    for row in range(ROWS):
        last = steps(batch, row)[0][-1]
        rewards[row, last] = moved[row, min(last + 1, WIDTH - 1)] = scores[row]
    assert not torch.equal(rewards, moved)
    results = [get_adv_estimator_fn(name)(**batch | {"token_level_rewards": x}) for x in (rewards, moved)]
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert one.abs().sum() > 0


GROUP_RELATIVE = ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"]


@pytest.mark.parametrize("name", [*GROUP_RELATIVE, "reinforce_plus_plus_baseline", "gdpo"])
@pytest.mark.parametrize("reward", [0.1, -1e9 / 3])
def test_groups_of_equal_rewards_get_exactly_zero(name, reward):
    rewards = torch.zeros(6, 3, dtype=torch.float64)
    rewards[:, 1] = reward
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards,
        response_mask=torch.ones(6, 3),
        index=np.array(list("aaabbb"), dtype=object),
        config={"gdpo_reward_keys": ["x"]},
        non_tensor_batch={"x": [reward] * 6},
    )
    assert not advantages.any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "optimal_token_baseline"])
def test_a_group_of_one_keeps_its_reward(name):
    batch = multi_turn_batch()
    row = LABELS.index("alone")
    advantages, _ = get_adv_estimator_fn(name)(**batch)
    first = advantages[row][batch["response_mask"][row] != 0][0].item()
    assert first == pytest.approx(batch["token_level_rewards"][row].sum().item(), rel=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_trained_token_gives_zeros(name):
    batch = multi_turn_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for result in get_adv_estimator_fn(name)(**batch):
        assert not result.any() and torch.isfinite(result).all()


@pytest.mark.parametrize("by_std", [True, False])
def test_passk_rewards_the_best_by_its_lead(by_std):
    scores = torch.tensor([1.0, 4.0, 2.5, 3.0, 3.0, 0.0, -2.0, -5.0], dtype=torch.float64)
    advantages, _ = adv.compute_grpo_passk_outcome_advantage(
        scores[:, None], torch.ones(8, 1), list("aaabbbcc"), norm_adv_by_std_in_grpo=by_std
    )
    lead_a, lead_c = 1.5, 3.0
    if by_std:
        lead_a /= statistics.stdev([1.0, 4.0, 2.5]) + 1e-6
        lead_c /= statistics.stdev([-2.0, -5.0]) + 1e-6
    expected = torch.tensor([0, lead_a, 0, 0, 0, 0, lead_c, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages[:, 0], expected, **CLOSE)


def test_passk_refuses_a_group_of_one():
    with pytest.raises(ValueError, match="rollout.n of at least 2"):
        adv.compute_grpo_passk_outcome_advantage(torch.ones(3, 1), torch.ones(3, 1), list("aab"))


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_low_variance_groups_keep_their_advantage(name):
    # d / 2 over d / sqrt(2) + 1e-6 with d = 1e-5.
    scores = torch.tensor([1.0, 1.00001, 2.0, 2.00001], dtype=torch.float64)[:, None]
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=scores, response_mask=torch.ones(4, 1), index=list("aabb")
    )
    assert advantages[:, 0].tolist() == pytest.approx([-0.6195, 0.6195, -0.6195, 0.6195], abs=1e-4)


def test_gae_by_hand_over_a_tool_answer():
    # Two trained tokens around a tool's answer that earns 1: delta = 1 + 0.5 * 4 - 2 = 1 and 3 - 4 = -1.
    nan = NAN
    _, returns = adv.compute_gae_advantage_return(
        token_level_rewards=torch.tensor([[0.0, 1.0, 3.0, 0.0]]),
        values=torch.tensor([[2.0, nan, 4.0, nan]]),
        response_mask=torch.tensor([[1, 0, 1, 0]]),
        gamma=0.5,
        lam=0.5,
    )
    assert returns.tolist() == [[2.0 + 1.0 - 0.25, 0.0, 3.0, 0.0]]


def test_gae_reads_gamma_and_lam_from_the_configuration_unless_given():
    batch = multi_turn_batch()
    explicit = adv.compute_gae_advantage_return(**batch | {"config": None}, gamma=0.9, lam=0.8)
    assert torch.equal(explicit[1], adv.compute_gae_advantage_return(**batch)[1])
    plain = adv.compute_gae_advantage_return(**batch | {"config": {}})
    assert not torch.equal(explicit[1], plain[1])
    torch.testing.assert_close(plain[1], slow_gae(batch, 1.0, 1.0)[1], **CLOSE)


def test_optimal_baseline_weighs_by_squared_importance_weights():
    batch = multi_turn_batch()
    weights = random(ROWS, WIDTH, seed=9).exp()
    weighted, _ = adv.compute_optimal_token_baseline_advantage(**batch | {"rollout_is_weights": weights})
    plain, _ = adv.compute_optimal_token_baseline_advantage(**batch)
    assert not torch.allclose(weighted, plain)
    ones, _ = adv.compute_optimal_token_baseline_advantage(**batch | {"rollout_is_weights": -torch.ones(ROWS, WIDTH)})
    torch.testing.assert_close(ones, plain, **CLOSE)


@pytest.mark.parametrize(
    "name, missing, words",
    [
        ("remax", "reward_baselines", "needs reward_baselines"),
        ("optimal_token_baseline", "sum_pi_squared", "needs sum_pi_squared"),
        ("tir_optimal_token_baseline", "old_log_probs", "'tir_optimal_token_baseline' needs old_log_probs"),
        ("gdpo", "config", "needs algorithm.gdpo_reward_keys"),
        ("gdpo", "non_tensor_batch", "names 'right', which the reward function does not return"),
    ],
)
def test_what_an_estimator_lacks_is_named(name, missing, words):
    with pytest.raises(ValueError, match=words):
        get_adv_estimator_fn(name)(**multi_turn_batch() | {missing: None})


def test_an_estimator_of_the_users_own_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text("def half(**kwargs):\n    return kwargs\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_adv_estimator_fn("my_estimators:half")(x=1) == {"x": 1}
    with pytest.raises(ValueError, match="algorithm.adv_estimator='my_estimators:halv'.*Did you mean half"):
        get_adv_estimator_fn("my_estimators:halv")
    with pytest.raises(ValueError, match="module 'no_such_module' cannot be imported"):
        get_adv_estimator_fn("no_such_module:half")
