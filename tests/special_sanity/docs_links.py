# SPDX-License-Identifier: Apache-2.0
"""From a Markdown text to the files, headings, modules and config keys it names that do not exist."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.special_sanity.checks import REPO_ROOT
from verl.trainer.ppo.preflight_tables import MOVED
from verl.utils.config import did_you_mean, is_free_form

# What a path in backticks or in a command begins with, if it is a path of this repository.
TOP_LEVEL = ("verl", "tests", "scripts", "docs", "docker", "examples", "recipe", ".github", ".ci")
_IN_TEXT = re.compile(rf"(?<![\w./$~{{-])(?:{'|'.join(map(re.escape, TOP_LEVEL))})/[\w./*<>-]*[\w*>/]")
MADE = ("docs/_build/",)  # folders that commands write; git ignores them
_ROOT_FILE = re.compile(r"[\w.-]+\.(?:md|txt|toml|py|yaml|sh)|LICENSE|\.pre-commit-config\.yaml")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_FENCE = re.compile(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^\1\2\s*$", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"-m (verl(?:\.\w+)+)")
# A line that names the file which the block below it is, for the reader to write.
_TO_WRITE = re.compile(r"^`[\w/]+\.py`[^\n]*:\n\n```python\n", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_SETTING = re.compile(r"(?<![\w.+/?&<>\[{-])\+{0,2}((?:[a-z]\w*\.)+[A-Za-z]\w*)=")
_KEY = re.compile(r"(?:actor_rollout_ref|algorithm|critic|data|reward|trainer)(?:\.[a-z]\w*)+(?<!\.pt)(?<!\.parquet)")


def documents() -> list[Path]:
    """README.md, CONTRIBUTING.md, the other Markdown files of the root, and everything under docs."""
    found = [*REPO_ROOT.glob("*.md"), *(REPO_ROOT / "docs").rglob("*.md"), *(REPO_ROOT / ".github").rglob("*.md")]
    return sorted(path.relative_to(REPO_ROOT) for path in found if "_build" not in path.parts)


def headings(source: str) -> set[str]:
    """Anchors of a document's headings, as GitHub forms them."""
    anchors: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?)\s*#*$", _FENCE.sub("", source), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = next(i for i in range(len(anchors) + 1) if (f"{anchor}-{i}" if i else anchor) not in anchors)
        anchors.add(f"{anchor}-{number}" if number else anchor)
    return anchors


def _line(source: str, position: int) -> int:
    return source.count("\n", 0, position) + 1


def _exists(name: str) -> bool:
    """Whether a path from the root exists. ``*`` matches anything; of a new file, written with a placeholder such as
    ``<name>``, the folder must exist.
    """
    if "<" in name:
        return (REPO_ROOT / name.partition("<")[0].rpartition("/")[0]).is_dir()
    if "*" in name:
        return any(REPO_ROOT.glob(name))
    return (REPO_ROOT / name).exists()


def _links(path: Path, source: str) -> Iterator[tuple[int, str]]:
    prose = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    prose = re.sub(r"`[^`\n]+`", lambda match: " " * len(match[0]), prose)
    for match in _LINK.finditer(prose):
        target = match[1] or match[2]
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (REPO_ROOT / path.parent / name).resolve() if name else REPO_ROOT / path
        if not file.exists():
            yield _line(source, match.start()), f"link to {target}, which does not exist"
        elif not file.is_relative_to(REPO_ROOT):
            yield _line(source, match.start()), f"link to {target}, which is outside the repository"
        elif anchor and file.suffix == ".md":
            text = source if not name else file.read_text(encoding="utf-8")
            if anchor not in headings(text):
                yield _line(source, match.start()), f"link to {target}, which has no such heading"


def _named_files(source: str) -> Iterator[tuple[int, str]]:
    source = re.sub(
        r"(?<=\]\()[^)\s]+|(?<=\]: )\S+", lambda match: " " * len(match[0]), source
    )  # links are checked apart
    for match in _IN_TEXT.finditer(source):
        if not match[0].startswith(MADE) and not _exists(match[0]):
            yield _line(source, match.start()), f"names {match[0]}, which does not exist"
    for match in re.finditer(r"`([^`\n]+)`", _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)):
        if _ROOT_FILE.fullmatch(match[1]) and not any(REPO_ROOT.glob(match[1])) and not _is_somewhere(match[1]):
            yield _line(source, match.start()), f"names {match[1]}, and there is no such file"
    for match in _MODULE.finditer(source):
        stem = match[1].replace(".", "/")
        if not (REPO_ROOT / f"{stem}.py").is_file() and not (REPO_ROOT / stem / "__main__.py").is_file():
            yield _line(source, match.start()), f"runs {match[1]}, which does not exist"


def _is_somewhere(name: str) -> bool:
    """Whether a file of that name is anywhere in the source folders: text may name a file without its folder."""
    return any(next((REPO_ROOT / folder).rglob(name), None) for folder in TOP_LEVEL if (REPO_ROOT / folder).is_dir())


@functools.cache
def _config_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Every key of the four configs, and every group; each also by its last parts, as text names them."""
    lines = (REPO_ROOT / "tests" / "trainer" / "config" / "accepted_keys.txt").read_text(encoding="utf-8").splitlines()
    keys = {line.partition(": ")[2].partition(" = ")[0] for line in lines if ": " in line}
    groups = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}

    def tails(names: set[str]) -> frozenset[str]:
        return frozenset(name.split(".", depth)[-1] for name in names for depth in range(name.count(".") + 1))

    return tails(keys), tails(groups)


def _unknown_key(key: str) -> str | None:
    """What is wrong with a dotted config key, or None. A key of a free-form group is its user's own."""
    keys, groups = _config_keys()
    if key.startswith("hydra.") or key in keys or key in groups:
        return None
    if is_free_form(key):
        parts = key.split(".")
        if any(".".join(parts[:depth]) in keys | groups for depth in range(1, len(parts))):
            return None
    return f"sets {key}, which is no key of the configs.{did_you_mean(key, keys)}"


def _named_keys(source: str) -> Iterator[tuple[int, str]]:
    """Keys written as ``a.b=...`` in code and commands, and keys by their whole name in code.

    Text may name a key that was moved, to say where to; a command may not set it.
    """
    on_purpose = set(re.findall(r"<!-- not a key: ([\w.]+) -->", source))
    for block in _FENCE.finditer(source):
        if block[3].strip() in ("bash", "text", "yaml", "sh"):
            for match in _SETTING.finditer(block[4]):
                if match[1] not in on_purpose and (problem := _unknown_key(match[1])):
                    yield _line(source, block.start(4) + match.start()), problem
    for code in _CODE.finditer(_FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)):
        names = [match[1] for match in _SETTING.finditer(code[1])]
        if _KEY.fullmatch(code[1]) and not _ROOT_FILE.fullmatch(code[1]) and code[1] not in MOVED:
            names.append(code[1])
        for name in names:
            if name not in on_purpose and (problem := _unknown_key(name)):
                yield _line(source, code.start()), problem


def check_document(path: Path, source: str) -> list[str]:
    """``path:line: what is wrong`` for every link and name in a document that leads nowhere.

    A name that is meant as an example, not as a file of this tree, stands on a line that ends in
    ``<!-- not a file -->`` (in a block of code: ``# not a file``). The name of a Python file for the reader to write
    stands in backticks, with a colon, on a line of its own above the block. A page that shows a wrong key on purpose
    says so anywhere: ``<!-- not a key: trainer.nodes -->``.
    """
    lines = source.splitlines()
    excused = {i for i, line in enumerate(lines, start=1) if re.search(r"(<!--|#) not a file( -->)?\s*$", line)}
    excused |= {_line(source, match.start()) for match in _TO_WRITE.finditer(source)}
    found = [*_links(path, source), *_named_files(source), *_named_keys(source)]
    return [f"{path}:{line}: {text}" for line, text in sorted(set(found)) if line not in excused]


def scripts() -> list[Path]:
    """Files that a user starts, whose first comment or docstring says how."""
    found = [path for folder in ("examples", "recipe", "scripts", "docker") for path in (REPO_ROOT / folder).rglob("*")]
    return sorted(path.relative_to(REPO_ROOT) for path in found if path.suffix in (".py", ".sh"))


def check_script(path: Path, source: str) -> list[str]:
    """What a script's comments (``.sh``) or docstring (``.py``) name that does not exist."""
    if path.suffix == ".sh":
        text = "\n".join(line if line.startswith("#") else "" for line in source.splitlines())
    else:
        docstring = re.match(r'(?:#[^\n]*\n)*\s*"""(.*?)"""', source, re.DOTALL)
        text = docstring[1] if docstring else ""
    return [f"{path}: {problem}" for _, problem in sorted({*_named_files(text), *_named_keys(text)})]
