# SPDX-License-Identifier: Apache-2.0
"""Score of mathematics answers by the package math-verify: equal as mathematics, not as text.

Two ways to give the answer: the last ``\\boxed{...}`` (the MATH data, Hendrycks et al. 2021, arXiv:2103.03874), or the
last line with ``Answer: ...`` (the prompt of the DAPO data, arXiv:2503.14476).
"""

import logging
import multiprocessing
import re
import threading
from importlib.util import find_spec
from typing import Any

from verl.utils.reward_score.errors import MissingPackageError
from verl.utils.timed_process import TimedProcess

__all__ = [
    "PACKAGE",
    "compute_dapo_score",
    "compute_score",
    "extract_answer_line",
    "extract_boxed",
    "is_installed",
    "is_same",
]

PACKAGE = "math-verify"

# Seconds to compare one pair. Most take milliseconds; 10^{10^{10}} takes for ever.
COMPARE_TIMEOUT_S = 10.0
# An answer longer than this is no answer, and parsing it would be slow.
MAX_ANSWER_CHARS = 1000

_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")

_lock = threading.Lock()
_process: TimedProcess | None = None


def is_installed() -> bool:
    """Whether math-verify can be imported; it is not imported."""
    return find_spec("math_verify") is not None


def extract_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` (or ``\\fbox{...}``) whose braces are balanced, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            # An escaped brace is a character of the answer.
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
                if depth == 0:
                    return text[start:i].strip()
    return None


def extract_answer_line(text: str) -> str | None:
    """What stands behind the last ``Answer:``; a box in it, or else anywhere in the text, is opened."""
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return extract_boxed(text)
    return extract_boxed(lines[-1]) or lines[-1].strip().strip("$").rstrip(".").strip("$ ")


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 if the last boxed expression equals the ground truth, else 0.0; a response without a box is not right.

    Args:
        solution_str: the response.
        ground_truth: the right answer in LaTeX or as a number, with or without its box.
        extra_info: not used; every rule is given it.

    Raises:
        MissingPackageError: math-verify is not installed.
    """
    answer = extract_boxed(solution_str)
    return float(answer is not None and is_same(answer, ground_truth))


def compute_dapo_score(solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> dict[str, Any]:
    """`score` 1.0 or -1.0, `acc` (whether it is right) and `pred` (the answer found, "" for none).

    Args, Raises: as `compute_score`; the answer is found by `extract_answer_line`.
    """
    answer = extract_answer_line(solution_str)
    right = answer is not None and is_same(answer, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or ""}


def is_same(answer: str, truth: Any) -> bool:
    """Whether two expressions in LaTeX are equal as mathematics; what cannot be compared within 10 s is not.

    Raises:
        MissingPackageError: math-verify is not installed.
    """
    truth = str(truth)
    truth = extract_boxed(truth) or truth
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    if _plain(answer) == _plain(truth):
        return True
    if not is_installed():
        raise MissingPackageError(f"mathematics answers are compared by {PACKAGE}: pip install {PACKAGE}")
    if multiprocessing.parent_process() is not None:
        # A process that a reward manager started: it is killed when late, and may not start others.
        return _compare(truth, answer)
    global _process
    with _lock:
        if _process is None:
            _process = TimedProcess(_compare)
        outcome = _process.call({"truth": truth, "answer": answer}, COMPARE_TIMEOUT_S)
    return bool(outcome.value)


def _plain(text: str) -> str:
    """The text without what does not change its meaning."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", re.sub(r"[\s$]|\\[,;!]|\\left|\\right", "", text)).strip()


def _compare(truth: str, answer: str) -> bool:
    from math_verify import parse, verify

    # It warns, at every call, that its own limit is off. That limit needs signals, and so the main thread.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
    return bool(verify(*parsed, timeout_seconds=None))
