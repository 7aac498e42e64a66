# SPDX-License-Identifier: Apache-2.0
"""Shell scripts parse, and the one that needs accelerators says so where there are none."""

import os
import re
import subprocess

import pytest

from tests.special_sanity.checks import REPO_ROOT

FOLDERS = ("scripts", "docker", "examples", "recipe")
FILES = sorted(path for folder in FOLDERS for path in (REPO_ROOT / folder).rglob("*.sh"))


@pytest.mark.parametrize("path", [*FILES, REPO_ROOT / ".ci/run"], ids=lambda path: str(path.relative_to(REPO_ROOT)))
def test_a_script_parses(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_check_of_gpus_refuses_a_machine_without_any():
    script = REPO_ROOT / "scripts/gpu_check.sh"
    done = subprocess.run(
        ["bash", str(script)], env=os.environ | {"VERL_DEVICE": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "torch finds no accelerator here; bash scripts/test.sh runs what a CPU can run" in done.stderr


def test_what_the_check_of_gpus_runs_is_there():
    source = (REPO_ROOT / "scripts/gpu_check.sh").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:scripts|tests)/[\w/]+\.(?:py|sh)", source))
    assert {"scripts/audit_gradients.py", "tests/models/test_moe_zloss_per_token_loss.py"} <= named
    assert all((REPO_ROOT / name).is_file() for name in named)


# Stands in for Python on a machine with accelerators: notes what it is asked to run, and fails in one part.
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$RECORD"
[[ " $* " != *" $PART "* ]] || exit "$CODE"
"""


@pytest.mark.parametrize(
    ("part", "code", "said"),
    [
        ("none", 0, "all passed"),
        ("gpu", 1, "FAILED: gpu tests (exit code 1)"),
        ("gpu", 5, "FAILED: gpu tests: pytest found no test; mend the path or the marker in: "),
        ("tests/models/test_moe_zloss_per_token_loss.py", 5, "FAILED: z-loss and the flag: pytest found no test"),
        ("scripts/audit_gradients.py", 124, "FAILED: exact gradients: not done after 240 seconds"),
    ],
)
def test_the_check_of_gpus_runs_each_part_once_and_passes_if_all_do(tmp_path, part, code, said):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    record = tmp_path / "record"
    stand_in = {"VERL_VENV": str(tmp_path), "RECORD": str(record), "PART": part, "CODE": str(code)}
    command = ["bash", str(REPO_ROOT / "scripts/gpu_check.sh"), str(tmp_path / "report.md")]
    done = subprocess.run(command, env=os.environ | stand_in, capture_output=True, text=True)
    assert done.returncode == (1 if code else 0) and said in done.stdout, done.stdout + done.stderr
    _, audit, zloss, gpu = record.read_text().splitlines()
    assert f"out={tmp_path}/report.md" in audit and zloss.endswith("loss.py") and gpu == "-m pytest -q -m gpu tests"
