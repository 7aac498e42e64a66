# SPDX-License-Identifier: Apache-2.0
"""The reward manager for score functions that compute for long: each response in a process of a pool."""

from typing import ClassVar

from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register

__all__ = ["PrimeRewardManager"]


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """As `NaiveRewardManager`, with processes as the default: a call that takes too long is killed with its process.

    Args:
        **reward_kwargs: as `NaiveRewardManager`; `num_workers` is by default the number of cores but one.
    """

    name: ClassVar[str] = "prime"
