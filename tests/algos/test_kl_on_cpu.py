# SPDX-License-Identifier: Apache-2.0
"""KL estimators, the KL penalty inside the reward, and its controllers."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algos.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_in_reward, kl_penalty

NAN = float("nan")
X = [-1.3, -0.2, 0.0, 0.4, 2.0]
VALUE = {
    "kl": lambda x: x,
    "abs": abs,
    "mse": lambda x: x * x / 2,
    "low_var_kl": lambda x: math.exp(-x) - 1 + x,
}
SLOPE = {
    "kl": lambda x: 1.0,
    "abs": lambda x: (x > 0) - (x < 0),
    "mse": lambda x: x,
    "low_var_kl": lambda x: 1 - math.exp(-x),
}
ALIAS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


@pytest.mark.parametrize("name", [*VALUE, *ALIAS])
@pytest.mark.parametrize("suffix", ["", "+"])
def test_value_and_gradient(name, suffix):
    base = ALIAS.get(name, name)
    reference = torch.tensor([-2.0, -1.0, -0.5, -3.0, -4.0], dtype=torch.float64)
    policy = (reference + torch.tensor(X, dtype=torch.float64)).requires_grad_()
    result = kl_penalty(policy, reference, name + suffix)
    result.sum().backward()
    slope = SLOPE["mse" if suffix else base]
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx([VALUE[base](x) for x in X], rel=1e-12, abs=1e-15)
    assert policy.grad.tolist() == pytest.approx([slope(x) for x in X], rel=1e-12, abs=1e-15)


def test_low_var_kl_is_clamped():
    result = kl_penalty(torch.tensor([-1e4, -30.0, 1e4]), torch.zeros(3), "low_var_kl")
    assert result.tolist() == [10.0, 10.0, 10.0]


def test_low_var_kl_keeps_its_digits_near_zero_in_float32():
    x = torch.tensor([1e-3, -1e-3])
    assert kl_penalty(x, torch.zeros(2), "k3").tolist() == pytest.approx([0.5e-6, 0.5e-6], rel=2e-3)


@pytest.mark.parametrize("name", ["full", "kl++", "k4", ""])
def test_unknown_type_names_the_known_ones(name):
    with pytest.raises(ValueError, match=r"kl_loss_type.*known: kl, k1, abs, mse, k2, low_var_kl, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), name)


def reward_batch(filler=0.0):
    return {
        "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64),
        "old_log_probs": torch.tensor([[-1.0, -2.0, filler], [-3.0, filler, filler]], dtype=torch.float64),
        "ref_log_prob": torch.tensor([[-1.5, -2.1, filler], [-2.0, filler, filler]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
    }


@pytest.mark.parametrize("filler", [0.0, NAN, math.inf])
def test_kl_in_reward(filler):
    rewards, current_kl = kl_in_reward(**reward_batch(filler), kl_coef=0.1)
    expected = [[-0.05, 0.99, 0.0], [2.1, 0.0, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-15)
    assert current_kl.item() == pytest.approx((0.3 - 1.0) / 2, rel=1e-14)


def test_kl_in_reward_with_a_sequence_without_tokens():
    batch = reward_batch(NAN)
    batch["response_mask"][1] = 0
    rewards, current_kl = kl_in_reward(**batch, kl_coef=0.1)
    assert rewards[1].tolist() == [2.0, 0.0, 0.0]
    assert current_kl.item() == pytest.approx(0.15, rel=1e-14)


@pytest.mark.parametrize("current, factor", [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98), (5.4, 0.99)])
def test_adaptive_controller_follows_the_clipped_relative_error(current, factor):
    controller = AdaptiveKLController(0.5, target_kl=6.0, horizon=1000)
    controller.update(current_kl=current, n_steps=100)
    assert controller.value == pytest.approx(0.5 * factor, rel=1e-12)


def test_get_kl_controller():
    fixed = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.001))
    fixed.update(current_kl=100.0, n_steps=100)
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.001
    settings = {"type": "adaptive", "kl_coef": 0.001, "target_kl": 0.1, "horizon": 10000}
    assert isinstance(get_kl_controller(SimpleNamespace(**settings)), AdaptiveKLController)
    with pytest.raises(ValueError, match="horizon=0"):
        get_kl_controller(SimpleNamespace(**(settings | {"horizon": 0})))
    with pytest.raises(ValueError, match="target_kl=-1"):
        get_kl_controller(SimpleNamespace(**(settings | {"target_kl": -1})))
    with pytest.raises(ValueError, match="kl_ctrl.type='linear'.*fixed, adaptive"):
        get_kl_controller(SimpleNamespace(**(settings | {"type": "linear"})))
