# SPDX-License-Identifier: Apache-2.0
"""Reward managers: what turns generated responses into token-level scores."""

from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["NaiveRewardManager", "get_reward_manager_cls", "register"]
