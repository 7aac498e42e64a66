# SPDX-License-Identifier: Apache-2.0
"""A command that the wrong Python starts goes on in the right one, or says one sentence; and there is one right one."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scripts.loading import load_script
from verl.utils import environment

ROOT = Path(__file__).resolve().parents[2]
# -S: no site-packages, as in a Python without the requirements.
BARE = [sys.executable, "-S"]


def run(arguments, **variables):
    variables = {"VERL_VENV": "/no/such/folder"} | variables
    return subprocess.run([*BARE, *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ | variables)


@pytest.mark.parametrize(
    "arguments",
    [
        ["scripts/init_random_model.py", "--out", "x"],
        ["scripts/print_cfg.py", "ppo_trainer"],
        ["scripts/draw_layouts.py"],
        ["scripts/audit_gradients.py"],
        ["scripts/converter_hf_to_mcore.py", "--hf_model_path", "x", "--output_path", "y"],
        ["-m", "verl.trainer.main_ppo"],
        ["-m", "verl.trainer.sft_trainer", "trainer.dry_run=True"],
    ],
)
def test_a_python_without_the_packages_gets_a_sentence(arguments):
    done = run(arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "bash scripts/setup_env.sh" in done.stderr
    assert "source /no/such/folder/bin/activate" in done.stderr


def test_a_script_goes_on_in_the_environment_with_its_arguments(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    done = run(["scripts/init_random_model.py", "--out", "a b"], VERL_VENV=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "scripts/init_random_model.py --out a b\n"), done.stderr


def test_a_package_that_one_script_needs_is_named():
    assert environment.environment_problem("megatron") is None
    assert "no_such_package is not installed for this Python" in environment.environment_problem("no_such_package")


def test_an_import_of_the_package_ends_nothing():
    done = run(["-c", "import verl.trainer"])
    assert done.returncode == 0, done.stderr


def test_an_old_python_is_named(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    assert "Python 3.12 or later is needed, and this is Python 3.11" in environment.environment_problem()
    monkeypatch.undo()
    assert environment.environment_problem() is None


def test_every_file_names_the_same_python():
    def read(name):
        return (ROOT / name).read_text(encoding="utf-8")

    need = ".".join(map(str, environment.MIN_PYTHON))
    settings = tomllib.loads(read("pyproject.toml"))["tool"]
    assert settings["ruff"]["target-version"] == "py" + need.replace(".", "")
    assert settings["mypy"]["python_version"] == need
    assert re.findall(r'python_requires=">=(.+)"', read("setup.py")) == [need]
    assert re.findall(r'^NEEDED="(.+)"', read("scripts/setup_env.sh"), re.MULTILINE) == [need]
    assert f"| Python | {need} |" in read("docs/start/install.md") and f"| Python | {need} |" in read("README.md")
    assert load_script("diagnose.py").PYTHON == environment.MIN_PYTHON
