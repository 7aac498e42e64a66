# SPDX-License-Identifier: Apache-2.0
"""Rules for GitHub workflows, and for actions of our own, as functions from a file's text to violations.

actionlint knows what GitHub accepts. These are our own rules: pinned actions, fewest rights, no code from forks on our
machines, no text of strangers in commands, every file that a command names is there, and every artefact is written.
Every violation says where, what is wrong, and what to do.
"""

import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any

import yaml

from tests.special_sanity.checks import REPO_ROOT

# Folders whose files commands name.
PATHS = re.compile(r"(?<![\w./-])(?:scripts|docker|tests|examples|docs|verl|\.ci)/[\w./-]*\w")
WRITTEN = ("docs/_build/", "outputs/")  # by the commands themselves; git ignores both
# What somebody who opens a pull request writes: in a command it would be run.
UNTRUSTED = re.compile(r"\$\{\{[^}]*\b(?:title|body|head_ref|head\.ref|head\.label|message|name|email)\b[^}]*\}\}")
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
STEP_OUTPUT = re.compile(r"\bsteps\.([\w-]+)\.outputs\.([\w-]+)")
RUNNER_WORDS = {"self-hosted", "linux", "x64", "gpu"}
STEP_KEYS = {"name", "id", "if", "uses", "with", "run", "env", "shell", "continue-on-error", "working-directory"}
JOB_KEYS = {"name", "if", "needs", "runs-on", "strategy", "timeout-minutes", "steps", "env", "permissions"}
TOP_KEYS = {"name", "on", "permissions", "concurrency", "jobs", "env"}
TRIGGERS = {"push", "pull_request", "workflow_dispatch", "schedule"}


def load(source: str) -> dict[str, Any]:
    """A workflow as a mapping; ``on``, which YAML 1.1 reads as true, is a string again."""
    tree = yaml.safe_load(source)
    return {"on" if key is True else key: value for key, value in tree.items()}


def unknown_keys(found: Collection[str], known: Collection[str]) -> Iterator[str]:
    """A sentence for every key that is none of the known ones, with the nearest of them."""
    for key in sorted(set(found) - set(known)):
        near = difflib.get_close_matches(key, known, 1) or ["one of " + ", ".join(sorted(known))]
        yield f"unknown key {key!r}; write {near[0]}"


def check_step(step: dict[str, Any], source: str) -> Iterator[str]:
    """A step runs a pinned action, an action of this repository, or commands whose files exist."""
    yield from unknown_keys(step, STEP_KEYS)
    if ("uses" in step) == ("run" in step):
        yield "a step has either 'uses' or 'run'; write one of them"
    uses, run = step.get("uses", "./"), step.get("run", "")
    if uses.startswith("./"):
        if not (REPO_ROOT / uses / "action.yml").is_file() and uses != "./":
            yield f"{uses} has no action.yml; mend the path"
    elif not PINNED.fullmatch(uses):
        yield f"{uses} is not pinned by a full commit hash; write the hash of the release behind the @"
    elif not re.search(re.escape(uses) + r" # v\d+\.\d+\.\d+$", source, re.MULTILINE):
        yield f"{uses} does not say which version the hash is; add a comment such as # v1.2.3"
    if uses.startswith("actions/checkout@") and step.get("with", {}).get("persist-credentials") is not False:
        yield "the checkout leaves its token on disk; set persist-credentials: false"
    if UNTRUSTED.search(run):
        yield "text of a stranger in a command; hand it over in env"
    for path in PATHS.findall(run):
        if not (REPO_ROOT / path).exists() and not path.startswith(WRITTEN):
            yield f"runs {path}, which does not exist; mend the path"


def check_outputs(step: dict[str, Any], before: list[dict[str, Any]]) -> Iterator[str]:
    """A step uses outputs of earlier steps only, and of commands only those that they write."""
    ids = {other["id"]: other for other in before if "id" in other}
    for name, output in sorted(set(STEP_OUTPUT.findall(yaml.safe_dump(step, width=10_000)))):
        if name not in ids:
            known = ", ".join(sorted(ids)) or "none"
            yield f"uses steps.{name}, but no earlier step has the id {name!r}; the ids before it: {known}"
        elif "run" in ids[name] and not re.search(rf"\b{output}=.*GITHUB_OUTPUT", ids[name]["run"]):
            yield f"uses steps.{name}.outputs.{output}, which that step does not write into $GITHUB_OUTPUT"


def commands(steps: list[dict[str, Any]]) -> str:
    """What the steps run, with the text of the shell scripts that they name.

    Comments are left out. A variable that is set to a default, as in ``out="${OUT:-outputs/x}"``, is replaced by it.
    """
    text = "\n".join(step.get("run", "") for step in steps)
    scripts = [REPO_ROOT / name for name in dict.fromkeys(PATHS.findall(text)) if name.endswith(".sh")]
    for script in scripts:
        shell = re.sub(r"^\s*#.*$", "", script.read_text(encoding="utf-8"), flags=re.M) if script.is_file() else ""
        for name, default in re.findall(r'^\s*(\w+)="?\$\{\w+:-([^}"]*)\}', shell, re.MULTILINE):
            shell = re.sub(rf"\${name}\b|\$\{{{name}\}}", lambda _, default=default: default, shell)
        text += "\n" + shell
    return text


def check_artefact(step: dict[str, Any], before: list[dict[str, Any]]) -> Iterator[str]:
    """What a step keeps is a file or folder that an earlier command of the job names, and its absence is an error."""
    if not step.get("uses", "").startswith("actions/upload-artifact@"):
        return
    settings, text = step.get("with", {}), commands(before)
    for path in str(settings.get("path", "")).split() or [""]:
        if not f"{path}/".startswith(WRITTEN) or re.search(r"[*?\[]", path):
            yield f"keeps {path!r}; name a file or folder below {' or '.join(WRITTEN)}, where commands write"
        elif not re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", text):
            yield f"keeps {path}, which no earlier command of this job writes; mend the path, or write it"
    if settings.get("if-no-files-found") != "error":
        yield "an artefact that is missing goes unnoticed; set if-no-files-found: error"


def check_steps(steps: list[dict[str, Any]], source: str, where: str) -> Iterator[str]:
    """All rules of the steps of a job or an action."""
    for number, step in enumerate(steps, start=1):
        before = steps[: number - 1]
        problems = [*check_step(step, source), *check_outputs(step, before), *check_artefact(step, before)]
        for problem in problems:
            yield f"{where}step {number} ({step.get('name') or step.get('uses')}): {problem}"


def check_job(job: dict[str, Any], source: str) -> Iterator[str]:
    """A job ends by itself, runs on a machine with a fixed version, and has no more rights than the workflow."""
    yield from unknown_keys(job, JOB_KEYS)
    if not isinstance(job.get("timeout-minutes"), int) or not 0 < job["timeout-minutes"] <= 360:
        yield "a job that hangs would hold its machine; set timeout-minutes to 360 or less"
    runner, condition = job.get("runs-on"), job.get("if", "")
    if isinstance(runner, list):
        if "self-hosted" not in runner or set(runner) - RUNNER_WORDS:
            yield f"labels {runner} are not those of our runners; write {', '.join(sorted(RUNNER_WORDS))}"
        if not re.match(r"\$\{\{ vars\.GPU_RUNNER == 'true' (&&|\}\})", condition):
            yield "would wait where there is no such runner; begin its 'if' with vars.GPU_RUNNER == 'true'"
        if "pull_request" in load(source)["on"] and "head.repo.full_name == github.repository" not in condition:
            yield "code from forks would reach our machine; compare head.repo.full_name with github.repository in 'if'"
    elif not re.fullmatch(r"ubuntu-\d\d\.04", str(runner)):
        yield f"runs-on {runner!r} is no fixed version; write one such as ubuntu-24.04"
    if "permissions" in job:
        yield "permissions belong to the workflow; take them away here"
    if not job.get("steps"):
        yield "no steps; add some, or take the job away"


def check_paths(stem: str, triggers: dict[str, Any], source: str) -> Iterator[str]:
    """A filter of paths names what exists, the workflow itself and the action that makes the environment."""
    for event, settings in triggers.items():
        patterns = settings.get("paths", []) if isinstance(settings, dict) else []
        for pattern in patterns:
            if not any(REPO_ROOT.glob(pattern.replace("**.", "**/*."))):
                yield f"on {event}: the path {pattern!r} matches no file; mend it or take it away"
        needed = [f".github/workflows/{stem}.yml"]
        needed += [".github/actions/**"] if "uses: ./.github/actions/" in source else []
        for name in set(needed) - set(patterns) if patterns else ():
            yield f"on {event}: a change of {name} would not start it; add it to paths"


def check_workflow(stem: str, source: str) -> list[str]:
    """Everything that is wrong with the workflow in ``<stem>.yml``."""
    tree = load(source)
    problems = list(unknown_keys(tree, TOP_KEYS))
    if tree.get("name") != stem:
        problems.append(f"its name is {tree.get('name')!r}; write that of its file, {stem!r}")
    triggers = tree.get("on")
    if not isinstance(triggers, dict) or not triggers or triggers.keys() - TRIGGERS:
        problems.append(f"triggers {triggers}; write a mapping of {', '.join(sorted(TRIGGERS))}")
        triggers = {}
    problems += check_paths(stem, triggers, source)
    if tree.get("permissions") != {"contents": "read"}:
        problems.append("permissions must be contents: read and nothing else")
    if not isinstance(tree.get("concurrency"), dict) or tree["concurrency"].keys() != {"group", "cancel-in-progress"}:
        problems.append("runs would pile up; set concurrency with group and cancel-in-progress")
    if "secrets." in source:
        problems.append("uses a secret, which code of a pull request could read; do without")
    if "\t" in source or any(len(line) > 160 for line in source.splitlines()):
        problems.append("tabs, or lines of more than 160 characters; write it shorter, with spaces")
    if not tree.get("jobs"):
        problems.append("no jobs; add some, or take the file away")
    for name, job in (tree.get("jobs") or {}).items() if triggers else ():
        problems += [f"job {name!r}: {problem}" for problem in check_job(job, source)]
        problems += check_steps(job.get("steps") or [], source, f"job {name!r}, ")
    return [f".github/workflows/{stem}.yml: {problem}" for problem in problems]


def check_action(name: str, source: str) -> list[str]:
    """Everything that is wrong with the action in ``.github/actions/<name>/action.yml``."""
    runs = yaml.safe_load(source).get("runs") or {}
    problems = [] if runs.get("using") == "composite" else ["'runs' does not say using: composite; write it"]
    problems += check_steps(runs.get("steps") or [], source, "")
    for step in runs.get("steps") or []:
        if "run" in step and step.get("shell") != "bash":
            problems.append(f"step {step.get('name')!r}: commands of an action need a shell; set shell: bash")
    if "secrets." in source:
        problems.append("uses a secret, which code of a pull request could read; do without")
    return [f".github/actions/{name}/action.yml: {problem}" for problem in problems]


def with_tags(source: str) -> str:
    """The text with every action by the tag of its major version: actionlint knows inputs and outputs by tag only."""
    return re.sub(r"(uses: [\w./-]+)@[0-9a-f]{40} # (v\d+)\.\d+\.\d+", r"\1@\2", source)


def action_as_workflow(source: str) -> str:
    """An action's steps as the job of a workflow that others call: actionlint reads no actions."""
    action = yaml.safe_load(with_tags(source))
    outputs = {name: output["value"] for name, output in (action.get("outputs") or {}).items()}
    job = {"runs-on": "ubuntu-24.04", "steps": action["runs"]["steps"]} | ({"outputs": outputs} if outputs else {})
    inputs = {name: {"type": "string"} for name in action.get("inputs") or {}}
    call = {"workflow_call": {"inputs": inputs} if inputs else None}
    return yaml.safe_dump({"name": action["name"], "on": call, "jobs": {"action": job}}, sort_keys=False, width=10_000)
