# SPDX-License-Identifier: Apache-2.0
"""Rule-based scores, found by a row's `data_source`. Importable without torch."""

from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import arithmetic, gsm8k

__all__ = ["UnknownDataSourceError", "default_compute_score", "is_known_data_source", "known_data_sources"]

_SCORERS: dict[str, Callable[..., float | dict]] = {
    "arithmetic": arithmetic.compute_score,
    "openai/gsm8k": gsm8k.compute_score,
}


class UnknownDataSourceError(ValueError, NotImplementedError):
    """No rule scores this `data_source`."""


def known_data_sources() -> list[str]:
    """The data sources that `default_compute_score` can score, sorted."""
    return sorted(_SCORERS)


def is_known_data_source(name: str) -> bool:
    """Whether `default_compute_score` can score rows of data source `name`."""
    return name in _SCORERS


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
    """
    if not is_known_data_source(data_source):
        raise UnknownDataSourceError(
            f"there is no reward rule for data_source={data_source!r}; known are {', '.join(known_data_sources())}. "
            "Set reward.custom_reward_function.path to a file with your own compute_score function"
        )
    return _SCORERS[data_source](solution_str, ground_truth, extra_info=extra_info, **kwargs)
