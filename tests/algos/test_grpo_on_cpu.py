# SPDX-License-Identifier: Apache-2.0
"""The group-relative advantage against a loop over the groups, its edge cases, and the estimators' registry."""

import statistics

import numpy as np
import pytest
import torch

from verl.algos.advantage import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)

EPSILON = 1e-6


def uids(*labels):
    return np.array(labels, dtype=object)


def rewards_of(scores, width=3, dtype=torch.float64):
    rewards = torch.zeros(len(scores), width, dtype=dtype)
    rewards[:, -1] = torch.tensor(scores, dtype=dtype)
    return rewards


def grpo(scores, labels, dtype=torch.float64, **kwargs):
    rewards = rewards_of(scores, dtype=dtype)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(rewards.shape), uids(*labels), **kwargs)
    assert torch.equal(advantages, advantages[:, :1].expand_as(advantages))
    return advantages[:, 0].tolist()


@pytest.mark.parametrize("divide", [True, False])
def test_equals_a_loop_over_the_groups(divide):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(23, 4, dtype=torch.float64, generator=generator)
    mask = torch.rand(23, 4, generator=generator) > 0.3
    labels = uids(*(f"prompt-{i}" for i in torch.randint(0, 6, (22,), generator=generator)), "alone")
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, labels, norm_adv_by_std_in_grpo=divide)

    scores = rewards.sum(-1).tolist()
    for row, label in enumerate(labels):
        group = [score for score, other in zip(scores, labels, strict=True) if other == label]
        mean, std = (statistics.mean(group), statistics.stdev(group)) if len(group) > 1 else (0.0, 1.0)
        expected = (scores[row] - mean) / (std + EPSILON if divide else 1.0)
        for t in range(4):
            assert advantages[row, t].item() == pytest.approx(expected if mask[row, t] else 0.0, rel=1e-12, abs=1e-15)
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-4), (torch.float32, 5e-3)])
def test_rewards_that_differ_in_the_sixth_digit_keep_their_advantage(dtype, tolerance):
    # d / 2 over d / sqrt(2) + 1e-6 with d = 1e-5 is 0.6195; in float32 the inputs themselves are d off by up to 2.4 %.
    result = grpo([1.0, 1.00001, 2.0, 2.00001], "aabb", dtype=dtype)
    assert result == pytest.approx([-0.6195, 0.6195, -0.6195, 0.6195], abs=tolerance)


def test_float32_rewards_are_treated_in_float64():
    rewards = torch.randn(32, 200, generator=torch.Generator().manual_seed(0)) + 100.0
    mask, labels = torch.ones(rewards.shape), uids(*"abcd" * 8)
    single, _ = compute_grpo_outcome_advantage(rewards, mask, labels)
    double, _ = compute_grpo_outcome_advantage(rewards.double(), mask, labels)
    assert single.dtype == torch.float32
    assert torch.equal(single, double.float())


def test_group_of_one_keeps_its_reward():
    assert grpo([3.0, 1.0, 2.0], "abb")[0] == pytest.approx(3.0 / (1 + EPSILON), rel=1e-14)
    assert grpo([3.0, 1.0, 2.0], "abb", norm_adv_by_std_in_grpo=False) == [3.0, -0.5, 0.5]


@pytest.mark.parametrize("reward", [0.1, 1.0, -1e9 / 3])
def test_equal_rewards_give_exactly_zero(reward):
    assert grpo([reward] * 3, "aaa") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("labels", [[1, "1", 1, "1"], [7, None, 7, None], [(0, 1), (1, 0), (0, 1), (1, 0)]])
def test_labels_of_any_hashable_kind(labels):
    index = np.empty(4, dtype=object)
    index[:] = labels
    rewards = rewards_of([0.0, 5.0, 1.0, 7.0])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(4, 3), index, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [-0.5, -1.0, 0.5, 1.0]


def test_numeric_index_and_order_of_rows():
    rewards = rewards_of([0.0, 5.0, 1.0, 7.0])
    for index in (np.array([4, 2, 4, 2]), torch.tensor([4, 2, 4, 2]), [4, 2, 4, 2]):
        advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(4, 3), index, norm_adv_by_std_in_grpo=False)
        assert advantages[:, 0].tolist() == [-0.5, -1.0, 0.5, 1.0]


def test_masked_tokens_get_no_advantage_but_their_reward_counts():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, torch.tensor([[1, 0], [1, 1]]), uids("a", "a"), norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[0.5, 0.0], [-0.5, -0.5]]
    assert advantages.dtype == torch.float32


def test_division_by_the_deviation_comes_from_the_configuration_unless_given():
    divided, plain = grpo([0.0, 1.0], "aa"), [-0.5, 0.5]
    assert divided != plain
    assert grpo([0.0, 1.0], "aa", config={"norm_adv_by_std_in_grpo": False}) == plain
    assert grpo([0.0, 1.0], "aa", config={}) == divided
    assert grpo([0.0, 1.0], "aa", config={"norm_adv_by_std_in_grpo": False}, norm_adv_by_std_in_grpo=True) == divided


def test_empty_batch_and_wrong_index_length():
    advantages, _ = compute_grpo_outcome_advantage(torch.zeros(0, 3), torch.zeros(0, 3), uids())
    assert advantages.shape == (0, 3)
    with pytest.raises(ValueError, match="1 entries for 2 rows"):
        compute_grpo_outcome_advantage(torch.zeros(2, 3), torch.ones(2, 3), uids("a"))


def test_registry(monkeypatch):
    monkeypatch.setattr(ADV_ESTIMATOR_REGISTRY, "_functions", dict(ADV_ESTIMATOR_REGISTRY._functions))

    @register_adv_est("mine")
    def mine(**kwargs):
        return kwargs

    assert get_adv_estimator_fn("mine") is mine
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is get_adv_estimator_fn("grpo")
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_adv_est(AdvantageEstimator.GRPO)(mine)
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='grppo'.*known: .*mine.*Did you mean grpo"):
        get_adv_estimator_fn("grppo")
