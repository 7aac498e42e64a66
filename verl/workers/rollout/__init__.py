# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: what turns prompts into responses inside a worker."""

from verl.workers.rollout.base import BaseRollout, get_rollout_class

__all__ = ["BaseRollout", "get_rollout_class"]
