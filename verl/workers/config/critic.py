# SPDX-License-Identifier: Apache-2.0
"""Config of the critic, the value model of estimators that need one."""

from dataclasses import dataclass, field

from verl.base_config import BaseConfig
from verl.workers.config.engine import McoreCheckpointConfig, McoreEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.names import LOSS_AGG_MODES, name_problems
from verl.workers.config.optimizer import McoreOptimizerConfig


@dataclass
class CriticConfig(BaseConfig):
    """The critic's objective and batch sizes; counts as in ``ActorConfig``.

    ``enable`` None: as the estimator needs. ``cliprange_value`` is in units of the reward. The two token budgets are
    for training and for computing values; without ``use_dynamic_bsz`` both passes go by
    ``ppo_micro_batch_size_per_gpu`` responses.
    """

    strategy: str = ""
    enable: bool | None = None
    rollout_n: int = 1
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 32768
    ppo_infer_max_token_len_per_gpu: int = 32768
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int = 42
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None
    max_response_length: int | None = None
    checkpoint: McoreCheckpointConfig = field(default_factory=McoreCheckpointConfig)
    optim: McoreOptimizerConfig = field(default_factory=McoreOptimizerConfig)
    model: HFModelConfig | None = None

    def _problems(self) -> list[str]:
        problems = name_problems("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        for name in (
            "ppo_mini_batch_size",
            "ppo_max_token_len_per_gpu",
            "ppo_infer_max_token_len_per_gpu",
            "ppo_epochs",
        ):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        if self.cliprange_value <= 0:
            problems.append(f"cliprange_value={self.cliprange_value} must be positive, for example 0.5")
        return problems


@dataclass
class McoreCriticConfig(CriticConfig):
    """A critic trained by the megatron-core engine."""

    strategy: str = "megatron"
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        problems += name_problems("strategy", self.strategy, ("megatron",))
        return problems
