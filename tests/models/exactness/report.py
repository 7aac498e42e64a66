# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown tables."""

from typing import Any

from tests.models.exactness.limits import LIMITS, errors_beyond_limits
from tests.models.exactness.world import Result

# What these tables do not have; tests hold it to the same kind of limit.
ELSEWHERE = (
    "Multi-head latent attention (DeepSeek-V3, Moonlight) is in none of these cases. Its log-probs and gradients are\n"
    "compared with transformers' in float32, in layouts of two processes with tensor, context, expert, pipeline and\n"
    "data parallelism, by `tests/models/test_latent_attention.py`: the largest difference was 1.2e-06, the\n"
    "limit is 1e-05."
)


def layout_of(result: Result) -> str:
    return result.check.name.split(",")[0]


def largest(results: list[Result], dtype: str, field: str) -> str:
    """The largest error of a kind in one precision, or a dash."""
    values = [getattr(r, field) for r in results if r.check.dtype == dtype and getattr(r, field) is not None]
    return f"{max(values):.1e}" if values else "-"


def summary(results: list[Result]) -> str:
    """One line per layout: the largest errors over its cases."""
    head = ["layout", "cases", "whole, float64", "worst parameter, float64", "whole, float32"]
    head += ["worst parameter, float32", "metrics, float64", "grad norm", "update", "replicas differ"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    layouts = list(dict.fromkeys(layout_of(result) for result in results))
    for name in [*layouts, "all"]:
        own = [result for result in results if name in (layout_of(result), "all")]
        cells = [name, str(len(own))]
        for dtype in ("float64", "float32"):
            cells += [largest(own, dtype, "whole"), largest(own, dtype, "worst")]
        cells += [
            largest(own, "float64", "metrics"),
            largest(own, "float64", "norm"),
            largest(own, "float64", "update"),
        ]
        cells.append(f"{max(result.replicas for result in own):.0e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def every_case(results: list[Result]) -> str:
    """One line per case."""
    lines = ["| case | whole | worst parameter | | metrics | beyond its limit |", "|---" * 6 + "|"]
    for result in results:
        beyond = ", ".join(errors_beyond_limits(result)) or "no"
        cells = [result.check.name, f"{result.whole:.1e}", f"{result.worst:.1e}", f"`{result.parameter}`"]
        lines.append("| " + " | ".join([*cells, f"{result.metrics:.1e}", beyond]) + " |")
    return "\n".join(lines)


def limits() -> str:
    """The limits in words."""
    return "; ".join(
        f"{dtype}: gradients {kinds['gradient']:.0e}, metrics {kinds['metric']:.0e}, update {kinds['update']:.0e}"
        for dtype, kinds in LIMITS.items()
    )


def fault_table(outcomes: list[Any]) -> str:
    """One line per planted fault."""
    lines = ["| fault | error | caught by |", "|---|---|---|"]
    for outcome in outcomes:
        size = "stops" if outcome.error == float("inf") and outcome.crashed else f"{outcome.error:.1e}"
        lines.append(f"| {outcome.name} | {size} | {', '.join(outcome.caught_by) or 'nothing'} |")
    return "\n".join(lines)
