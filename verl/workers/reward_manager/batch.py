# SPDX-License-Identifier: Apache-2.0
"""The reward manager that hands the whole batch to the score function in one call."""

from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import UnscorableError, default_compute_score
from verl.utils.timed_process import Outcome, call_guarded
from verl.workers.reward_manager.base import RewardManager
from verl.workers.reward_manager.registry import register

__all__ = ["BatchRewardManager"]


@register("batch")
class BatchRewardManager(RewardManager):
    """One call for the batch: `compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=)`, lists of
    length B, which returns B numbers or dicts with `score`.

    A score that is None or not finite costs its row only. If the call raises, all rows have failed, since nothing tells
    which one is to blame.

    Args:
        tokenizer, num_examine, compute_score, reward_fn_key: see `RewardManager`; without a function of the user's the
            built-in rules score one row after the other.
        **reward_kwargs: what `reward.reward_kwargs` holds, handed to the score function.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def _outcomes(self, calls: list[dict[str, Any]]) -> list[Outcome]:
        if self.compute_score is default_compute_score:
            return [call_guarded(default_compute_score, call | self.reward_kwargs) for call in calls]
        columns = {f"{name}s": [call[name] for call in calls] for name in calls[0]} if calls else {}
        whole = call_guarded(self.compute_score, columns | self.reward_kwargs)
        if whole.error is not None:
            if isinstance(whole.error, UnscorableError):
                raise whole.error
            return [whole] * len(calls)
        try:
            values = list(whole.value)
        except TypeError:
            values = None
        if values is None or len(values) != len(calls):
            returned = f"{len(values)} values" if values is not None else f"a {type(whole.value).__name__}"
            raise ValueError(
                f"reward.reward_manager.name='batch': the score function returned {returned} for {len(calls)} "
                "responses; it must return a list with one score for each"
            )
        return [Outcome(value=value) for value in values]
