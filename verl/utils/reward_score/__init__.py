# SPDX-License-Identifier: Apache-2.0
"""Rule-based scores, found by a row's `data_source`. Importable without torch."""

from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import arithmetic, gsm8k, math_verify
from verl.utils.reward_score.errors import (
    AllRowsFailedError,
    MissingPackageError,
    UnknownDataSourceError,
    UnscorableError,
)

__all__ = [
    "AllRowsFailedError",
    "MissingPackageError",
    "UnknownDataSourceError",
    "UnscorableError",
    "default_compute_score",
    "is_known_data_source",
    "known_data_sources",
    "missing_package",
]

_BOXED = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)

# A name that ends in * stands for every data source that begins so.
_SCORERS: dict[str, Callable[..., float | dict]] = {
    "arithmetic": arithmetic.compute_score,
    "openai/gsm8k": gsm8k.compute_score,
    "math_dapo": math_verify.compute_dapo_score,
    "math_dapo_reasoning": math_verify.compute_dapo_score,
    "aime*": math_verify.compute_dapo_score,
    **dict.fromkeys(_BOXED, math_verify.compute_score),
}


def known_data_sources() -> list[str]:
    """The data sources that `default_compute_score` can score, sorted; a name ending in * is a prefix."""
    return sorted(_SCORERS)


def _scorer(name: Any) -> Callable[..., float | dict] | None:
    if name in _SCORERS:
        return _SCORERS[name]
    prefixes = (known for known in _SCORERS if known.endswith("*") and str(name).startswith(known[:-1]))
    return next((_SCORERS[known] for known in prefixes), None)


def is_known_data_source(name: str) -> bool:
    """Whether `default_compute_score` can score rows of data source `name`."""
    return _scorer(name) is not None


def missing_package(name: str) -> str | None:
    """The package that the rule of data source `name` needs and that is not installed; None when all is there."""
    needs_math = _scorer(name) in (math_verify.compute_score, math_verify.compute_dapo_score)
    return math_verify.PACKAGE if needs_math and not math_verify.is_installed() else None


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, **kwargs: Any
) -> float | dict:
    """Score one response with the rule of its data source.

    Args:
        data_source: which rule; see `known_data_sources`.
        solution_str: the decoded response, without special tokens.
        ground_truth: the row's `reward_model["ground_truth"]`.
        extra_info: the row's `extra_info`, with what the reward manager adds (`finished`: the response ended with EOS).
        **kwargs: handed to the rule.

    Returns:
        The score, or a dict with `score` and whatever else the rule reports.

    Raises:
        UnknownDataSourceError: (a ValueError and a NotImplementedError) there is no rule for `data_source`.
        MissingPackageError: (a ValueError and an ImportError) the rule's package is not installed.
    """
    scorer = _scorer(data_source)
    if scorer is None:
        raise UnknownDataSourceError(
            f"there is no reward rule for data_source={data_source!r}; known are {', '.join(known_data_sources())}. "
            "Set reward.custom_reward_function.path to a file with your own compute_score function"
        )
    return scorer(solution_str, ground_truth, extra_info=extra_info, **kwargs)
