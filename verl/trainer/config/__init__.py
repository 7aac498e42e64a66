# SPDX-License-Identifier: Apache-2.0
"""The hydra tree, and the typed configs that only the driver reads."""

from verl.trainer.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig
from verl.workers.config.rollout_correction import RolloutCorrectionConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
