# SPDX-License-Identifier: Apache-2.0
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import verl.utils.tensordict_utils as tu
from tests.trainer.ppo.fakes import FakeWorkerGroup, make_trainer
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import PhaseTimer
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.utils.checkpoint_folder import MARKER


def _step(trainer):
    batch, metrics = trainer.training_step(next(iter(trainer.train_dataloader)), PhaseTimer())
    return batch, metrics


def test_one_step_calls_the_workers_in_order(tmp_path):
    trainer = make_trainer(tmp_path)
    _step(trainer)
    assert trainer.actor_rollout_wg.calls == [
        "generate_sequences",
        "compute_log_prob",
        "update_actor",
        "update_weights",
    ]


def _watch_rewards_and_results(trainer):
    """Add to the workers' calls when the rewards are computed, and when a result is waited for."""
    group, reward_fn, seen = trainer.actor_rollout_wg, trainer.reward_fn, []

    def rewarding(data, **kwargs):
        group.calls.append("reward")
        seen.extend(data.non_tensor_batch["uid"])
        return reward_fn(data, **kwargs)

    def noting(name):
        method = getattr(group, name)

        def start(*args, **kwargs):
            finish = method.start(*args, **kwargs)
            return lambda: (group.calls.append(f"{name} is there"), finish())[1]

        return SimpleNamespace(start=start)

    trainer.reward_fn = rewarding
    for name in ("compute_log_prob", "update_actor", "update_weights"):
        setattr(group, name, noting(name))
    return seen


@pytest.mark.parametrize("dp_size", [1, 2])
def test_rewards_are_computed_while_the_workers_are_busy_and_see_prompts_together(tmp_path, dp_size):
    trainer = make_trainer(tmp_path, **{"trainer.n_gpus_per_node": dp_size})
    seen = _watch_rewards_and_results(trainer)
    batch, _ = _step(trainer)
    calls = trainer.actor_rollout_wg.calls
    assert calls[:4] == ["generate_sequences", "compute_log_prob", "reward", "compute_log_prob is there"]
    assert calls[4:] == ["update_actor", "update_weights", "update_actor is there", "update_weights is there"]
    assert seen == [f"0-{prompt}" for prompt in range(4) for _ in range(3)]
    # Whatever the order in which the ranks get them, rows keep their scores.
    lengths = batch.batch["response_mask"].sum(-1)
    assert torch.equal(batch.batch["token_level_scores"].sum(-1), lengths.float())
    assert batch.non_tensor_batch["acc"].tolist() == (lengths == 3).float().tolist()


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_reference_is_asked_when_a_kl_term_needs_it(tmp_path, key):
    trainer = make_trainer(tmp_path, **{key: True})
    batch, metrics = _step(trainer)
    assert "compute_ref_log_prob" in trainer.actor_rollout_wg.calls
    update = trainer.actor_rollout_wg.updates[0]
    assert torch.equal(update["ref_log_prob"], batch.batch["ref_log_prob"])
    scores, rewards = batch.batch["token_level_scores"], batch.batch["token_level_rewards"]
    if key == "algorithm.use_kl_in_reward":
        # log-probs -1 against -1.5: 0.5 nats on every response token, at coefficient 0.1.
        assert torch.allclose(scores - rewards, 0.05 * batch.batch["response_mask"].float())
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)
    else:
        assert torch.equal(scores, rewards)


def test_advantages_reach_the_update_with_the_rows_they_belong_to(tmp_path):
    trainer = make_trainer(tmp_path)
    batch, metrics = _step(trainer)
    update = trainer.actor_rollout_wg.updates[0]
    # Scores are 1, 2, 3 in every group: advantages -1, 0, 1 over the response, in any order of rows.
    lengths = update["response_mask"].sum(-1)
    expected = (lengths - 2).float()[:, None] * update["response_mask"]
    assert torch.allclose(update["advantages"], expected, atol=1e-5)
    assert sorted(lengths.tolist()) == [1] * 4 + [2] * 4 + [3] * 4
    assert update["input_ids"].offsets().diff().tolist() == (2 + lengths).tolist()
    assert metrics["actor/grad_norm"] == 2.0 and "worker_seconds" not in metrics
    assert metrics["actor/entropy"] == pytest.approx(0.5)


def test_mini_batches_hold_the_same_prompts_whatever_the_number_of_ranks(tmp_path):
    def prompts_of_first_mini_batch(dp_size):
        trainer = make_trainer(tmp_path, **{"trainer.n_gpus_per_node": dp_size})
        _step(trainer)
        update = trainer.actor_rollout_wg.updates[0]
        assert tu.get(update, "mini_batch_size") == 6
        rows_per_rank = update["prompts"].shape[0] // dp_size
        ranks = update["prompts"][:, 2].reshape(dp_size, rows_per_rank)
        return sorted(ranks[:, : 6 // dp_size].flatten().tolist())

    expected = prompts_of_first_mini_batch(1)
    assert len(set(expected)) == 2
    assert prompts_of_first_mini_batch(2) == expected
    assert prompts_of_first_mini_batch(3) == expected


def test_metrics_are_plain_numbers_and_count_validation_beside_the_step(tmp_path):
    trainer = make_trainer(tmp_path, **{"trainer.test_freq": 1, "trainer.total_training_steps": 1})
    real = trainer._validate

    def slow():
        import time

        time.sleep(0.2)
        return real()

    trainer._validate = slow
    metrics = trainer.fit()
    json.dumps(metrics, allow_nan=False)
    assert all(type(value) is float for value in metrics.values())
    assert metrics["timing_s/testing"] > 0.2 > metrics["timing_s/step"]
    phases = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "controller")
    assert {f"timing_s/{phase}" for phase in phases} <= metrics.keys()
    assert metrics["critic/score/mean"] == pytest.approx(2.0)
    assert metrics["response_length/mean"] == pytest.approx(2.0)
    assert metrics["prompt_length/mean"] == pytest.approx(2.0)
    assert metrics["perf/total_num_tokens"] == 12 * 2 + 4 * (1 + 2 + 3)
    assert metrics["perf/throughput"] == pytest.approx(
        metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"] / 2
    )
    # Three prompts on two ranks: padded by one row that must not be counted. Lengths 1, 2, 3; "acc" is the core number.
    assert metrics["val-core/fake/acc/mean@1"] == pytest.approx(1 / 3)
    assert metrics["val-aux/fake/reward/mean@1"] == pytest.approx(2.0)


def test_total_steps_beyond_the_epochs_are_run(tmp_path):
    with pytest.warns(UserWarning, match="total_training_steps=7 needs 4 epochs of 2 steps"):
        trainer = make_trainer(tmp_path, **{"trainer.total_training_steps": 7})
    trainer.fit()
    assert trainer.global_steps == 7
    assert trainer.actor_rollout_wg.calls.count("update_actor") == 7
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 7
    trainer = make_trainer(tmp_path, **{"trainer.total_epochs": 3})
    trainer.fit()
    assert trainer.global_steps == 6


def test_validation_is_due_before_every_test_freq_and_at_the_end(tmp_path):
    trainer = make_trainer(
        tmp_path,
        **{"trainer.test_freq": 2, "trainer.total_training_steps": 5, "trainer.total_epochs": 5}
        | {"trainer.val_before_train": True, "trainer.log_val_generations": 2},
    )
    trainer.fit()
    calls = [c for c in trainer.actor_rollout_wg.calls if c in ("validate", "update_actor")]
    assert "".join(c[0] for c in calls) == "v" + "uuv" + "uuv" + "uv"
    files = sorted(os.listdir(tmp_path / "val_generations"))
    assert files == ["0.jsonl", "2.jsonl", "4.jsonl", "5.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "val_generations" / "5.jsonl").read_text().splitlines()]
    assert [line["input"] for line in lines] == ["10 5", "11 5"]
    assert [line["output"] for line in lines] == ["7", "7 7"]


def test_val_only_trains_nothing(tmp_path):
    trainer = make_trainer(tmp_path, **{"trainer.val_before_train": True, "trainer.val_only": True})
    assert "val-core/fake/acc/mean@1" in trainer.fit()
    assert "update_actor" not in trainer.actor_rollout_wg.calls


def _prompts_trained(trainer):
    return [sorted(set(update["prompts"][:, 2].tolist())) for update in trainer.actor_rollout_wg.updates]


def test_resumed_run_sees_the_prompts_the_whole_run_would_have_seen(tmp_path):
    whole = make_trainer(tmp_path / "whole", **{"trainer.total_epochs": 3})
    whole.fit()
    settings = {"trainer.save_freq": 3, "trainer.max_actor_ckpt_to_keep": 1}
    first = make_trainer(tmp_path / "run", **settings, **{"trainer.total_training_steps": 3, "trainer.total_epochs": 2})
    first.fit()
    second = make_trainer(tmp_path / "run", **settings, **{"trainer.total_epochs": 3})
    second.fit()
    assert ("load", "3") in second.actor_rollout_wg.calls
    assert _prompts_trained(first) + _prompts_trained(second) == _prompts_trained(whole)
    assert second.checkpoints.steps() == [6]
    # Everything is done: a third run does nothing.
    third = make_trainer(tmp_path / "run", **settings, **{"trainer.total_epochs": 3})
    third.fit()
    assert third.actor_rollout_wg.updates == []


def test_save_that_raises_keeps_the_old_checkpoint(tmp_path):
    settings = {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1, "trainer.total_training_steps": 1}
    make_trainer(tmp_path, **settings).fit()
    group = FakeWorkerGroup()
    group.fail_on_save = True
    with pytest.raises(OSError, match="disk full"):
        make_trainer(tmp_path, group=group, **settings | {"trainer.total_training_steps": 2}).fit()
    assert (tmp_path / MARKER).read_text() == "1"
    resumed = make_trainer(tmp_path, **settings | {"trainer.total_training_steps": 2})
    resumed.fit()
    assert ("load", "1") in resumed.actor_rollout_wg.calls
    assert resumed.checkpoints.steps() == [2]


def test_hf_export_follows_save_contents(tmp_path):
    settings = {"trainer.save_freq": 1, "trainer.total_training_steps": 1}
    make_trainer(tmp_path / "a", **settings).fit()
    assert not (tmp_path / "a/global_step_1/actor/huggingface").exists()
    contents = {"actor_rollout_ref.actor.checkpoint.save_contents": ["model", "hf_model"]}
    make_trainer(tmp_path / "b", **settings, **contents).fit()
    assert (tmp_path / "b/global_step_1/actor/huggingface").is_dir()


def test_compute_advantage_groups_by_uid():
    data = DataProto.from_dict(
        {"token_level_rewards": torch.tensor([[1.0], [0.0], [0.0], [1.0]]), "response_mask": torch.ones(4, 1)},
        non_tensors={"uid": np.array(["a", "b", "a", "b"], dtype=object)},
    )
    compute_advantage(data, "grpo", {"norm_adv_by_std_in_grpo": False})
    assert data.batch["advantages"].flatten().tolist() == [0.5, -0.5, -0.5, 0.5]
    with pytest.raises(ValueError, match="grpo"):
        compute_advantage(data, "grpoo")


def test_adaptive_kl_coefficient_moves_after_it_was_used():
    from verl.algos.kl import AdaptiveKLController

    ctrl = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.25, horizon=10)
    data = DataProto.from_dict(
        {
            "token_level_scores": torch.zeros(2, 1),
            "old_log_probs": torch.full((2, 1), -1.0),
            "ref_log_prob": torch.full((2, 1), -1.5),
            "response_mask": torch.ones(2, 1),
        }
    )
    _, metrics = apply_kl_penalty(data, ctrl)
    assert torch.allclose(data.batch["token_level_rewards"], torch.full((2, 1), -0.05))
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)
    assert ctrl.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
