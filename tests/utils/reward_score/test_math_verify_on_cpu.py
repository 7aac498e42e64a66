# SPDX-License-Identifier: Apache-2.0
"""Mathematics answers: where they are found, and when two of them are the same."""

import time

import pytest

from verl.utils.reward_score import MissingPackageError, default_compute_score, math_verify, missing_package


@pytest.fixture(scope="module", autouse=True)
def one_process():
    yield
    if math_verify._process is not None:
        math_verify._process.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{", None),
        ("42", None),
    ],
)
def test_the_last_whole_box_is_the_answer(text, answer):
    assert math_verify.extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 3\nno.\nAnswer: 4", "4"),
        ("answer:  $5$.", "5"),
        (r"Answer: \boxed{6} \boxed{7}", "7"),
        (r"it is \boxed{8}", "8"),
        ("9", None),
    ],
)
def test_the_last_answer_line_goes_before_a_box(text, answer):
    assert math_verify.extract_answer_line(text) == answer


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac12", "1/2", True),
        ("1+x^2", "x^2 + 1", True),
        ("1-x^2", "x^2 + 1", False),
        ("10000", "10,000", True),
        ("3, 2, 1", "1,2,3", True),
        ("(1,2)", "[1,2]", False),
        (r"\text{Tuesday}", "Tuesday", True),
        ("Monday", r"\text{Tuesday}", False),
        (r"50\%", r"50\%", True),
        ("70", 70, True),
        ("71", 70, False),
        ("7", r"\boxed{7}", True),
        ("1" * 2000, "1" * 2000, False),
        ("", "", False),
    ],
)
def test_equal_as_mathematics(answer, truth, same):
    assert math_verify.is_same(answer, truth) is same


@pytest.mark.parametrize("source", ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"])
def test_math_wants_a_box(source):
    assert default_compute_score(source, r"thus \boxed{0.5}", r"\frac{1}{2}") == 1.0
    assert default_compute_score(source, r"thus \boxed{0.6}", r"\frac{1}{2}") == 0.0
    assert default_compute_score(source, "thus 0.5", r"\frac{1}{2}") == 0.0


@pytest.mark.parametrize("source", ["math_dapo", "aime2024", "aime_2025"])
def test_dapo_scores_are_plus_and_minus_one_with_the_answer(source):
    assert default_compute_score(source, "Answer: 34", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert default_compute_score(source, "Answer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert default_compute_score(source, "34", "34") == {"score": -1.0, "acc": False, "pred": ""}


def test_an_expression_without_end_is_wrong_after_the_limit_and_the_next_one_is_compared(monkeypatch):
    assert math_verify.is_same("0.5", r"\frac{1}{2}")
    monkeypatch.setattr(math_verify, "COMPARE_TIMEOUT_S", 1.0)
    start = time.monotonic()
    assert not math_verify.is_same("10^{10^{10^{10}}}", "10")
    assert time.monotonic() - start < 5
    monkeypatch.undo()
    assert math_verify.is_same("0.25", r"\frac{1}{4}")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(math_verify, "is_installed", lambda: False)
    assert missing_package("lighteval/MATH") == missing_package("aime24") == "math-verify"
    assert missing_package("arithmetic") is None
    with pytest.raises(MissingPackageError, match="pip install math-verify"):
        default_compute_score("lighteval/MATH", r"\boxed{0.5}", "1/2")
