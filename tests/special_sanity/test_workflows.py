# SPDX-License-Identifier: Apache-2.0
"""The workflows keep the rules of workflow_checks, and each rule is shown to fail on a planted fault."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.special_sanity import workflow_checks as checks
from tests.special_sanity.checks import REPO_ROOT

FOLDER = REPO_ROOT / ".github/workflows"
FILES = sorted(FOLDER.iterdir())
EXPECTED = "check-pr-title cpu_unit_tests docs gpu_unit_tests model nightly pre-commit".split()


def test_the_workflows_are_there():
    assert [path.name for path in FILES] == [f"{stem}.yml" for stem in EXPECTED]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_keeps_the_rules(path):
    assert checks.check_workflow(path.stem, path.read_text(encoding="utf-8")) == []


def test_actions_of_our_own_keep_the_rules_of_steps():
    for path in sorted((REPO_ROOT / ".github/actions").glob("*/action.yml")):
        source = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(source)
        assert tree["runs"]["using"] == "composite"
        for step in tree["runs"]["steps"]:
            assert list(checks.check_step(step, source, path.parent.name)) == []
            assert "run" not in step or step["shell"] == "bash"


def test_an_action_has_one_version_everywhere():
    sources = [path.read_text(encoding="utf-8") for path in sorted((REPO_ROOT / ".github").rglob("*.yml"))]
    uses = re.findall(r"uses: (\w[\w/.-]+)@(\S+) # (\S+)", "\n".join(sources))
    assert len(uses) > 8
    assert len({name for name, _, _ in uses}) == len(set(uses))


def test_the_readme_s_test_command_is_what_ci_runs():
    command = "bash scripts/test.sh"
    assert command in (REPO_ROOT / "README.md").read_text(encoding="utf-8")
    assert f"run: {command}\n" in (FOLDER / "cpu_unit_tests.yml").read_text(encoding="utf-8")


def actionlint(*files: Path, root: Path) -> str:
    """What actionlint says, one line a problem; without shellcheck, which not every machine has."""
    program = Path(sysconfig.get_path("scripts")) / "actionlint"
    command = [str(program), "-oneline", "-no-color", "-shellcheck=", "-pyflakes=", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_actionlint_finds_nothing():
    assert actionlint(*FILES, root=REPO_ROOT) == ""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of .github in a repository of its own, to plant faults in."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(REPO_ROOT / ".github", root / ".github")
    (root / ".git").mkdir()
    return root


@pytest.mark.parametrize(
    ("stem", "old", "new", "said"),
    [
        ("gpu_unit_tests", "github.event_name !=", "github.evnt_name !=", 'property "evnt_name" is not defined'),
        ("gpu_unit_tests", "matrix.gpus }} GPU", "matrix.gpu }} GPU", 'property "gpu" is not defined'),
        ("gpu_unit_tests", "linux, x64, gpu]", "linux, x64, gpux]", 'label "gpux" is unknown'),
        ("nightly", 'cron: "17 2', 'cron: "77 2', "invalid CRON format"),
        ("cpu_unit_tests", "${{ failure() }}", "${{ failed() }}", 'undefined function "failed"'),
        ("pre-commit", "pull_request:\n", "pull_requests:\n", "unknown Webhook event"),
    ],
)
def test_actionlint_finds_a_planted_fault(checkout, stem, old, new, said):
    source = (FOLDER / f"{stem}.yml").read_text(encoding="utf-8")
    assert old in source
    path = checkout / ".github/workflows" / f"{stem}.yml"
    path.write_text(source.replace(old, new, 1), encoding="utf-8")
    found = actionlint(path, root=checkout)
    path.write_text(source, encoding="utf-8")
    assert said in found


GOOD = (FOLDER / "gpu_unit_tests.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: gpu_unit_tests", "name: gpu", "its name"),
        ("  pull_request:\n", "  pull_request_target:\n", "triggers"),
        ("contents: read", "contents: write", "permissions"),
        ("permissions:\n  contents: read\n", "", "permissions"),
        ("  cancel-in-progress", "  cancel", "concurrency"),
        ("timeout-minutes: 60", "timeout-minutes: 600", "timeout"),
        ("    timeout-minutes: 60\n", "", "timeout"),
        ("    if: ${{ github.event_name", "    env: ${{ github.event_name", "forks"),
        (" == github.repository", " != ''", "forks"),
        ("[self-hosted, linux, x64, gpu]", "ubuntu-latest", "fixed version"),
        ("[self-hosted, linux, x64, gpu]", "[self-hosted, gpus]", "labels"),
        ("dd907a8 # v5.0.0", "dd907a8", "version"),
        ("08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0", "v5", "commit hash"),
        ("persist-credentials: false", "persist-credentials: true", "token on disk"),
        ("docker/gpu_ci.sh build", "docker/gpus_ci.sh build", "docker/gpus_ci.sh does not exist"),
        ("docker/gpu_ci.sh build", "docker/gpu_ci.sh ${{ github.event.pull_request.title }}", "stranger"),
        ("docker/gpu_ci.sh build", "docker/gpu_ci.sh build ${{ secrets.TOKEN }}", "secret"),
        ("        run: bash docker/gpu_ci.sh build", "        runs: bash docker/gpu_ci.sh build", "unknown key 'runs'"),
        ("    strategy:", "    stategy:", "unknown key 'stategy'"),
        ("concurrency:", "concurency:", "unknown key 'concurency'"),
    ],
)
def test_a_planted_fault_is_found(old, new, said):
    assert old in GOOD
    problems = checks.check_workflow("gpu_unit_tests", GOOD.replace(old, new, 1))
    assert any(said in problem for problem in problems), problems


def test_github_s_expressions_are_closed():
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        assert source.count("${{") == len(re.findall(r"\$\{\{[^{}]+\}\}", source)), path
