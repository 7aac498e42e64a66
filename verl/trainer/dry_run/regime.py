# SPDX-License-Identifier: Apache-2.0
"""In which regime of docs/objective.md, section 4, each engine will be, and what follows from that."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl.trainer.ppo.preflight_regime import Guard, Regime, find_guards, find_regime

ON_MEANS = (
    "the loss function returns three items (loss, tokens, output), Megatron adds gradients up and divides them by the "
    "tokens at the end of the step, and the loss is scaled so that this cancels"
)
OFF_MEANS = (
    "the loss function returns two items (loss, output), Megatron averages gradients over ranks and micro-batches, and "
    "the loss is scaled so that this cancels"
)


@dataclass(frozen=True)
class RegimeReport:
    """The regime of the engine at ``key`` and its guards; ``guards_on`` is the value of per_token_loss_guards."""

    key: str
    regime: Regime
    guards_on: bool
    guards: tuple[Guard, ...]

    @property
    def means(self) -> str:
        """What follows from the regime, in words."""
        if self.regime.per_token is None:
            return f"on: {ON_MEANS}; off: {OFF_MEANS}"
        return ON_MEANS if self.regime.per_token else OFF_MEANS


def describe_regimes(engines: Iterable[tuple[str, Mapping, str, Mapping, str | None]]) -> list[RegimeReport]:
    """One report for each engine, given as (key, node, key of its model, node of its model, loss_agg_mode or None)."""
    reports = []
    for key, engine, model_key, model, mode in engines:
        regime = find_regime(engine, key, model, model_key)
        guards = find_guards(regime, engine, key, model, model_key, mode)
        reports.append(RegimeReport(key, regime, bool(engine["per_token_loss_guards"]), tuple(guards)))
    return reports
