# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.loading import load_script

ROOT = Path(__file__).resolve().parents[2]
script = load_script("check_pr_title.py")


@pytest.mark.parametrize(
    "title",
    [
        "[megatron] fix: count the routed tokens of this rank's share",
        "[megatron, algo] feat: sequence-level losses under CP",
        "[BREAKING][cfg] refactor: one key for the layout",
        "[BREAKING] [cfg] refactor: one key for the layout",
        "[1/3] [rollout] feat: streaming: the reader",
        "[2/N][BREAKING][single_controller,ray] chore: x",
        "[doc] chore: [sic] brackets and: colons in the text",
    ],
)
def test_good_titles_pass(title):
    assert script.title_problems(title) == []


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("fix: routed tokens", "no [module]"),
        ("[megatron fix: routed tokens", "no [module]"),
        ("[megatorn] fix: x", "did you mean 'megatron'?"),
        ("[megatron, ] fix: x", "module '' is not known"),
        ("[] fix: x", "module '' is not known"),
        ("[megatron] feature: x", "did you mean 'feat'?"),
        ("[doc] docs: x", "type 'docs' is not known; write [doc] chore or [doc] fix instead"),
        ("[misc] perf: x", "write [perf] refactor or [perf] feat instead"),
        ("[misc] style: x", "write chore instead"),
        ("[megatron] Fix: x", "did you mean 'fix'?"),
        ("[megatron] fix x", "no 'type:'"),
        ("[megatron] fix:", "no description"),
        ("[megatron] fix:x", "no space"),
        ("[breaking][cfg] fix: x", "[BREAKING], in capitals"),
        ("[BREAKING] fix: x", "no [module]"),
        ("[4/3] [cfg] fix: x", "part 4 of a series of 3"),
        ("[0/N] [cfg] fix: x", "part 0"),
        ("[megatron][cfg] fix: x", "type '[cfg] fix' is not known"),
    ],
)
def test_bad_titles_say_why(title, said):
    problems = script.title_problems(title)
    assert any(said in problem for problem in problems), problems


def test_every_problem_is_said_at_once():
    assert len(script.title_problems("[megatorn, cfgs] feet:x")) == 4


def run(*arguments, **environment):
    command = [sys.executable, "-I", str(ROOT / "scripts/check_pr_title.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_exit_codes_with_nothing_installed():
    assert run("[cfg] fix: x").returncode == 0
    assert run(PR_TITLE="[cfg] fix: x").returncode == 0
    bad = run(PR_TITLE="$(touch never) `x`")
    assert bad.returncode == 1 and "no [module]" in bad.stderr
    assert run().returncode == 2
    assert run("[cfg] fix: x", "more").returncode == 2
