# SPDX-License-Identifier: Apache-2.0
"""Config of the actor: its loss, its batches, its optimizer and its engine."""

from dataclasses import dataclass, field

from verl.base_config import BaseConfig
from verl.workers.config.engine import McoreCheckpointConfig, McoreEngineConfig
from verl.workers.config.names import KL_PENALTIES, LOSS_AGG_MODES, name_problems
from verl.workers.config.optimizer import McoreOptimizerConfig
from verl.workers.config.rollout_correction import RolloutCorrectionConfig


@dataclass
class PolicyLossConfig(BaseConfig):
    """Which policy loss is used, a name in the registry of ``verl.algos.policy_loss``, and what single losses read.

    ``clip_cov_*``: share of the tokens that clip_cov drops, and the covariances between which they lie.
    ``kl_cov_ratio`` and ``ppo_kl_coef``: share of the tokens that kl_cov holds back, and how strongly.
    ``dro_beta``: weight of dro's squared log-ratio. ``rollout_correction``: for bypass_mode, filled in by the trainer.

    Raises ``ValueError`` for a value out of range.
    """

    loss_mode: str = "vanilla"
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None
    rollout_correction: RolloutCorrectionConfig | None = None

    def _problems(self) -> list[str]:
        problems: list[str] = []
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name}={getattr(self, name)} must lie between 0 and 1")
        if self.clip_cov_lb >= self.clip_cov_ub:
            problems.append(f"clip_cov_lb={self.clip_cov_lb} must be below clip_cov_ub={self.clip_cov_ub}")
        if self.loss_mode == "dro" and not (self.dro_beta and self.dro_beta > 0):
            problems.append(f"dro_beta={self.dro_beta} must be a positive number for loss_mode='dro', such as 0.05")
        return problems


@dataclass
class ActorConfig(BaseConfig):
    """The actor's objective and its batch sizes, whatever the engine.

    ``ppo_mini_batch_size`` counts prompts over all ranks, each with ``rollout_n`` responses: one optimizer step.
    ``ppo_micro_batch_size_per_gpu`` counts responses on one data-parallel rank; with ``use_dynamic_bsz`` the split goes
    by ``ppo_max_token_len_per_gpu`` tokens instead. ``clip_ratio_low``/``clip_ratio_high`` bound the probability ratio
    below and above (None: by ``clip_ratio``), ``clip_ratio_c`` is the dual clip's bound (Ye et al. 2020, arXiv
    1912.09729). The divisor of "seq-mean-token-sum-norm" is ``loss_scale_factor``, else ``max_response_length``.
    ``tau_pos`` and ``tau_neg`` are the temperatures of sapo for positive and other advantages.

    Raises ``ValueError`` for an unknown name or a value out of range.
    """

    strategy: str = ""
    rollout_n: int = 1
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    max_response_length: int | None = None
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    calculate_sum_pi_squared: bool = False
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int = 42
    use_torch_compile: bool = True
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    checkpoint: McoreCheckpointConfig = field(default_factory=McoreCheckpointConfig)
    optim: McoreOptimizerConfig = field(default_factory=McoreOptimizerConfig)

    def _problems(self) -> list[str]:
        problems = name_problems("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        problems += name_problems("kl_loss_type", self.kl_loss_type, KL_PENALTIES)
        for name in ("rollout_n", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "ppo_epochs"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        if self.clip_ratio < 0 or (self.clip_ratio_high or 0) < 0:
            problems.append(
                f"clip_ratio={self.clip_ratio} and clip_ratio_high={self.clip_ratio_high} must not be negative"
            )
        if self.clip_ratio_low is None and self.clip_ratio > 1:
            problems.append(f"clip_ratio={self.clip_ratio} must lie between 0 and 1, unless clip_ratio_low is set")
        if self.clip_ratio_low is not None and not 0 <= self.clip_ratio_low <= 1:
            problems.append(f"clip_ratio_low={self.clip_ratio_low} must lie between 0 and 1")
        if self.clip_ratio_c <= 1:
            problems.append(f"clip_ratio_c={self.clip_ratio_c} must be above 1, for example 3.0")
        for name in ("tau_pos", "tau_neg"):
            if getattr(self, name) <= 0:
                problems.append(f"{name}={getattr(self, name)} must be positive, for example 1.0")
        return problems


@dataclass
class McoreRefConfig(BaseConfig):
    """The reference model on the megatron-core engine: the split of its log-prob pass, as in ``RolloutConfig``."""

    strategy: str = "megatron"
    use_torch_compile: bool = True
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)

    def _problems(self) -> list[str]:
        problems = name_problems("strategy", self.strategy, ("megatron",))
        if self.log_prob_max_token_len_per_gpu < 1:
            problems.append(f"log_prob_max_token_len_per_gpu={self.log_prob_max_token_len_per_gpu} must be at least 1")
        return problems


@dataclass
class McoreActorConfig(ActorConfig):
    """An actor trained by the megatron-core engine."""

    strategy: str = "megatron"
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        problems += name_problems("strategy", self.strategy, ("megatron",))
        return problems
