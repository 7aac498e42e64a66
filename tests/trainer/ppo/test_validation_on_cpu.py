# SPDX-License-Identifier: Apache-2.0
"""Validation with rows that cannot be scored: names of the log stay, failures are counted."""

from tests.trainer.ppo.fakes import FakeWorkerGroup, Prompts, Tokenizer, collate
from verl.trainer.ppo.validation import validate
from verl.workers.reward_manager import NaiveRewardManager


def graded(ground_truth, **_):
    return {"score": 1.0, "acc": True, "steps": 4}


def failing(ground_truth, **_):
    if ground_truth in ("1", "4"):
        raise RuntimeError("no score today")
    if ground_truth == "3":  # the whole second batch has no further values
        return 1.0
    return graded(ground_truth)


def run(score):
    rows = Prompts(5)
    batches = [collate([rows[i] for i in chosen]) for chosen in ((0, 1, 2), (3, 4))]
    manager = NaiveRewardManager(Tokenizer(), compute_score=score)
    return validate(FakeWorkerGroup(1), batches, manager, {}, n=2)


def test_rows_without_a_score_are_counted_and_change_no_name():
    (whole, _), (partial, columns) = run(graded), run(failing)
    assert partial.keys() == whole.keys()
    assert whole["val-core/fake/acc/mean@2"] == 1.0 and whole["val-aux/reward/num_failures"] == 0.0
    assert partial["val-core/fake/acc/mean@2"] == 2 / 3  # prompts 0, 1, 2; prompts 3 and 4 have no acc
    assert partial["val-aux/fake/reward/mean@2"] == 3 / 5
    assert partial["val-aux/fake/steps/mean@2"] == 4.0
    assert partial["val-aux/reward/num_failures"] == 4.0 and partial["val-aux/reward/failed_share"] == 0.4
    assert partial["val-aux/reward/num_timeouts"] == 0.0
    assert columns["acc"] == [True, True, 0.0, 0.0, True, True] + [None] * 4
    assert {len(values) for values in columns.values()} == {10}


def test_a_source_that_reports_no_accuracy_gets_none_by_a_failure():
    rows = [dict(Prompts(3)[i], data_source=source) for i, source in enumerate(("with", "without", "without"))]

    def score(data_source, ground_truth, **_):
        if ground_truth == "2":
            raise RuntimeError("no score today")
        return {"score": 1.0, "acc": 1.0} if data_source == "with" else 1.0

    manager = NaiveRewardManager(Tokenizer(), compute_score=score)
    metrics, _ = validate(FakeWorkerGroup(1), [collate(rows)], manager, {}, n=1)
    assert metrics["val-core/with/acc/mean@1"] == 1.0
    assert metrics["val-core/without/reward/mean@1"] == 0.5
    assert not any(name.startswith(("val-core/without/acc", "val-aux/without/acc")) for name in metrics)
