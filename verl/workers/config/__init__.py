# SPDX-License-Identifier: Apache-2.0
"""Typed configs of everything that runs inside a worker; importing them needs neither torch nor ray."""

from verl.workers.config.actor import ActorConfig, McoreActorConfig, McoreRefConfig, PolicyLossConfig
from verl.workers.config.critic import CriticConfig, McoreCriticConfig
from verl.workers.config.engine import (
    McoreCheckpointConfig,
    McoreEngineConfig,
    RouterReplayConfig,
    TrainingWorkerConfig,
)
from verl.workers.config.model import HFModelConfig, MtpConfig
from verl.workers.config.optimizer import McoreOptimizerConfig
from verl.workers.config.rollout import CheckpointEngineConfig, RolloutConfig, SamplingConfig
from verl.workers.config.rollout_correction import RolloutCorrectionConfig

__all__ = [
    "ActorConfig",
    "CheckpointEngineConfig",
    "CriticConfig",
    "HFModelConfig",
    "McoreActorConfig",
    "McoreCheckpointConfig",
    "McoreCriticConfig",
    "McoreEngineConfig",
    "McoreOptimizerConfig",
    "McoreRefConfig",
    "MtpConfig",
    "PolicyLossConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RouterReplayConfig",
    "SamplingConfig",
    "TrainingWorkerConfig",
]
