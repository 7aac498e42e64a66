# SPDX-License-Identifier: Apache-2.0
"""Score of GSM8K (Cobbe et al., 2021, arXiv:2110.14168): the final number, marked by `####` in the source's answers."""

import re
from decimal import Decimal, InvalidOperation

__all__ = ["compute_score", "extract_solution"]

_NUMBER = r"\$?[-+]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED_NUMBER = re.compile(rf"####[ \t]*({_NUMBER})")
_ANY_NUMBER = re.compile(_NUMBER)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final number of a response, without thousands separators and dollar sign.

    Args:
        solution_str: the response.
        method: "strict" takes the last number right behind a `####`, "flexible" the last number anywhere.

    Returns:
        The number as text, or None if there is none.

    Raises:
        ValueError: an unknown method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown; choose strict or flexible")
    found = (_MARKED_NUMBER if method == "strict" else _ANY_NUMBER).findall(solution_str)
    return found[-1].replace(",", "").replace("$", "") if found else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    extra_info: dict | None = None,
) -> float:
    """Compare the response's final number with the right one, as numbers: 72, 72.0 and 72. are equal.

    Args:
        solution_str: the response.
        ground_truth: the right number as text; commas are allowed.
        method: how the number is found, see `extract_solution`.
        format_score: score of a wrong number.
        score: score of the right number.
        extra_info: not used; every rule is given it.

    Returns:
        `score`, `format_score`, or 0.0 when there is no number.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _number(answer) == _number(str(ground_truth)) else format_score


def _number(text: str) -> Decimal | str:
    try:
        return Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return text
