# SPDX-License-Identifier: Apache-2.0
"""The hydra tree, and the typed configs that only the driver reads."""

from verl.trainer.config.algorithm import AlgoConfig, KLControlConfig

__all__ = ["AlgoConfig", "KLControlConfig"]
