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
