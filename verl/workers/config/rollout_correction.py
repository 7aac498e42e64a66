# SPDX-License-Identifier: Apache-2.0
"""Config of the correction for the gap between the rollout's probabilities and the trainer's."""

from dataclasses import dataclass

from verl.base_config import BaseConfig
from verl.workers.config.names import check_name, name_problems

IS_LEVELS = ("token", "sequence")
LOSS_TYPES = ("ppo_clip", "reinforce")
# Statistic of a rejection: where it is taken (a token; the sum, mean or maximum over a sequence), and of what: k1 is
# the log-ratio itself, k2 half its square, k3 ratio - 1 - log-ratio.
REJECTIONS = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_sum_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_mean_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_max_{k}" for k in ("k2", "k3")),
)
# Older names of the rejections by ratio.
_OLD_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(frozen=True)
class Rejection:
    """One rule: a token, or a whole sequence, is rejected where its statistic leaves [lower, upper].

    For k1 both bounds are ratios (0.5 and 2.0, say); for k2 and k3 ``upper`` bounds the divergence and ``lower`` is 0.
    """

    name: str
    lower: float
    upper: float

    @property
    def is_ratio(self) -> bool:
        """Whether the statistic is a log-ratio, which has two sides."""
        return self.name.endswith("k1")


@dataclass
class RolloutCorrectionConfig(BaseConfig):
    """Importance weights and rejection for tokens that the rollout sampled with other probabilities than the trainer's.

    ``rollout_is`` ("token", "sequence", null) weighs each token's loss by the probability ratio trainer / rollout, cut
    at ``rollout_is_threshold``, and divided by its mean with ``rollout_is_batch_normalize``. ``rollout_rs`` names
    rejections, separated by commas; ``rollout_rs_threshold`` holds a bound for each ("2.0", or "0.5_2.0" with a lower
    one), or one for all. A lone bound u of a ratio means 1/u..u, or ``rollout_rs_threshold_lower``..u.
    ``rollout_token_veto_threshold`` rejects a whole sequence for one token with a smaller ratio. With ``bypass_mode``
    the rollout's log-probs stand in for the old policy's, and ``loss_type`` says with which loss.

    Raises ``ValueError`` for an unknown name or a bound out of range.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None
    rollout_rs_threshold_lower: float | None = None
    rollout_token_veto_threshold: float | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if self.rollout_is is not None:
            problems += name_problems("rollout_is", self.rollout_is, IS_LEVELS)
        if self.rollout_is_threshold <= 0:
            problems.append(f"rollout_is_threshold={self.rollout_is_threshold} must be positive, for example 2.0")
        veto = self.rollout_token_veto_threshold
        if veto is not None and not 0 < veto < 1:
            problems.append(f"rollout_token_veto_threshold={veto} must lie between 0 and 1, for example 1e-4")
        problems += name_problems("loss_type", self.loss_type, LOSS_TYPES)
        try:
            self.rejections()
        except ValueError as error:
            problems.append(str(error))
        return problems

    @property
    def is_on(self) -> bool:
        """Whether anything is weighed or rejected."""
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold)

    def rejections(self) -> tuple[Rejection, ...]:
        """The rules that ``rollout_rs`` and its bounds describe.

        Raises:
            ValueError: an unknown rule, a missing or extra bound, or one out of range.
        """
        names = [name.strip() for name in (self.rollout_rs or "").split(",") if name.strip()]
        if not names:
            return ()
        if self.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs_threshold must be set for rollout_rs={self.rollout_rs!r}, for example 2.0")
        bounds = [bound.strip() for bound in str(self.rollout_rs_threshold).split(",")]
        if len(bounds) == 1:
            bounds = bounds * len(names)
        if len(bounds) != len(names):
            raise ValueError(
                f"rollout_rs_threshold={self.rollout_rs_threshold!r} holds {len(bounds)} bounds for the {len(names)} "
                f"rules of rollout_rs={self.rollout_rs!r}; give one for each, or one for all"
            )
        return tuple(self._rule(name, bound) for name, bound in zip(names, bounds, strict=True))

    def _rule(self, name: str, bound: str) -> Rejection:
        name = _OLD_NAMES.get(name, name)
        check_name("rollout_rs", name, REJECTIONS)
        try:
            numbers = [float(part) for part in bound.split("_")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            raise ValueError(f"rollout_rs_threshold={bound!r} must be a number such as 2.0, or a pair such as 0.5_2.0")
        upper = numbers[-1]
        if not name.endswith("k1"):
            if len(numbers) == 2 or upper <= 0:
                raise ValueError(f"rollout_rs_threshold={bound!r} must be one positive number for {name}")
            return Rejection(name, 0.0, upper)
        given = numbers[0] if len(numbers) == 2 else self.rollout_rs_threshold_lower
        lower = given if given is not None else 1 / upper if upper > 0 else 0.0
        if not 0 < lower < upper:
            raise ValueError(
                f"rollout_rs_threshold={bound!r} must be ratios with 0 < lower < upper for {name}, such as 0.5_2.0"
            )
        return Rejection(name, lower, upper)
