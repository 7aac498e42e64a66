# SPDX-License-Identifier: Apache-2.0
"""The hooks run here: they need no download, and their commands are those of this tree."""

import re
import shlex

import pytest
import yaml

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
    assert program in (".venv/bin/python", "bash")
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


def test_lint_is_that_of_the_test_command():
    script = (REPO_ROOT / "scripts/test.sh").read_text(encoding="utf-8")
    entries = {hook["id"]: hook["entry"] for hook in HOOKS}
    assert "-m ruff check ." in script and " -m ruff check " in entries["ruff"]
    assert "-m ruff format --check ." in script and entries["ruff-format"].endswith(" -m ruff format .")
