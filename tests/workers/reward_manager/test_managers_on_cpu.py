# SPDX-License-Identifier: Apache-2.0
"""Time limits, threads and processes, the overlong penalty, whole batches; failures cost their rows only."""

import functools
import logging
import os
import threading
import time

import pytest
import torch

from tests.workers.reward_manager.functions import busy, coded
from tests.workers.reward_manager.test_naive_on_cpu import TOKENIZER, make_batch, make_config
from verl.trainer.ppo.reward import compute_reward, load_reward_manager, reward_metrics
from verl.utils.reward_score import AllRowsFailedError, UnscorableError
from verl.workers.reward_manager import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    get_reward_manager_cls,
)
from verl.workers.reward_manager.dapo import overlong_penalty


def slow(solution_str, **_):
    time.sleep(0.1 if solution_str == "1" else 30)
    return 1.0


@pytest.fixture
def prime():
    manager = PrimeRewardManager(TOKENIZER, compute_score=coded, timeout=20, num_workers=2)
    yield manager
    manager.scorer.close()


def test_the_four_managers_are_found_by_name_and_an_unknown_one_names_them():
    for name in ("naive", "dapo", "batch", "prime"):
        assert type(load_reward_manager(make_config(reward_manager={"name": name}), TOKENIZER)) is (
            get_reward_manager_cls(name)
        )
    with pytest.raises(ValueError, match="name='primer' is unknown; known are batch, dapo, naive, prime"):
        load_reward_manager(make_config(reward_manager={"name": "primer"}), TOKENIZER)


@pytest.mark.parametrize("cls", [NaiveRewardManager, DAPORewardManager])
def test_a_slow_score_costs_its_row_and_is_logged_with_limit_and_row(caplog, cls):
    manager = cls(TOKENIZER, compute_score=slow, timeout=1.5)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        reward = manager(make_batch(["1", "2", "1", "2"]))
    assert time.monotonic() - start < 25
    assert reward[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert reward_metrics(manager) == {
        "reward/num_failures": 0.0,
        "reward/num_timeouts": 2.0,
        "reward/failed_share": 0.5,
    }
    assert "row 1" in caplog.text and "row 3" in caplog.text and "reward.reward_kwargs.timeout=1.5" in caplog.text


def test_a_time_limit_is_there_without_being_asked_for_and_null_takes_it_away():
    assert NaiveRewardManager(TOKENIZER).scorer.timeout == 300
    seen = []
    manager = NaiveRewardManager(
        TOKENIZER, compute_score=lambda **_: seen.append(threading.current_thread()) or 1.0, timeout=None
    )
    manager(make_batch(["1"]))
    assert seen == [threading.main_thread()]


def test_threads_score_side_by_side_and_keep_the_order():
    barrier = threading.Barrier(4)

    def score(solution_str, **_):
        barrier.wait(timeout=10)  # passes only if four calls run at the same time
        time.sleep(0.05 * (4 - int(solution_str)))
        return int(solution_str)

    reward = NaiveRewardManager(TOKENIZER, compute_score=score, num_workers=4)(make_batch(["0", "1", "2", "3"]))
    assert reward[:, 0].tolist() == [0, 1, 2, 3]


def test_processes_keep_order_and_extra_values_and_a_failure_costs_its_row(prime, caplog):
    # 0.5 as a dict, a raise, a killed process, not a number, and plain numbers.
    texts = ["1", "4", "7", "6", "5", "4", "2"]
    with caplog.at_level(logging.WARNING):
        reward, extra = compute_reward(make_batch(texts), prime)
    assert reward[:, 0].tolist() == [1.0, 0.5, 0.0, 0.0, 0.0, 0.5, 2.0]
    assert extra["index"] == [None, 1, None, None, None, 5, None]
    processes = {pid for pid in extra["process"] if pid is not None}
    assert processes and os.getpid() not in processes
    assert reward_metrics(prime) == {
        "reward/num_failures": 3.0,
        "reward/num_timeouts": 0.0,
        "reward/failed_share": 3 / 7,
    }
    for part in ("row 2", "boom", "row 3", "exit code 7", "row 4"):
        assert part in caplog.text
    # The pool is whole again.
    assert prime(make_batch(["3", "3", "3"]))[:, 0].tolist() == [3.0] * 3


def test_a_process_that_computes_for_ever_is_killed():
    manager = PrimeRewardManager(TOKENIZER, compute_score=busy, timeout=3.0, num_workers=1)
    assert manager(make_batch(["1"])).sum() == 1.0
    start = time.monotonic()
    assert manager(make_batch(["1", "+", "2"]))[:, 0].tolist() == [1.0, 0.0, 2.0]
    assert time.monotonic() - start < 25
    assert manager.metrics["reward/num_timeouts"] == 1.0
    manager.scorer.close()


def test_a_custom_function_from_a_file_goes_to_the_processes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(solution_str, bonus, **_):\n    return len(solution_str) + bonus\n")
    custom = {"path": str(path), "name": "compute_score", "reward_kwargs": {"bonus": 0.25}}
    config = make_config(
        reward_manager={"name": "prime"}, reward_kwargs={"num_workers": 1}, custom_reward_function=custom
    )
    manager = load_reward_manager(config, TOKENIZER)
    assert manager(make_batch(["24"]))[0].tolist() == [0, 2.25, 0, 0, 0, 0]
    manager.scorer.close()


def test_a_function_that_cannot_go_to_a_process_is_refused_at_the_start():
    with pytest.raises(ValueError, match="top level of a file"):
        PrimeRewardManager(TOKENIZER, compute_score=lambda **_: 1.0)


@pytest.mark.parametrize("name", ["naive", "dapo", "batch", "prime"])
def test_an_unknown_data_source_stops_every_manager(name):
    kwargs = {"num_workers": 1} if name == "prime" else {}
    manager = get_reward_manager_cls(name)(TOKENIZER, **kwargs)
    with pytest.raises(UnscorableError, match="data_source='nowhere'"):
        manager(make_batch(["1"], source="nowhere"))
    if name == "prime":
        manager.scorer.close()


def test_overlong_penalty_is_equation_13():
    # Buffer of 4 before 10: lengths up to 6 are free, then a quarter more for each token.
    values = [overlong_penalty(length, 10, 4, 2.0) for length in (0, 6, 7, 8, 10, 12)]
    assert values == [0, 0, -0.5, -1.0, -2.0, -2.0]


def test_dapo_adds_the_penalty_to_the_score_and_keeps_the_score():
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True}
    manager = DAPORewardManager(
        TOKENIZER, compute_score=lambda **_: 1.0, max_resp_len=4, overlong_buffer_cfg=buffer, timeout=None
    )
    reward, extra = compute_reward(make_batch(["24", "240", "2402"]), manager)
    assert reward.sum(-1).tolist() == [1.0, 0.75, 0.5]
    assert reward[1, 2] == 0.75
    assert extra["score"] == extra["acc"] == [1.0, 1.0, 1.0]
    assert extra["overlong_reward"] == [0.0, -0.25, -0.5]
    assert extra["overlong"] == [False, True, True]
    assert manager.metrics["reward/num_overlong"] == 2.0


def test_dapo_mixes_numbers_and_dicts_and_keeps_their_own_acc():
    def score(solution_str, **_):
        return {"score": -1.0, "acc": False, "pred": solution_str} if solution_str == "1" else 1.0

    _, extra = compute_reward(make_batch(["1", "2"]), DAPORewardManager(TOKENIZER, compute_score=score))
    assert extra == {"score": [-1.0, 1.0], "acc": [False, 1.0], "pred": ["1", None]}


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"overlong_buffer_cfg": None},
        {"overlong_buffer_cfg": {"enable": False}},
        {"overlong_buffer_cfg": {"enable": False, "len": 0}, "max_resp_len": None},
        {"overlong_buffer_cfg": {"enable": False, "len": 9, "penalty_factor": -1.0}, "max_resp_len": 1},
    ],
)
def test_a_penalty_that_is_off_requires_nothing(kwargs):
    manager = DAPORewardManager(TOKENIZER, compute_score=lambda **_: 1.0, **kwargs)
    assert torch.equal(manager(make_batch(["240402"])), torch.tensor([[0.0, 0, 0, 0, 0, 1]]))


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        ({"len": 0}, r"reward\.reward_kwargs\.overlong_buffer_cfg\.len=0 must be at least 1"),
        ({}, r"overlong_buffer_cfg\.len=None must be at least 1"),
        ({"len": 5}, r"overlong_buffer_cfg\.len=5 is more than max_resp_len=4; use at most 4"),
        ({"len": 2, "penalty_factor": -1.0}, r"penalty_factor=-1 must not be negative"),
        ({"lenn": 2}, r"overlong_buffer_cfg\.lenn .*Did you mean len"),
    ],
)
def test_a_bad_overlong_buffer_is_named(buffer, match):
    with pytest.raises(ValueError, match=match):
        DAPORewardManager(TOKENIZER, max_resp_len=4, overlong_buffer_cfg={"enable": True} | buffer)


def test_dapo_takes_the_longest_response_from_the_data():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0}
    config = make_config(reward_manager={"name": "dapo"}, reward_kwargs={"overlong_buffer_cfg": buffer})
    with pytest.raises(ValueError, match="max_resp_len must be set"):
        load_reward_manager(config, TOKENIZER)
    config.data.max_response_length = 6
    assert load_reward_manager(config, TOKENIZER).options.max_resp_len == 6


def test_batch_gets_lists_and_costs_single_rows(caplog):
    calls = []

    def score(data_sources, solution_strs, ground_truths, extra_infos, bonus):
        calls.append((data_sources, solution_strs, ground_truths, [info["index"] for info in extra_infos]))
        return [1.0 + bonus, {"score": 0.5, "why": "half"}, None]

    manager = BatchRewardManager(TOKENIZER, compute_score=score, bonus=0.25)
    with caplog.at_level(logging.WARNING):
        reward, extra = compute_reward(make_batch(["1", "2", "3"]), manager)
    assert calls == [(["arithmetic"] * 3, ["1", "2", "3"], ["240"] * 3, [0, 1, 2])]
    assert reward[:, 0].tolist() == [1.25, 0.5, 0.0]
    assert extra == {"score": [1.25, 0.5, 0.0], "why": [None, "half", None]}
    assert manager.metrics["reward/num_failures"] == 1.0 and "row 2" in caplog.text


def test_a_batch_of_which_no_row_can_be_scored_stops_the_run_and_a_single_row_does_not(caplog):
    def fail(**_):
        raise RuntimeError("boom")

    words = r"failed on all 3 rows of a batch, first on row 0 \(data_source 'arithmetic'\): RuntimeError\('boom'\)"
    for cls in (NaiveRewardManager, BatchRewardManager, DAPORewardManager):
        with pytest.raises(AllRowsFailedError, match=words) as caught:
            cls(TOKENIZER, compute_score=fail)(make_batch(["1", "2", "3"]))
        assert str(caught.value.__cause__) == "boom"
    with pytest.raises(AllRowsFailedError, match="first on row 0 .*: the score is nan"):
        NaiveRewardManager(TOKENIZER, compute_score=lambda **_: float("nan"))(make_batch(["1", "2"]))
    assert not caplog.records  # one error, not a warning for each row before it
    manager = NaiveRewardManager(TOKENIZER, compute_score=fail)
    assert manager(make_batch(["1"])).sum() == 0 and manager.metrics["reward/failed_share"] == 1.0


def test_batch_with_a_wrong_number_of_scores_is_an_error():
    for value, words in ((lambda **_: [1.0], "returned 1 values for 2 responses"), (lambda **_: 1.0, "a float")):
        with pytest.raises(ValueError, match=words):
            BatchRewardManager(TOKENIZER, compute_score=value)(make_batch(["1", "2"]))


def test_batch_without_a_function_uses_the_built_in_rules():
    assert BatchRewardManager(TOKENIZER)(make_batch(["240<eos>", "1"])).sum(-1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"timeout": 0}, r"reward\.reward_kwargs\.timeout=0 must be above 0"),
        ({"num_workers": 0}, "num_workers=0 must be at least 1"),
        ({"executor": "proces"}, "executor='proces' is not known.*Did you mean 'process'"),
        ({"timeout": "soon"}, "timeout='soon' must be a number"),
    ],
)
def test_bad_options_are_named(kwargs, match):
    with pytest.raises(ValueError, match=match):
        NaiveRewardManager(TOKENIZER, **kwargs)


def test_a_partial_of_a_module_function_goes_to_processes():
    manager = PrimeRewardManager(TOKENIZER, compute_score=functools.partial(busy), num_workers=1)
    assert manager(make_batch(["3"])).sum() == 3.0
    manager.scorer.close()
