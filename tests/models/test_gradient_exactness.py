# SPDX-License-Identifier: Apache-2.0
"""Every gradient, loss, metric, norm and update of the engine against plain autograd of the unsharded model.

One world of four processes runs all cases; each case is one layout, regime, loss, split and kind of data. The reference
is ``tests/models/exactness/reference.py``: no data-parallel wrapper, no schedule, no collective, no padding.
"""

import itertools
from pathlib import Path

import pytest

from tests.models.exactness.checks import (
    AUX_TYPES,
    DATA,
    LAYOUTS,
    LOSSES,
    MODE_OF,
    MODES,
    SPLITS,
    Check,
    aux_checks,
    design,
)
from tests.models.exactness.limits import errors_beyond_limits
from tests.models.exactness.models import save_models
from tests.models.exactness.world import Result, describe, run_checks
from tests.utils_dist import run_world

FAMILIES = {
    "data parallel": ("dp4", "dp4 overlapped"),
    "context": ("cp2 dp2", "cp4"),
    "tensor": ("tp2", "tp2 without sp", "tp2 etp2"),
    "pipeline": ("pp2", "pp2 vpp2", "tp2 pp2"),
    "expert": ("ep2", "ep4", "ep2 pp2"),
    "context and another": ("tp2 cp2", "pp2 cp2", "ep2 cp2", "tp2 ep2 cp2"),
}


def all_checks() -> list[Check]:
    return design() + aux_checks()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[Result]]:
    paths = save_models(str(Path(tmp_path_factory.mktemp("exactness"))))
    return run_world(run_checks, 4, paths, all_checks(), timeout_s=540)


def test_the_design_lets_every_two_values_meet() -> None:
    checks = design()
    assert set(FAMILIES) and sorted(itertools.chain(*FAMILIES.values())) == sorted(LAYOUTS)
    family = {layout: name for name, layouts in FAMILIES.items() for layout in layouts}
    factors = {
        "layout": tuple(FAMILIES),
        "flag": (True, False),
        "dense": (True, False),
        "loss": LOSSES,
        "mode": MODES,
        "split": SPLITS,
        "data": tuple(DATA),
    }
    seen = set()
    for check in checks:
        values = {
            "layout": family[check.name.split(",")[0]],
            "flag": check.per_token_loss,
            "dense": check.dense,
            "loss": check.loss,
            "mode": check.loss_agg_mode,
            "split": check.split,
            "data": check.data,
        }
        seen |= set(itertools.combinations(values.items(), 2))
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    impossible = {(("loss", loss), ("mode", mode)) for loss, own in MODE_OF.items() for mode in MODES if mode != own}
    missing = wanted - impossible - seen
    assert not missing, sorted(map(str, missing))
    assert {check.aux_type for check in aux_checks()} == set(AUX_TYPES)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_case_has_the_gradient_of_the_unsharded_model(results: list[list[Result]]) -> None:
    checks = all_checks()
    for by_rank in results:
        assert [result.check.name for result in by_rank] == [check.name for check in checks]
    wrong = {}
    for result in itertools.chain(*results):
        found = errors_beyond_limits(result)
        if found:
            wrong[result.check.name] = ", ".join(
                f"{name} {error:.1e} > {limit:.0e}" for name, (error, limit) in found.items()
            )
    print("\n".join(describe(result) for result in results[0]))
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


@pytest.mark.gloo
@pytest.mark.slow
def test_the_references_have_gradients_to_compare(results: list[list[Result]]) -> None:
    """A comparison of zeros proves nothing: only the fully masked batch of a dense model may be all zero."""
    for result in results[0]:
        empty = result.check.data == "masked batch" and not result.check.is_moe
        assert result.size > 1e-3 or empty, result.check.name
