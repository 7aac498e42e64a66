# SPDX-License-Identifier: Apache-2.0
import time

import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    PhaseTimer,
    compute_data_metrics,
    compute_rollout_gap_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    flatten_validation_metrics,
    process_validation_metrics,
)


def _batch(**columns):
    tensors = {
        "responses": torch.zeros(2, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]]),
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.5], [0.5, 0.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 99.0, 3.0], [-1.0, 99.0, 99.0]]),
        "returns": torch.tensor([[1.0, 99.0, 3.0], [-1.0, 99.0, 99.0]]),
    }
    return DataProto.from_dict(tensors | columns)


def test_data_metrics_count_real_tokens_and_leave_masked_ones_out():
    metrics = compute_data_metrics(_batch())
    assert metrics["critic/score/mean"] == 1.5 and metrics["critic/score/max"] == 2.0
    assert metrics["critic/rewards/mean"] == 1.0 and metrics["critic/rewards/min"] == 0.5
    assert metrics["critic/advantages/mean"] == 1.0 and metrics["critic/advantages/max"] == 3.0
    assert metrics["response_length/mean"] == 2.0 and metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/mean"] == 2.5 and metrics["prompt_length/max"] == 3.0
    assert metrics["response/trained_tokens"] == 3.0
    assert all(type(value) is float for value in metrics.values())


def test_a_batch_without_a_trained_token_has_no_advantage_metrics():
    metrics = compute_data_metrics(_batch(response_mask=torch.zeros(2, 3)))
    assert not any(key.startswith("critic/advantages") for key in metrics)
    assert metrics["critic/score/mean"] == 1.5


def test_rollout_gap_is_measured_on_probabilities_of_trained_tokens():
    assert compute_rollout_gap_metrics(_batch()) == {}
    old = torch.log(torch.tensor([[0.5, 0.1, 0.5], [0.25, 0.1, 0.1]]))
    new = torch.log(torch.tensor([[0.5, 0.9, 0.2], [0.25, 0.9, 0.9]]))
    metrics = compute_rollout_gap_metrics(_batch(old_log_probs=old, rollout_log_probs=new))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.3)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1)


def test_throughput_is_per_device_and_step_time():
    timer = PhaseTimer()
    timer.seconds = {"step": 2.0, "testing": 100.0}
    metrics = compute_throughout_metrics(_batch(), timer, n_gpus=3)
    assert metrics["perf/total_num_tokens"] == 9.0
    assert metrics["perf/throughput"] == pytest.approx(9 / (2 * 3))


def test_controller_time_is_the_step_without_the_work_of_the_workers():
    timer = PhaseTimer()
    with timer.phase("step"):
        with timer.worker_call("gen"):
            time.sleep(0.03)
        with timer.worker_call("update_actor") as reported:
            reported.append(0.01)
            time.sleep(0.03)
        with timer.phase("adv"):
            time.sleep(0.02)
    metrics = compute_timing_metrics(timer)
    # 0.08 in all, of which 0.03 (unreported wait) and 0.01 (report) were work.
    assert 0.035 < metrics["timing_s/controller"] < metrics["timing_s/step"] - 0.035
    assert metrics["timing_s/gen"] >= 0.03 and metrics["timing_s/adv"] >= 0.02


def test_a_report_longer_than_the_wait_is_cut():
    timer = PhaseTimer()
    with timer.phase("step"), timer.worker_call("gen") as reported:
        reported.append(1000.0)
    assert compute_timing_metrics(timer)["timing_s/controller"] < 1.0
    assert timer.worker_seconds < 1.0


def test_validation_averages_samples_before_prompts_and_sources_apart():
    by_source = process_validation_metrics(
        ["a", "a", "a", "a", "b"],
        ["p", "p", "q", "q", "p"],
        {"reward": [1, 0, 1, 1, 0.25], "text": ["x"] * 5, "partial": [1.0]},
    )
    assert set(by_source) == {"a", "b"}
    assert by_source["a"]["reward"] == {
        "mean@2": 0.75,
        "std@2": pytest.approx(0.5**0.5 / 2),
        "best@2": 1.0,
        "worst@2": 0.5,
    }
    assert by_source["b"] == {"reward": {"mean@1": 0.25}}


def test_a_row_without_a_value_changes_no_name_and_no_other_row():
    def numbers(acc):
        return process_validation_metrics(list("aaab"), ["p", "p", "q", "p"], {"reward": [1, 0, 1, 1], "acc": acc})

    whole, partial = numbers([1, 0, 1, None]), numbers([1, None, None, None])
    assert partial["a"].keys() == whole["a"].keys() and partial["a"]["acc"].keys() == whole["a"]["acc"].keys()
    assert partial["a"]["acc"]["mean@2"] == 1.0 and whole["a"]["acc"]["mean@2"] == 0.75
    assert set(whole["b"]) == {"reward"}
    assert set(numbers([None] * 4)["a"]) == {"reward"}


def test_accuracy_is_the_core_number_where_it_is_reported():
    flat = flatten_validation_metrics(
        {"a": {"reward": {"mean@1": 0.1}, "acc": {"mean@1": 0.2}}, "b": {"reward": {"mean@2": 0.3, "std@2": 0.4}}}
    )
    assert flat == {
        "val-aux/a/reward/mean@1": 0.1,
        "val-core/a/acc/mean@1": 0.2,
        "val-core/b/reward/mean@2": 0.3,
        "val-aux/b/reward/std@2": 0.4,
    }
