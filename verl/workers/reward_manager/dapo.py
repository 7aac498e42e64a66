# SPDX-License-Identifier: Apache-2.0
"""The reward manager of DAPO (arXiv 2503.14476): a soft punishment of overlong responses."""

from typing import Any, ClassVar

from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register

__all__ = ["DAPORewardManager", "overlong_penalty"]


def overlong_penalty(length: int, max_length: int, buffer_length: int, factor: float) -> float:
    """What a response of ``length`` tokens is given for its length (equation 13): 0 up to ``max_length -
    buffer_length``, then falling linearly to ``-factor`` at ``max_length``, and that beyond it."""
    inside = min(max(length - (max_length - buffer_length), 0), buffer_length)
    return -factor * inside / buffer_length if inside else 0.0


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """As `NaiveRewardManager`, and adds the overlong penalty to the score.

    The extra values of a row hold `score` as the score function gave it and `acc` (the same, unless the function
    reports its own), the usual metric of dynamic sampling; with `overlong_buffer_cfg.log` also `overlong_reward` (the
    penalty, at most 0) and `overlong` (whether there is one), and `metrics` counts the overlong rows.

    Args:
        **reward_kwargs: as `NaiveRewardManager`, and `max_resp_len`, `overlong_buffer_cfg`; see `DapoScoringConfig`.
    """

    name: ClassVar[str] = "dapo"

    def _adjust(self, results: list[dict[str, Any]], lengths: list[int]) -> list[float]:
        scores = []
        buffer = self.options.overlong_buffer_cfg
        for result, length in zip(results, lengths, strict=True):
            result.setdefault("acc", result["score"])
            penalty = 0.0
            if buffer is not None and buffer.enable:
                penalty = overlong_penalty(length, self.options.max_resp_len, buffer.len, buffer.penalty_factor)
                if buffer.log:
                    result |= {"overlong_reward": penalty, "overlong": penalty < 0}
            scores.append(result["score"] + penalty)
        if buffer is not None and buffer.enable and buffer.log:
            self.metrics["reward/num_overlong"] = float(sum(result["overlong"] for result in results))
        return scores
