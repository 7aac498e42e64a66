# SPDX-License-Identifier: Apache-2.0
"""The plain reward manager: one call of the score function for each response."""

from collections.abc import Callable
from typing import Any, ClassVar

from verl.utils.scorer import Scorer
from verl.utils.timed_process import Outcome
from verl.workers.config.reward import read_reward_kwargs
from verl.workers.reward_manager.base import RewardManager
from verl.workers.reward_manager.registry import register

__all__ = ["NaiveRewardManager"]


@register("naive")
class NaiveRewardManager(RewardManager):
    """Scores each response by itself, within a time limit; see `RewardManager`.

    Args:
        tokenizer, num_examine, compute_score, reward_fn_key: see `RewardManager`.
        **reward_kwargs: what `reward.reward_kwargs` holds: `timeout`, `num_workers`, `executor`; see `ScoringConfig`.

    Raises:
        ValueError: an unknown reward_kwarg or a bad value.
    """

    name: ClassVar[str] = "naive"

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.options: Any = read_reward_kwargs(self.name, reward_kwargs)
        options = self.options
        self.scorer = Scorer(self.compute_score, options.timeout, options.num_workers, options.executor)

    def _outcomes(self, calls: list[dict[str, Any]]) -> list[Outcome]:
        return self.scorer(calls)

    def _describe_timeout(self) -> str:
        return f"it took longer than reward.reward_kwargs.timeout={self.options.timeout:g} s"
