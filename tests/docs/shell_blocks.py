# SPDX-License-Identifier: Apache-2.0
"""The shell blocks of the documentation: who runs each of them, and running those that nobody else does.

A block of ``bash`` is run as it stands, or a comment right above it says what happens instead:

- ``<!-- run by tests/x.py -->``: that test runs the command, and names it;
- ``<!-- run with two steps -->``: a training, cut short by :data:`TWO_STEPS`;
- ``<!-- dry run only: why -->``: a training, with ``trainer.dry_run=True``;
- ``<!-- not run: why -->``, with one of :data:`NOT_RUN`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.special_sanity.checks import REPO_ROOT
from tests.special_sanity.docs_links import documents

NOT_RUN = ("makes an environment", "needs the network", "needs a GPU", "needs Docker", "takes minutes")
TWO_STEPS = {
    "verl.trainer.main_ppo": "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4 "
    "actor_rollout_ref.rollout.n=2 data.max_response_length=8 trainer.val_before_train=False "
    "trainer.total_training_steps=2 trainer.logger=[console]",
    "verl.trainer.sft_trainer": "trainer.total_training_steps=2 trainer.logger=[console]",
}
LANGUAGES = ("python", "pycon", "text", "yaml", "json", "mermaid", "toml", "diff", "{toctree}", "{eval-rst}")
# The first line of a block of code, in a list or a quotation too: its indent, its fence, its language.
_FENCE = re.compile(r"([ >]*(?:(?:[-*+]|\d+[.)]) +)?)(`{3,}(?=[^`]*$)|~{3,})(.*)")
_MARK = re.compile(r"<!-- *(.*?) *-->\s*\Z")
_SUBJECT = re.compile(r"(?:scripts|examples|recipe|docker)/[\w./-]+\.\w+|-m (verl[\w.]+)")


@dataclass(frozen=True)
class Block:
    """A shell block: where it stands, its commands, and the comment above it."""

    path: Path
    line: int
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def is_run_here(self) -> bool:
        """Whether this test runs it, as it stands or cut short."""
        return not self.mark.startswith(("not run:", "run by "))


def all_documents() -> list[Path]:
    """Every page whose blocks are looked at."""
    beside = [path for folder in ("examples", "recipe", "docker") for path in (REPO_ROOT / folder).rglob("*.md")]
    return [*documents(), *sorted(path.relative_to(REPO_ROOT) for path in beside)]


def code_blocks(source: str) -> Iterator[tuple[int, str, str | None]]:
    """Line, language and text of every fenced block; the text is None where nothing closes the block."""
    start, indent, fence, language, text = 0, 0, "", "", []
    for number, line in enumerate(source.splitlines(), start=1):
        if not fence:
            if match := _FENCE.fullmatch(line):
                start, indent, fence, language, text = number, len(match[1]), match[2], match[3].strip(), []
            continue
        end = line.strip(" >")
        if end.startswith(fence) and not end.strip(fence[0]):
            yield start, language, "".join(text)
            fence = ""
        else:
            text.append(re.sub(f"^[ >]{{0,{indent}}}", "", line) + "\n")
    if fence:
        yield start, language, None


def find_blocks(path: Path, source: str) -> tuple[list[Block], list[str]]:
    """The shell blocks of a page, and what is wrong with the languages of its other blocks."""
    blocks, problems = [], []
    lines = source.splitlines(keepends=True)
    for line, language, text in code_blocks(source):
        if text is None:
            problems.append(f"{path}:{line}: nothing closes this block; end it with the fence that it begins with")
        elif not language:
            problems.append(f"{path}:{line}: a block without a language; mark commands as bash, all else as text")
        elif language == "bash":
            mark = _MARK.search(lines[line - 2]) if line > 1 and lines[line - 2].endswith("-->\n") else None
            blocks.append(Block(path, line, text, mark[1] if mark else ""))
        elif language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            problems.append(
                f"{path}:{line}: a block of {language!r}; mark commands as bash, all else as one of {known}"
            )
    return blocks, problems


def check_mark(block: Block) -> str | None:
    """What is wrong with the comment above a block, or None."""
    kind, _, reason = block.mark.partition(": ")
    if kind == "not run":
        if reason not in NOT_RUN:
            return f"{block}: not run, because it {reason}; the reasons that count are: {', '.join(NOT_RUN)}"
    elif kind == "dry run only" and reason or kind == "run with two steps":
        if not any(name in block.text for name in (*TWO_STEPS, "my_run.sh", "examples/", "recipe/")):
            return f"{block}: marked as a training, and starts none"
    elif kind.startswith("run by "):
        file = REPO_ROOT / kind.removeprefix("run by ")
        if not file.is_file():
            return f"{block}: run by {file.relative_to(REPO_ROOT)}, which does not exist"
        names = [match[1] or match[0] for match in _SUBJECT.finditer(block.text)]
        test = file.read_text(encoding="utf-8")
        missing = [name for name in names if name not in test and name.rpartition("/")[2] not in test]
        if missing or not names:
            return f"{block}: {file.relative_to(REPO_ROOT)} does not name {(missing or ['any command'])[0]}"
    elif kind:
        return f"{block}: no such mark: {block.mark}"
    return None


def script(block: Block, replacements: dict[str, str]) -> str:
    """The commands to run: placeholders made real, arguments of a short or dry run behind the last command."""
    text = block.text
    for placeholder, real in replacements.items():
        text = text.replace(placeholder, real)
    if block.mark.startswith("dry run only"):
        return text.rstrip() + " trainer.dry_run=True\n"
    if block.mark == "run with two steps":
        return text.rstrip() + " " + next(end for name, end in TWO_STEPS.items() if name in text) + "\n"
    return text


def run_block(block: Block, folder: Path, replacements: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a block in ``folder`` with this Python."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO_ROOT),
        "HOME": str(folder),
    }
    command = ["bash", "-euo", "pipefail", "-c", script(block, replacements)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
