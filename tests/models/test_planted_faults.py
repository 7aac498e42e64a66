# SPDX-License-Identifier: Apache-2.0
"""Faults put into the real code, one at a time: the comparison with plain autograd must see every one of them."""

from pathlib import Path

import pytest

from tests.models.exactness.faults import FAULTS, try_faults
from tests.models.exactness.models import save_models
from tests.models.exactness.report import fault_table
from tests.utils_dist import run_world


@pytest.mark.gloo
@pytest.mark.slow
def test_every_planted_fault_is_caught(tmp_path: Path) -> None:
    by_rank = run_world(try_faults, 4, save_models(str(tmp_path)), timeout_s=280)
    outcomes, broken_without_a_fault = by_rank[0]
    print(fault_table(outcomes))
    assert not broken_without_a_fault
    assert [outcome.name for outcome in outcomes] == [fault.name for fault in FAULTS]
    for rank, (found, _) in enumerate(by_rank):
        missed = [outcome.name for outcome in found if not outcome.caught_by]
        assert not missed, f"rank {rank} did not see: {missed}"
