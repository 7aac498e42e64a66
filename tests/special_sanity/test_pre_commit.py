# SPDX-License-Identifier: Apache-2.0
"""The hooks run here: they need no download, and their commands are those of this tree."""

import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from tests.special_sanity import checks
from tests.special_sanity.checks import REPO_ROOT

CONFIG = yaml.safe_load((REPO_ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
HOOKS = [hook for repo in CONFIG["repos"] for hook in repo["hooks"]]


def test_all_hooks_are_local():
    assert [repo["repo"] for repo in CONFIG["repos"]] == ["local"]
    assert {hook["language"] for hook in HOOKS} == {"system"}
    assert len({hook["id"] for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_a_hook_names_files_that_exist_and_matches_some(hook):
    program, *arguments = shlex.split(hook["entry"])
    assert program == "bash"
    for argument in arguments:
        assert "/" not in argument or (REPO_ROOT / argument).is_file(), argument
    assert hook["pass_filenames"] is False  # so that its commands do not depend on what is being committed
    if pattern := hook.get("files"):
        files = (
            path.relative_to(REPO_ROOT).as_posix()
            for folder in ("verl", ".github")
            for path in (REPO_ROOT / folder).rglob("*.*")
        )
        assert any(re.search(pattern, name) for name in files)


def test_the_hook_of_the_house_rules_starts_for_every_file_with_a_rule():
    pattern = next(hook["files"] for hook in HOOKS if hook["id"] == "house-rules")
    missed = [
        str(path) for path in checks.source_files() if checks.rules_for(path) and not re.search(pattern, str(path))
    ]
    assert not missed, f".pre-commit-config.yaml: house-rules, files: match {', '.join(missed)} too"


def test_the_hooks_run_in_the_environment_that_is_named(tmp_path):
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)

    def run(entry, folder):
        environment = os.environ | {"VERL_VENV": folder}
        return subprocess.run(shlex.split(entry), cwd=REPO_ROOT, env=environment, capture_output=True, text=True)

    entries = [hook["entry"] for hook in HOOKS if "venv_python.sh" in hook["entry"]]
    assert len(entries) > 4
    for entry in entries:
        assert run(entry, str(tmp_path / "venv")).stdout == entry.partition("venv_python.sh ")[2] + "\n"
    done = run(entries[0], "/none")
    assert done.returncode == 2 and "bash scripts/setup_env.sh" in done.stderr


def test_lint_is_that_of_the_test_command():
    script = (REPO_ROOT / "scripts/test.sh").read_text(encoding="utf-8")
    entries = {hook["id"]: hook["entry"] for hook in HOOKS}
    assert "-m ruff check ." in script and " -m ruff check " in entries["ruff"]
    assert "-m ruff format --check ." in script and entries["ruff-format"].endswith(" -m ruff format .")
    assert "-m mypy ||" in script and entries["mypy"].endswith(" -m mypy")


SETTINGS = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]


def test_the_typed_core_is_there_and_holds_what_others_build_on():
    named = [path for pattern in SETTINGS["files"] for path in REPO_ROOT.glob(pattern)]
    assert all(any(REPO_ROOT.glob(pattern)) for pattern in SETTINGS["files"])
    files = {file for path in named for file in (path.rglob("*.py") if path.is_dir() else [path])}
    core = {REPO_ROOT / "verl" / name for name in ("base_config.py", "algos/kl.py", "workers/config/actor.py")}
    assert core <= files and len(files) > 60


def test_the_settings_find_planted_faults(tmp_path):
    faults = {
        "def double(x):\n    return 2 * x\n": "missing a type annotation",
        "def name(x: int) -> str:\n    return x\n": "Incompatible return value",
        "def half(x: int = None) -> float:\n    return x / 2\n": "Incompatible default",
        "import json\n\n\ndef read(x: str) -> int:\n    return json.loads(x)\n": "Returning Any",
        "x: int = 1  # type: ignore\n": 'Unused "type: ignore"',
    }
    for number, source in enumerate(faults):
        (tmp_path / f"fault_{number}.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(REPO_ROOT / "pyproject.toml"), "."]
    done = subprocess.run([*command, "--cache-dir", "/dev/null"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    for number, said in enumerate(faults.values()):
        assert re.search(rf"^fault_{number}\.py:.*{said}", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_no_error_is_waved_through():
    for pattern in SETTINGS["files"]:
        for path in REPO_ROOT.glob(pattern):
            for file in path.rglob("*.py") if path.is_dir() else [path]:
                assert "type: ignore" not in file.read_text(encoding="utf-8"), file
