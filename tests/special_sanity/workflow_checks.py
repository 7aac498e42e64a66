# SPDX-License-Identifier: Apache-2.0
"""Rules for GitHub workflows as a function from a file's text to violations.

actionlint knows what GitHub accepts. These are our own rules: pinned actions, fewest rights, no code from forks on our
machines, no text of strangers in commands, and every file that a command names is there.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.special_sanity.checks import REPO_ROOT

# Folders whose files commands name.
PATHS = re.compile(r"(?<![\w./-])(?:scripts|docker|tests|examples|docs|verl|\.ci)/[\w./-]*\w")
WRITTEN = "docs/_build/"  # by the commands themselves
# What somebody who opens a pull request writes: in a command it would be run.
UNTRUSTED = re.compile(r"\$\{\{[^}]*\b(?:title|body|head_ref|head\.ref|head\.label|message|name|email)\b[^}]*\}\}")
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
RUNNER_WORDS = {"self-hosted", "linux", "x64", "gpu"}
STEP_KEYS = {"name", "id", "if", "uses", "with", "run", "env", "shell", "continue-on-error", "working-directory"}
JOB_KEYS = {"name", "if", "needs", "runs-on", "strategy", "timeout-minutes", "steps", "env", "permissions"}
TOP_KEYS = {"name", "on", "permissions", "concurrency", "jobs", "env"}
TRIGGERS = {"push", "pull_request", "workflow_dispatch", "schedule"}


def load(source: str) -> dict[str, Any]:
    """A workflow as a mapping; ``on``, which YAML 1.1 reads as true, is a string again."""
    tree = yaml.safe_load(source)
    return {"on" if key is True else key: value for key, value in tree.items()}


def check_step(step: dict[str, Any], source: str, where: str) -> Iterator[str]:
    """A step runs a pinned action, an action of this repository, or commands whose files exist."""
    for key in step.keys() - STEP_KEYS:
        yield f"{where}: unknown key {key!r}"
    if ("uses" in step) == ("run" in step):
        yield f"{where}: needs one of 'uses' and 'run'"
    uses, run = step.get("uses", "./"), step.get("run", "")
    if uses.startswith("./"):
        if not (REPO_ROOT / uses / "action.yml").is_file() and uses != "./":
            yield f"{where}: {uses} has no action.yml"
    elif not PINNED.fullmatch(uses):
        yield f"{where}: {uses} is not pinned by a full commit hash"
    elif not re.search(re.escape(uses) + r" # v\d+\.\d+\.\d+$", source, re.MULTILINE):
        yield f"{where}: {uses} has no comment with its version"
    if uses.startswith("actions/checkout@") and step.get("with", {}).get("persist-credentials") is not False:
        yield f"{where}: the checkout leaves its token on disk; set persist-credentials: false"
    if UNTRUSTED.search(run):
        yield f"{where}: text of a stranger in a command; hand it over in env"
    for path in PATHS.findall(run):
        if not (REPO_ROOT / path).exists() and not path.startswith(WRITTEN):
            yield f"{where}: {path} does not exist"


def check_job(job: dict[str, Any], source: str, where: str) -> Iterator[str]:
    """A job ends by itself, runs on a machine with a fixed version, and has no more rights than the workflow."""
    for key in job.keys() - JOB_KEYS:
        yield f"{where}: unknown key {key!r}"
    if not isinstance(job.get("timeout-minutes"), int) or not 0 < job["timeout-minutes"] <= 360:
        yield f"{where}: no timeout-minutes of at most 360"
    runner = job.get("runs-on")
    if isinstance(runner, list):
        if "self-hosted" not in runner or set(runner) - RUNNER_WORDS:
            yield f"{where}: labels {runner} are not those of our runners"
        if "pull_request" in load(source)["on"] and "head.repo.full_name == github.repository" not in job.get("if", ""):
            yield f"{where}: code from forks would reach our own machine"
    elif not re.fullmatch(r"ubuntu-\d\d\.04", str(runner)):
        yield f"{where}: runs-on {runner!r} is no fixed version"
    if "permissions" in job:
        yield f"{where}: permissions belong to the workflow"
    if not job.get("steps"):
        yield f"{where}: no steps"
    for number, step in enumerate(job.get("steps", []), start=1):
        yield from check_step(step, source, f"{where}, step {number}")


def check_workflow(stem: str, source: str) -> list[str]:
    """Everything that is wrong with the workflow in ``<stem>.yml``."""
    tree = load(source)
    problems = [f"unknown key {key!r}" for key in sorted(tree.keys() - TOP_KEYS)]
    if tree.get("name") != stem:
        problems.append(f"its name is {tree.get('name')!r}, its file's {stem!r}")
    triggers = tree.get("on")
    if not isinstance(triggers, dict) or not triggers or triggers.keys() - TRIGGERS:
        problems.append(f"triggers {triggers} are not a mapping of {', '.join(sorted(TRIGGERS))}")
    if tree.get("permissions") != {"contents": "read"}:
        problems.append("permissions must be contents: read and nothing else")
    if not isinstance(tree.get("concurrency"), dict) or tree["concurrency"].keys() != {"group", "cancel-in-progress"}:
        problems.append("no concurrency with group and cancel-in-progress")
    if "secrets." in source:
        problems.append("uses a secret")
    if "\t" in source or any(len(line) > 160 for line in source.splitlines()):
        problems.append("tabs, or lines of more than 160 characters")
    for name, job in (tree.get("jobs") or {"": {}}).items():
        problems += check_job(job, source, f"job {name!r}") if triggers else []
    return problems
