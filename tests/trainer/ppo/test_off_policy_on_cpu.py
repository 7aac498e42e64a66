# SPDX-License-Identifier: Apache-2.0
"""Rollout correction in the loop, bypass mode, what single estimators need, and a step with nothing to train."""

import logging
import math

import pytest
import torch
from omegaconf import OmegaConf

import verl.utils.tensordict_utils as tu
from tests.trainer.ppo.fakes import FakeWorkerGroup, make_trainer
from verl.trainer.ppo.metric_utils import PhaseTimer, compute_data_metrics

RULES = "algorithm.rollout_correction"


class OffPolicyGroup(FakeWorkerGroup):
    """The rollout's log-probs are -1 - gap on every second row, -1 elsewhere (the trainer's are -1 everywhere)."""

    def __init__(self, gap=0.5, every=2):
        super().__init__()
        self.gap, self.every = gap, every
        self.asked = []

    def generate_sequences(self, prompts):
        self.asked.append(prompts.meta_info)
        output = super().generate_sequences(prompts)
        mask = output.batch["response_mask"].float()
        gap = torch.where(torch.arange(len(mask)) % self.every == 0, self.gap, 0.0)[:, None]
        output.batch["rollout_log_probs"] = (-1.0 - gap) * mask
        return output

    def compute_log_prob(self, data):
        output = super().compute_log_prob(data)
        if tu.get(data, "calculate_sum_pi_squared"):
            output["sum_pi_squared"] = 0.5 * data["response_mask"].float()
        return output


def step(tmp_path, group, **changes):
    trainer = make_trainer(tmp_path, group=group, **changes)
    batch, metrics = trainer.training_step(next(iter(trainer.train_dataloader)), PhaseTimer())
    return trainer, batch, metrics


def test_weights_and_the_gap_reach_the_update_and_the_log(tmp_path):
    group = OffPolicyGroup(gap=0.5)
    _, batch, metrics = step(tmp_path, group, **{RULES: {"rollout_is": "token", "rollout_is_threshold": 1.2}})
    update = group.updates[0]
    gap = update["old_log_probs"] - batch.batch["rollout_log_probs"]
    expected = gap.exp().clamp(max=1.2) * update["response_mask"]
    torch.testing.assert_close(update["rollout_is_weights"], expected)
    assert expected.unique().tolist() == pytest.approx([0.0, 1.0, 1.2])
    assert metrics["rollout_corr/kl"] < 0 < metrics["rollout_corr/k3_kl"]


def test_without_correction_the_gap_is_logged_and_nothing_else_changes(tmp_path):
    group = OffPolicyGroup()
    _, batch, metrics = step(tmp_path, group)
    assert "rollout_is_weights" not in group.updates[0].keys()
    assert "rollout_corr/chi2_seq" in metrics
    assert group.updates[0]["response_mask"].sum() == batch.batch["attention_mask"][:, 4:].sum()


def test_rejected_tokens_leave_every_mask(tmp_path):
    group = OffPolicyGroup(gap=2.0)
    rules = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.5}
    _, batch, metrics = step(tmp_path, group, **{RULES: rules})
    update = group.updates[0]
    is_far = (batch.batch["rollout_log_probs"] < -2).any(-1)
    assert is_far.sum() == len(is_far) // 2
    assert torch.equal(update["response_mask"].any(-1), ~is_far)
    kept = torch.tensor([mask.sum() for mask in update["loss_mask"].unbind()])
    assert torch.equal(kept, update["response_mask"].sum(-1))
    assert not update["advantages"][is_far].any()
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(0.5)


def test_a_batch_of_rejected_rows_is_skipped_with_a_warning(tmp_path, caplog):
    group = OffPolicyGroup(gap=9.0, every=1)
    rules = {"rollout_token_veto_threshold": 0.99, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    with caplog.at_level(logging.WARNING):
        trainer, batch, metrics = step(tmp_path, group, **{RULES: rules})
    assert "no token is left to train on" in caplog.text
    assert group.calls == ["generate_sequences", "compute_log_prob"]
    assert metrics["training/skipped_update"] == 1.0
    assert all(math.isfinite(value) for value in compute_data_metrics(batch).values())
    # The loop goes on.
    assert "critic/score/mean" in trainer._one_step(iter(trainer.train_dataloader))


def test_bypass_mode_skips_the_old_log_probs_and_hands_the_actor_its_loss(tmp_path):
    group = OffPolicyGroup()
    rules = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    trainer, batch, metrics = step(tmp_path, group, **{RULES: rules})
    assert group.calls == ["generate_sequences", "update_actor", "update_weights"]
    assert torch.equal(group.updates[0]["old_log_probs"], batch.batch["rollout_log_probs"])
    assert "rollout_is_weights" not in group.updates[0].keys()
    policy_loss = OmegaConf.to_container(trainer.config.actor_rollout_ref.actor.policy_loss)
    assert policy_loss == {"loss_mode": "bypass_mode", "rollout_correction": rules}


@pytest.mark.parametrize("rules", [{"bypass_mode": True}, {"rollout_is": "token"}])
def test_a_rollout_without_log_probs_is_named(tmp_path, rules):
    with pytest.raises(ValueError, match="rollout.calculate_log_probs=True"):
        step(tmp_path, FakeWorkerGroup(), **{RULES: rules})


def test_remax_compares_with_the_greedy_answer_to_the_same_prompt(tmp_path):
    group = OffPolicyGroup()
    _, batch, _ = step(tmp_path, group, **{"algorithm.adv_estimator": "remax"})
    assert group.calls[:2] == ["generate_sequences"] * 2
    sampled, greedy = group.asked
    assert greedy["do_sample"] is False and "do_sample" not in sampled
    # The fake's greedy answers to prompts 0..3 (padded to 4 rows) score 1, 2, 3, 1; every prompt has three rows.
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(uid for uid in sorted(batch.non_tensor_batch["uid"])))}
    expected = torch.tensor([1.0 + order[uid] % 3 for uid in batch.non_tensor_batch["uid"]])
    assert torch.equal(batch.batch["reward_baselines"], expected)
    relative = batch.batch["token_level_rewards"].sum(-1) - expected
    assert torch.equal(batch.batch["advantages"][:, 0], relative)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_baselines_get_the_squares_they_need(tmp_path, name):
    group = OffPolicyGroup()
    _, batch, _ = step(tmp_path, group, **{"algorithm.adv_estimator": name})
    assert "sum_pi_squared" in batch.batch.keys() and batch.batch["advantages"].abs().sum() > 0
    assert "sum_pi_squared" not in group.updates[0].keys()
    assert tu.get(group.updates[0], "calculate_sum_pi_squared") is False


def test_gdpo_reads_what_the_reward_function_returned(tmp_path):
    _, batch, _ = step(
        tmp_path,
        OffPolicyGroup(),
        **{"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["acc"]},
    )
    mask = batch.batch["response_mask"].bool()
    assert batch.batch["advantages"][mask].mean().abs() < 1e-6
    best = torch.tensor([float(x) for x in batch.non_tensor_batch["acc"]]) == 1
    assert (batch.batch["advantages"][best][:, 0] > 0).all() and (batch.batch["advantages"][~best][:, 0] < 0).all()


@pytest.mark.parametrize("watched, bonus", [(True, 0), (False, 0.01), (False, 0)])
def test_entropy_is_computed_in_the_update_when_it_is_watched_or_rewarded(tmp_path, watched, bonus):
    group = FakeWorkerGroup()
    changes = {
        "actor_rollout_ref.actor.calculate_entropy": watched,
        "actor_rollout_ref.actor.entropy_coeff": bonus,
    }
    step(tmp_path, group, **changes)
    assert tu.get(group.updates[0], "calculate_entropy") is bool(watched or bonus)
