# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

import verl
from tests.special_sanity.checks import REPO_ROOT

HEAVY = ("torch", "ray", "transformers", "megatron", "tensordict", "numpy", "pandas")


def measure(statement: str) -> tuple[float, set[str]]:
    """Seconds that a statement takes in a fresh interpreter, and the top-level packages loaded after it."""
    code = (
        f"import sys, time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start); "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    seconds, modules = result.stdout.splitlines()
    return float(seconds), set(modules.split())


@pytest.mark.parametrize(
    "statement", ["import verl; verl.__version__", "import verl.utils.device", "import verl.workers.engine"]
)
def test_import_takes_under_a_second_and_loads_nothing_heavy(statement):
    seconds, modules = measure(statement)
    assert seconds < 1.0
    assert not modules.intersection(HEAVY)


def test_the_measure_sees_a_heavy_import():
    assert "numpy" in measure("import numpy")[1]


def test_version_is_that_of_the_version_file():
    assert verl.__version__ == (REPO_ROOT / "verl/version/version").read_text(encoding="utf-8").strip()


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DataProtos'"):
        _ = verl.DataProtos


def test_names_at_their_familiar_places_are_resolved_on_use():
    from verl.utils import hf_processor, hf_tokenizer, tokenizer
    from verl.workers.engine import BaseEngine, EngineRegistry, base

    assert (hf_tokenizer, hf_processor) == (tokenizer.hf_tokenizer, tokenizer.hf_processor)
    assert (BaseEngine, EngineRegistry) == (base.BaseEngine, base.EngineRegistry)
    for package in (verl.utils, verl.workers.engine):
        with pytest.raises(AttributeError, match="no attribute 'hf_tokenisers'"):
            _ = package.hf_tokenisers


def test_dataproto_is_resolved_on_use():
    from verl.protocol import DataProto

    assert verl.DataProto is DataProto
