# SPDX-License-Identifier: Apache-2.0
"""How large an error of a check may be."""

from tests.models.exactness.world import Result

# Megatron keeps the gradient norm and the clipping factor in float32, whatever the model's type.
LIMITS = {
    "float64": {"gradient": 1e-13, "metric": 1e-12, "norm": 1e-6, "update": 1e-6},
    "float32": {"gradient": 1e-5, "metric": 1e-5, "norm": 1e-5, "update": 1e-5},
}


def errors_beyond_limits(result: Result) -> dict[str, tuple[float, float]]:
    """(error, limit) of every comparison of a result that fails, by what was compared."""
    limits = LIMITS[result.check.dtype]
    errors = {
        "whole gradient": (result.whole, limits["gradient"]),
        f"parameter {result.parameter}": (result.worst, limits["gradient"]),
        f"metric {result.metric}": (result.metrics, limits["metric"]),
        "replicas": (result.replicas, 0.0),
        "gradient norm": (result.norm or 0.0, limits["norm"]),
        "updated weights": (result.update or 0.0, limits["update"]),
    }
    return {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}
