# SPDX-License-Identifier: Apache-2.0
"""Rule-based scores and how they are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.reward_score import default_compute_score, gsm8k, is_known_data_source, known_data_sources

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("so #### 72", "72", True),
        ("#### 71 no, #### 72", "72", True),
        ("#### 72 no, #### 71", "72", False),
        ("#### 1,234", "1234", True),
        ("#### 1234", "1,234", True),
        ("#### -5", "-5", True),
        ("#### 5", "-5", False),
        ("#### 72.", "72", True),
        ("#### 72.00", "72", True),
        ("#### 72.5", "72", False),
        ("#### $18", "18", True),
        ("#### -$18", "-18", True),
        ("#### $-18", "-18", True),
        ("the answer is 72", "72", False),
        ("#### seventy-two", "72", False),
        ("", "72", False),
    ],
)
def test_gsm8k_strict(response, truth, right):
    assert default_compute_score("openai/gsm8k", response, truth) == float(right)


def test_gsm8k_flexible_takes_the_last_number_anywhere():
    assert gsm8k.compute_score("first 71, then 72 apples.", "72", method="flexible") == 1.0
    assert gsm8k.compute_score("first 72, then 71 apples.", "72", method="flexible") == 0.0
    with pytest.raises(ValueError, match="method='lax'"):
        gsm8k.compute_score("72", "72", method="lax")


def test_gsm8k_format_score_is_for_a_marked_wrong_number_only():
    assert gsm8k.compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("71", "72", format_score=0.1) == 0.0


def test_gsm8k_scores_every_real_worked_answer_as_right_and_its_neighbour_as_wrong():
    rows = [json.loads(line) for file in sorted(GSM8K.glob("*.jsonl")) for line in file.open(encoding="utf-8")]
    assert len(rows) == 300
    for row in rows:
        truth = row["answer"].split("#### ")[1].replace(",", "")
        assert gsm8k.compute_score(row["answer"], truth) == 1.0
        assert gsm8k.compute_score(row["answer"], str(int(truth) + 1)) == 0.0


@pytest.mark.parametrize(
    ("response", "extra_info", "score"),
    [
        ("240", {"finished": True}, 1.0),
        ("240", {"finished": False}, 0.0),
        ("240", None, 1.0),
        ("042", {"finished": True}, 0.0),
        ("2400", {"finished": True}, 0.0),
        (" 240", {"finished": True}, 0.0),
        ("", {"finished": True}, 0.0),
    ],
)
def test_arithmetic_wants_the_exact_answer_and_its_end(response, extra_info, score):
    assert default_compute_score("arithmetic", response, "240", extra_info) == score


@pytest.mark.parametrize("source", ["", "gsm8k", "lighteval/MATHS", "aim"])
def test_unknown_data_source_names_itself_the_known_ones_and_the_key(source):
    assert not is_known_data_source(source)
    with pytest.raises(ValueError) as caught:
        default_compute_score(source, "1", "1")
    assert isinstance(caught.value, NotImplementedError)  # what verl raises, so callers may catch either
    for part in (f"data_source={source!r}", *known_data_sources(), "reward.custom_reward_function.path"):
        assert part in str(caught.value)


def test_known_data_sources_are_scored():
    assert {"arithmetic", "openai/gsm8k", "lighteval/MATH", "math_dapo", "aime*"} <= set(known_data_sources())
    for name in known_data_sources():
        score = default_compute_score(name, "x", "1")
        assert is_known_data_source(name)
        assert score in (0.0, {"score": -1.0, "acc": False, "pred": ""})


def test_the_list_of_data_sources_needs_no_torch():
    code = (
        "import sys; from verl.utils.reward_score import known_data_sources as k; k(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
