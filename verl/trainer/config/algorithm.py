# SPDX-License-Identifier: Apache-2.0
"""Config of the advantage estimator and of the KL penalty in the reward."""

from dataclasses import dataclass, field

from verl.base_config import BaseConfig
from verl.workers.config.names import KL_CONTROLLERS, KL_PENALTIES, name_problems
from verl.workers.config.rollout_correction import RolloutCorrectionConfig


@dataclass
class KLControlConfig(BaseConfig):
    """The coefficient of the KL penalty: fixed, or steered towards ``target_kl`` over ``horizon`` responses."""

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1

    def _problems(self) -> list[str]:
        problems = name_problems("type", self.type, KL_CONTROLLERS)
        if self.horizon < 1:
            problems.append(f"horizon={self.horizon} must be at least 1")
        return problems


@dataclass
class FilterGroupsConfig(BaseConfig):
    """DAPO's dynamic sampling (arXiv 2503.14476): prompts whose responses are all equal in ``metric`` are replaced.

    ``metric``: seq_reward, score, or an extra value of the reward, such as acc. ``max_num_gen_batches``: batches drawn
    for one step at most; 0 or less for no limit.
    """

    enable: bool = False
    metric: str | None = None
    max_num_gen_batches: int = 0

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if self.enable and not self.metric:
            problems.append("metric must be set while enable=True, for instance to acc, score or seq_reward")
        return problems


@dataclass
class AlgoConfig(BaseConfig):
    """How rewards become advantages.

    ``gamma`` and ``lam`` are GAE's discount and trace decay. ``norm_adv_by_std_in_grpo`` False leaves out GRPO's
    division by the group's standard deviation (Dr. GRPO, arXiv 2503.20783). ``gdpo_reward_keys`` names the rewards that
    gdpo combines, columns that the reward function returns; ``gdpo_reward_weights`` weighs them, 1 each by default.
    """

    gamma: float = 1.0
    lam: float = 1.0
    adv_estimator: str = "gae"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    gdpo_reward_keys: list | None = None
    gdpo_reward_weights: list | None = None
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def _problems(self) -> list[str]:
        problems = name_problems("kl_penalty", self.kl_penalty, KL_PENALTIES)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name}={getattr(self, name)} must lie between 0 and 1")
        return problems
