# SPDX-License-Identifier: Apache-2.0
"""What is checked: layouts, regimes, losses, splits and data, and a design in which every two of them meet."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from tests.models.engine_world import LENGTHS, Case

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4 overlapped": {"overlap_grad_reduce": True},
    "cp2 dp2": {"cp": 2},
    "cp4": {"cp": 4},
    "tp2": {"tp": 2},
    "tp2 without sp": {"tp": 2, "sequence_parallel": False, "model": "dense"},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2": {"pp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2, "model": "deep"},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "ep2 cp2": {"ep": 2, "cp": 2},
    "ep2 pp2": {"ep": 2, "pp": 2},
    "tp2 etp2": {"tp": 2, "etp": 2},
    "tp2 ep2 cp2": {"tp": 2, "ep": 2, "etp": 1, "cp": 2},
}

_SHORT = ((1, 1), (2, 1), (1, 2), (1, 1), (1, 3), (1, 4), (2, 1), (1, 1))
_GIANT = ((31, 34), *((1 + i % 2, 1 + i % 3) for i in range(15)))
DATA = {
    "odd": LENGTHS,
    "short": _SHORT,  # below 2 * cp
    "giant": _GIANT,  # one giant, many tiny
    "masked sequence": LENGTHS,
    "masked micro-batch": LENGTHS,
    "masked rank": LENGTHS,
    "masked batch": LENGTHS,
}
LOSSES = ("policy", "sequence", "gspo", "kl", "entropy", "sft")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
MODE_OF = {"sft": "token-mean", "gspo": "seq-mean-token-mean"}  # losses whose aggregation is part of them
SPLITS: tuple[int | str, ...] = (1, 2, 4, "dynamic")
AUX_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class Check(Case):
    """One case, with what decides its reference."""

    world: int = 4
    model: str = "moe"  # which folder: "moe" and "dense" have two layers, "deep" has four
    data: str = "odd"
    split: int | str = 2
    aux_type: str | None = None
    aux_coef: float = 0.0
    step: bool = False  # whether to make an optimiser step as well

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def is_moe(self) -> bool:
        return "dense" not in self.model

    def rows_of(self, dp_rank: int) -> list[int]:
        return list(range(dp_rank, len(self.lengths), self.dp))

    def steps(self) -> list[list[list[int]]]:
        """The k-th micro-batch of every data-parallel rank, as rows of the whole batch (fixed sizes only)."""
        by_rank = []
        for rank in range(self.dp):
            rows = self.rows_of(rank)
            by_rank.append([rows[i : i + self.micro_batch_size] for i in range(0, len(rows), self.micro_batch_size)])
        return [list(step) for step in zip(*by_rank, strict=True)]

    @property
    def engine_key(self) -> tuple:
        """Cases with the same key run on the same engine."""
        layout = (
            self.tp,
            self.pp,
            self.vpp,
            self.cp,
            self.ep,
            self.etp,
            self.sequence_parallel,
            self.model,
            self.overlap_grad_reduce,
        )
        regime = (self.dtype, self.distributed_optimizer, self.per_token_loss, self.dense)
        return (*layout, *regime, self.z_loss, self.aux_type, self.aux_coef)

    @property
    def reference_key(self) -> tuple:
        """Cases with the same key have the same gradient."""
        aux = (self.aux_type, self.aux_coef, str(self.steps()), self.dense) if self.aux_type else ()
        mode = "" if self.loss in MODE_OF else self.loss_agg_mode
        batch = (self.lengths, self.masked_rows)
        return (self.model, self.dtype, self.loss, mode, self.z_loss, *batch, *aux)


def make_check(layout: str, **settings: Any) -> Check:
    """A check by layout name; ``split`` and ``data`` are turned into sizes and masks."""
    check = Check(name=layout, **{"z_loss": 0.1, **LAYOUTS.get(layout, {}), **settings})
    if not check.is_moe:
        check = replace(check, z_loss=0.0, aux_type=None)
    lengths = DATA[check.data]
    check = replace(check, lengths=lengths)
    rows, sizes = len(check.rows_of(0)), {}
    if check.split == "dynamic":
        longest = max(sum(pair) for pair in lengths)
        sizes = {"token_budget": max(-(-longest // check.cp), 24), "micro_batch_size": None}
    else:
        sizes = {"micro_batch_size": max(1, rows // check.split), "token_budget": None}
    masked = {
        "masked sequence": (1, 6),
        "masked micro-batch": tuple(check.rows_of(0)[: sizes["micro_batch_size"] or 2]),
        "masked rank": tuple(check.rows_of(0)),
        "masked batch": tuple(range(len(lengths))),
    }.get(check.data, ())
    form = "bshd" if check.dense else "thd"
    words = [layout, "flag" if check.per_token_loss else "no flag", form, check.dtype, check.loss]
    words += [check.loss_agg_mode] * (check.loss not in MODE_OF) + [f"split {check.split}", check.data]
    words += ["distributed optimizer"] * check.distributed_optimizer + [check.aux_type or ""]
    return replace(check, name=", ".join(filter(None, words)), masked_rows=masked, **sizes)


def _allowed(known: dict[str, Any], factors: dict[str, Any]) -> bool:
    if known.get("vpp") and factors["split"] == 1:
        return False  # virtual stages need a multiple of the pipeline's size
    return factors["loss_agg_mode"] == MODE_OF.get(factors["loss"], factors["loss_agg_mode"])


def design(per_engine: int = 2, layouts: dict[str, dict[str, Any]] = LAYOUTS, **common: Any) -> list[Check]:
    """Every layout on three engines: flag and format both ways in float64, and float32 with the distributed optimizer.

    Loss, mode, split and data of the cases on them are chosen greedily, so that each pair of values, and each value
    with each layout, comes up as early as can be.

    Args:
        per_engine: cases on each engine.
        layouts: as in ``LAYOUTS``.
        **common: settings of every check.
    """
    factors = {"loss": LOSSES, "loss_agg_mode": MODES, "split": SPLITS, "data": tuple(DATA)}
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    seen: dict[tuple, int] = {}
    checks = []
    for number, layout in enumerate(layouts):
        known = layouts[layout] | common
        flip = number % 2 == 1
        engines = [
            {"per_token_loss": True, "dense": flip, "dtype": "float64"},
            {"per_token_loss": False, "dense": not flip, "dtype": "float64"},
            {"per_token_loss": number % 4 < 2, "dense": flip, "dtype": "float32", "distributed_optimizer": True},
        ]
        for engine in engines:
            for place in range(per_engine):
                candidates = [row for row in rows if _allowed(known, row)]
                best = max(candidates, key=lambda row: _gain(layout, engine, row, seen))
                for pair in _pairs(layout, engine, best):
                    seen[pair] = seen.get(pair, 0) + 1
                checks.append(make_check(layout, **known, **engine, **best, step=place == per_engine - 1))
    return checks


def _pairs(layout: str, engine: dict[str, Any], row: dict[str, Any]) -> list[tuple]:
    flags = {"per_token_loss": engine["per_token_loss"], "dense": engine["dense"]}
    return list(itertools.combinations(({"layout": layout} | flags | row).items(), 2))


def _gain(layout: str, engine: dict[str, Any], row: dict[str, Any], seen: dict[tuple, int]) -> float:
    return sum(0.1 ** seen.get(pair, 0) for pair in _pairs(layout, engine, row))


def aux_checks() -> list[Check]:
    """The load-balancing losses over layouts and formats, with the flag on and off in turn."""
    checks = []
    layouts = ("dp4", "cp2 dp2", "cp4", "tp2", "tp2 cp2", "pp2 cp2", "ep2 cp2")
    for number, (kind, layout) in enumerate(itertools.product(AUX_TYPES, layouts)):
        data = ("odd", "giant", "short")[number % 3]
        flags = (True, False) if layout == "cp2 dp2" else (number % 2 == 0,)
        settings = {"aux_type": kind, "aux_coef": 0.1, "dense": number % 4 == 3}
        settings |= {"dtype": "float64", "data": data, "split": (2, 1)[number % 2]}
        checks += [make_check(layout, per_token_loss=flag, **settings) for flag in flags]
    return checks
