# SPDX-License-Identifier: Apache-2.0
"""Workflows and actions keep the rules of workflow_checks, and each rule is shown to fail on a planted fault."""

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
ACTIONS = sorted((REPO_ROOT / ".github/actions").glob("*/action.yml"))
EXPECTED = "check-pr-title cpu_unit_tests docs gpu_unit_tests model nightly pre-commit".split()


def planted(stem: str, old: str, new: str) -> str:
    """The text of a workflow or an action with one place changed."""
    assert old in read(stem), f"{stem} no longer says {old!r}; plant the fault of this test elsewhere"
    return read(stem).replace(old, new, 1)


def read(stem: str) -> str:
    """The text of a workflow, or of the action setup-env."""
    path = REPO_ROOT / ".github/actions" / stem / "action.yml"
    return (path if path.is_file() else FOLDER / f"{stem}.yml").read_text(encoding="utf-8")


def report(problems: list[str]) -> str:
    return "\n".join(["", *problems])


def test_the_workflows_are_there():
    assert [path.name for path in FILES] == [f"{stem}.yml" for stem in EXPECTED]


@pytest.mark.parametrize("stem", EXPECTED)
def test_a_workflow_keeps_the_rules(stem):
    problems = checks.check_workflow(stem, read(stem))
    assert not problems, report(problems)


def test_actions_of_our_own_keep_the_rules():
    problems = [
        problem for path in ACTIONS for problem in checks.check_action(path.parent.name, path.read_text("utf-8"))
    ]
    assert ACTIONS and not problems, report(problems)


def test_an_action_has_one_version_everywhere():
    sources = [path.read_text(encoding="utf-8") for path in sorted((REPO_ROOT / ".github").rglob("*.yml"))]
    uses = re.findall(r"uses: ([\w.-]+/[\w.-]+)\S*@(\S+) # (\S+)", "\n".join(sources))
    assert len(uses) > 8
    assert len({repository for repository, _, _ in uses}) == len(set(uses)), sorted(set(uses))


def test_the_readme_s_test_command_is_what_ci_runs():
    command = "bash scripts/test.sh"
    assert command in (REPO_ROOT / "README.md").read_text(encoding="utf-8")
    assert f"run: {command}\n" in read("cpu_unit_tests")


def test_nothing_is_tested_or_built_twice_on_a_pull_request():
    runs = {stem: re.findall(r"run: (.*)", read(stem)) for stem in EXPECTED}
    assert [stem for stem in EXPECTED if "bash scripts/test.sh" in " ".join(runs[stem])] == ["cpu_unit_tests"]
    assert "bash scripts/test.sh --ignore=tests/models" in runs["cpu_unit_tests"]
    assert ".venv/bin/python -m pytest tests/models" in " ".join(runs["model"])
    assert len(runs["docs"]) == 1 and "-m sphinx" in runs["docs"][0]
    assert [run for run in runs["gpu_unit_tests"] if "test" in run] == []  # scripts/gpu_check.sh runs them all


def test_what_the_tests_of_the_models_import_starts_them():
    patterns = checks.load(read("model"))["on"]["pull_request"]["paths"]
    named = {path for pattern in patterns for path in REPO_ROOT.glob(pattern.replace("/**", "/**/*"))}
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (REPO_ROOT / "tests/models").rglob("*.py"))
    imported = {
        name.replace(".", "/") for name in re.findall(r"^\s*from (tests\.[\w.]+) import", sources, re.MULTILINE)
    }
    files = [REPO_ROOT / f"{name}.py" for name in imported if (REPO_ROOT / f"{name}.py").is_file()]
    missing = [str(path.relative_to(REPO_ROOT)) for path in files if path not in named]
    assert len(files) > 3 and not missing, f".github/workflows/model.yml: add to paths: {', '.join(missing)}"


def actionlint(path: Path, source: str) -> str:
    """What actionlint says, one line a problem; without shellcheck, which not every machine has."""
    path.write_text(source, encoding="utf-8")
    program = Path(sysconfig.get_path("scripts")) / "actionlint"
    command = [str(program), "-oneline", "-no-color", "-shellcheck=", "-pyflakes=", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parents[2])
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    """A file to lint, among the workflows of a repository with our actions and labels."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(REPO_ROOT / ".github", root / ".github")
    (root / ".git").mkdir()
    return root / ".github/workflows/linted.yml"


def lint(workflow: Path, stem: str, source: str) -> str:
    as_workflow = checks.with_tags if stem in EXPECTED else checks.action_as_workflow
    return actionlint(workflow, as_workflow(source))


@pytest.mark.parametrize("stem", [*EXPECTED, *(path.parent.name for path in ACTIONS)])
def test_actionlint_finds_nothing(workflow, stem):
    found = lint(workflow, stem, read(stem))
    assert not found, f"{stem}:\n{found}"


@pytest.mark.parametrize(
    ("stem", "old", "new", "said"),
    [
        ("gpu_unit_tests", "github.event_name !=", "github.evnt_name !=", 'property "evnt_name" is not defined'),
        ("gpu_unit_tests", "matrix.gpus }} GPU", "matrix.gpu }} GPU", 'property "gpu" is not defined'),
        ("gpu_unit_tests", "linux, x64, gpu]", "linux, x64, gpux]", 'label "gpux" is unknown'),
        ("nightly", 'cron: "17 2', 'cron: "77 2', "invalid CRON format"),
        ("cpu_unit_tests", "${{ failure() }}", "${{ failed() }}", 'undefined function "failed"'),
        ("pre-commit", "pull_request:\n", "pull_requests:\n", "unknown Webhook event"),
        ("docs", "if-no-files-found", "if-no-file-found", 'input "if-no-file-found" is not defined'),
        ("setup-env", "steps.python.outputs", "steps.pyton.outputs", 'property "pyton" is not defined'),
        ("setup-env", "outputs.python-path", "outputs.python-pth", 'property "python-pth" is not defined'),
        ("setup-env", "outputs.cache-hit", "outputs.cache-hits", 'property "cache-hits" is not defined'),
        ("setup-env", "runner.os", "runner.system", 'property "system" is not defined'),
        ("setup-env", "        key: venv", "        kee: venv", 'missing input "key"'),
    ],
)
def test_actionlint_finds_a_planted_fault(workflow, stem, old, new, said):
    assert said in lint(workflow, stem, planted(stem, old, new))


def test_an_action_with_inputs_and_outputs_is_linted(workflow):
    action = (
        "name: a\ninputs:\n  x:\n    required: true\noutputs:\n  y:\n    value: ${{ steps.s.outputs.y }}\n"
        "runs:\n  using: composite\n  steps:\n    - id: s\n      run: echo ${{ inputs.x }}\n      shell: bash\n"
    )
    assert lint(workflow, "a", action) == ""
    assert 'property "z" is not defined' in lint(workflow, "a", action.replace("inputs.x", "inputs.z"))
    assert 'property "t" is not defined' in lint(workflow, "a", action.replace("steps.s.", "steps.t."))


@pytest.mark.parametrize(
    ("stem", "old", "new", "said"),
    [
        ("gpu_unit_tests", "name: gpu_unit_tests", "name: gpu", "write that of its file, 'gpu_unit_tests'"),
        ("gpu_unit_tests", "  pull_request:\n", "  pull_request_target:\n", "write a mapping of"),
        ("gpu_unit_tests", "contents: read", "contents: write", "permissions must be"),
        ("gpu_unit_tests", "permissions:\n  contents: read\n", "", "permissions must be"),
        ("gpu_unit_tests", "  cancel-in-progress", "  cancel", "set concurrency"),
        ("gpu_unit_tests", "timeout-minutes: 60", "timeout-minutes: 600", "set timeout-minutes"),
        ("gpu_unit_tests", "    timeout-minutes: 60\n", "", "set timeout-minutes"),
        ("gpu_unit_tests", "    if: >-", "    env: >-", "forks"),
        ("gpu_unit_tests", " == github.repository", " != ''", "forks"),
        ("gpu_unit_tests", "vars.GPU_RUNNER == 'true' &&", "", "begin its 'if' with vars.GPU_RUNNER == 'true'"),
        ("gpu_unit_tests", "vars.GPU_RUNNER == 'true' &&", "vars.GPU_RUNNER == 'true' ||", "begin its 'if'"),
        ("nightly", "    if: ${{ vars.GPU_RUNNER", "    # if: ${{ vars.GPU_RUNNER", "begin its 'if'"),
        ("gpu_unit_tests", "[self-hosted, linux, x64, gpu]", "ubuntu-latest", "no fixed version"),
        ("gpu_unit_tests", "[self-hosted, linux, x64, gpu]", "[self-hosted, gpus]", "not those of our runners"),
        ("gpu_unit_tests", "dd907a8 # v5.0.0", "dd907a8", "add a comment such as # v1.2.3"),
        ("gpu_unit_tests", "08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0", "v5", "full commit hash"),
        ("gpu_unit_tests", "persist-credentials: false", "persist-credentials: true", "token on disk"),
        ("gpu_unit_tests", "gpu_ci.sh build", "gpus_ci.sh build", "runs docker/gpus_ci.sh, which does not exist"),
        ("gpu_unit_tests", "gpu_ci.sh build", "gpu_ci.sh ${{ github.event.pull_request.title }}", "stranger"),
        ("gpu_unit_tests", "gpu_ci.sh build", "gpu_ci.sh build ${{ secrets.TOKEN }}", "uses a secret"),
        ("gpu_unit_tests", "        run: bash", "        runs: bash", "unknown key 'runs'; write run"),
        ("gpu_unit_tests", "    strategy:", "    stategy:", "unknown key 'stategy'; write strategy"),
        ("gpu_unit_tests", "concurrency:", "concurency:", "unknown key 'concurency'; write concurrency"),
        ("gpu_unit_tests", "outputs/exactness_gpu.md", "docs/exactness.md", "name a file or folder below"),
        ("gpu_unit_tests", "outputs/exactness_gpu.md", "outputs/*.md", "name a file or folder below"),
        ("gpu_unit_tests", "outputs/exactness_gpu.md", "outputs/exactness.md", "keeps outputs/exactness.md, which no"),
        ("gpu_unit_tests", "scripts/gpu_check.sh", "scripts/test.sh", "no earlier command of this job writes"),
        ("docs", "path: docs/_build/html", "path: docs/_build/htm", "keeps docs/_build/htm, which no earlier"),
        ("docs", "path: docs/_build/html", "path: site", "keeps 'site'; name a file or folder below"),
        ("docs", "          path: docs/_build/html\n", "", "keeps ''; name a file or folder below"),
        ("docs", "docs docs/_build/html\n", "docs docs/_build/site\n", "keeps docs/_build/html, which no earlier"),
        ("docs", "if-no-files-found: error", "if-no-files-found: warn", "set if-no-files-found: error"),
        (
            "nightly",
            "run/metrics.jsonl",
            "run/metric.jsonl",
            "keeps outputs/nightly/run/metric.jsonl, which no earlier",
        ),
        ("docs", '"docs/**"', '"doc/**"', "the path 'doc/**' matches no file"),
        ("docs", '      - ".github/actions/**"\n', "", "a change of .github/actions/** would not start it; add it"),
        ("model", '      - ".github/workflows/model.yml"\n', "", "a change of .github/workflows/model.yml would not"),
        (
            "pre-commit",
            "--all-files",
            "--all-files ${{ steps.hooks.outputs.files }}",
            "no earlier step has the id 'hooks'",
        ),
    ],
)
def test_a_planted_fault_is_found(stem, old, new, said):
    problems = checks.check_workflow(stem, planted(stem, old, new))
    assert any(said in problem for problem in problems), problems
    assert all(problem.startswith(f".github/workflows/{stem}.yml: ") for problem in problems)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps.python.outputs.python-version", "steps.pyton.outputs.python-version", "the ids before it: python"),
        ("      id: python\n", "", "no earlier step has the id 'python'; the ids before it: requirements"),
        ("hash=$(", "sum=$(", "steps.requirements.outputs.hash, which that step does not write into $GITHUB_OUTPUT"),
        ("scripts/setup_env.sh --hash", "scripts/set_env.sh --hash", "runs scripts/set_env.sh, which does not exist"),
        ("      shell: bash\n", "", "set shell: bash"),
        ("using: composite", "using: node24", "using: composite; write it"),
        ("d7c80228e7c # v6.0.0", "d7c80228e7c", "add a comment such as # v1.2.3"),
    ],
)
def test_a_fault_planted_in_an_action_is_found(old, new, said):
    problems = checks.check_action("setup-env", planted("setup-env", old, new))
    assert any(said in problem for problem in problems), problems
    assert all(
        problem.startswith(".github/actions/setup-env/action.yml: step") or "runs" in problem for problem in problems
    )


def test_the_environment_is_kept_before_any_test_can_fail():
    steps = [step.get("uses") or step["run"] for step in yaml.safe_load(read("setup-env"))["runs"]["steps"]]
    assert [step.partition("@")[0] for step in steps[2:]] == [
        "actions/cache/restore",
        "bash scripts/setup_env.sh",
        "actions/cache/save",
    ], "actions/cache alone saves only after a job that passes; restore, install and save apart"


def test_github_s_expressions_are_closed():
    for path in [*FILES, *ACTIONS]:
        source = path.read_text(encoding="utf-8")
        closed = re.findall(r"\$\{\{[^{}]+\}\}", source)
        assert source.count("${{") == len(closed), f"{path}: a '${{{{' has no '}}}}'; close it"
