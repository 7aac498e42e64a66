# SPDX-License-Identifier: Apache-2.0
"""Reward managers: what turns generated responses into token-level scores."""

from verl.workers.reward_manager.base import RewardManager
from verl.workers.reward_manager.batch import BatchRewardManager
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RewardManager",
    "get_reward_manager_cls",
    "register",
]
