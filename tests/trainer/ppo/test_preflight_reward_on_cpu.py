# SPDX-License-Identifier: Apache-2.0
"""Score functions of the user's own that cannot be called as they will be, found without running the file."""

from pathlib import Path

import pytest

from verl.trainer.ppo.preflight_files import check_reward_file

KEY = "reward.custom_reward_function"
FOUR = "data_source, solution_str, ground_truth, extra_info"


def problems(file: Path, text: str, manager: str = "naive", **node: object) -> list[str]:
    file.write_text(text)
    return check_reward_file({"path": str(file), "name": "compute_score", "reward_kwargs": {}} | node, KEY, manager)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("def compute_score(data_source, solution_str, ground_truth, extra_info=None): pass", {}),
        ("def compute_score(**kwargs): pass", {"reward_kwargs": {"scale": 2}}),
        ("def compute_score(solution_str, *args, **kwargs): pass", {}),
        (f"def compute_score({FOUR}, *, scale): pass", {"reward_kwargs": {"scale": 2}}),
        ("def compute_score(data_sources, solution_strs, ground_truths, extra_infos): pass", {"manager": "batch"}),
        ("from elsewhere import compute_score", {}),
        ("from elsewhere import *", {}),
        ("compute_score = make()", {}),
        ("class compute_score: pass", {}),
        ("@wrapped\ndef compute_score(): pass", {}),
        ("if True:\n    def compute_score(): pass", {}),
    ],
)
def test_what_may_work_is_not_refused(tmp_path: Path, text: str, node: dict) -> None:
    assert problems(tmp_path / "score.py", text, **node) == []


@pytest.mark.parametrize(
    ("text", "node", "words"),
    [
        ("def compute_score(): pass", {}, "does not take data_source, solution_str, ground_truth, extra_info"),
        ("def compute_score(data_source, solution_str, ground_truth): pass", {}, "does not take extra_info;"),
        (
            f"def compute_score({FOUR}): pass",
            {"manager": "batch"},
            "does not take data_sources",
        ),
        (
            f"def compute_score({FOUR}): pass",
            {"reward_kwargs": {"scale": 2}},
            "does not take scale",
        ),
        (
            "def compute_score(strength, **kwargs): pass",
            {},
            "needs strength, which nobody gives; give a default, or set",
        ),
        ("def compute_score(*, strength, **kwargs): pass", {}, "needs strength"),
        ("def compute_score(**kwargs): pass", {"reward_kwargs": {"solution_str": 1}}, "solution_str is given"),
        ("def score(**kwargs): pass", {}, "name=compute_score is not defined"),
        ("def compute_scores(**kwargs): pass", {}, "Did you mean compute_scores?"),
        ("def compute_score(**kwargs): pass", {"name": None}, "name=None must name a function"),
        ("def compute_score(**kwargs): pass", {"name": ""}, "name='' must name a function"),
        ("def compute_score(:", {}, "is not a Python file: "),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(tmp_path: Path, text: str, node: dict, words: str) -> None:
    (found,) = problems(tmp_path / "score.py", text, **node)
    assert found.startswith(KEY) and words in found, found


def test_files_that_are_no_python(tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "score.txt", "hello")
    assert "is not a Python file; its name must end in .py" in found
    (found,) = problems(tmp_path / "score.py", "", path=str(tmp_path))
    assert "is a folder; name the .py file in it" in found
    (found,) = problems(tmp_path / "score.py", "", path=str(tmp_path / "scor.py"))
    assert "does not exist. Did you mean score.py?" in found
