# SPDX-License-Identifier: Apache-2.0
"""Check the title of a pull request: ``[1/N] [BREAKING][module, module] type: description``.

The number of a series and ``[BREAKING]`` are optional. The title comes from the command line or from the environment
variable PR_TITLE. Only the standard library is used, so that the check needs no environment.

Exit code 0: the title is fine. 1: it is not, and stderr says what to change. 2: there is no title.
"""

import difflib
import os
import re
import sys

MODULES = (
    *("algo", "cfg", "ci", "ckpt", "data", "deployment", "doc", "docker", "env", "fsdp", "fully_async", "hardware"),
    *("megatron", "misc", "model", "one_step_off", "perf", "ray", "recipe", "reward", "rollout", "sglang"),
    *("single_controller", "tests", "tool", "trainer", "training_utils", "trtllm", "veomni", "vllm", "worker"),
)
TYPES = ("feat", "fix", "refactor", "chore", "test")
# Types that other projects use -> what to write here.
INSTEAD = {
    "docs": "[doc] chore or [doc] fix",
    "perf": "[perf] refactor or [perf] feat",
    "style": "chore",
    "build": "[env] chore",
    "ci": "[ci] chore",
}
FORM = "[module, module] type: description, with [1/3] and [BREAKING] before it where they apply"

_SERIES = re.compile(r"\[(\d+)/(\d+|N)\]\s*")
_BREAKING = re.compile(r"\[BREAKING\]\s*")
_MODULES = re.compile(r"\[([^\[\]]*)\]\s*")


def _not_known(kind: str, name: str, known: tuple[str, ...]) -> str:
    if kind == "type" and name.lower() in INSTEAD:
        return f"type {name!r} is not known; write {INSTEAD[name.lower()]} instead"
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{kind} {name!r} is not known{hint} (known: {', '.join(known)})"


def title_problems(title: str) -> list[str]:
    """Everything that is wrong with a title, in words; empty when it is fine."""
    problems = []
    rest = title.strip()
    if series := _SERIES.match(rest):
        part, total = series.groups()
        if int(part) < 1 or (total != "N" and int(part) > int(total)):
            problems.append(f"part {part} of a series of {total} does not exist")
        rest = rest[series.end() :]
    if breaking := _BREAKING.match(rest):
        rest = rest[breaking.end() :]
    modules = _MODULES.match(rest)
    if not modules:
        return [*problems, f"no [module] before the type; the form is {FORM}"]
    if modules[1].strip().lower() == "breaking":
        return [*problems, "the mark of a breaking change is [BREAKING], in capitals, before the modules"]
    for name in (part.strip() for part in modules[1].split(",")):
        if name not in MODULES:
            problems.append(_not_known("module", name, MODULES))
    kind, colon, description = rest[modules.end() :].partition(":")
    if not colon:
        return [*problems, f"no 'type:' after the modules; the form is {FORM}"]
    if kind not in TYPES:
        problems.append(_not_known("type", kind, TYPES))
    if not description.strip():
        problems.append("no description after the colon")
    elif not description.startswith(" "):
        problems.append("no space between the colon and the description")
    return problems


def main(arguments: list[str]) -> int:
    """Check the title given as the only argument, or PR_TITLE; returns the exit code."""
    title = arguments[0] if len(arguments) == 1 else os.environ.get("PR_TITLE", "")
    if len(arguments) > 1 or not title.strip():
        print("usage: check_pr_title.py 'TITLE', or set PR_TITLE", file=sys.stderr)
        return 2
    problems = title_problems(title)
    for problem in problems:
        print(f"title {title!r}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
