# SPDX-License-Identifier: Apache-2.0
"""The examples of CONTRIBUTING.md run as they stand: each section in a Python of its own, its tests called by name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# Runs several sections, so that torch is loaded once. Every one has its own names; the registries are shared, as they
# would be in a training. Not in this process: other tests compare the registries with the names of the configuration.
RUNNER = """
import sys
for path in sys.argv[1:]:
    names = {"__name__": path}
    exec(compile(open(path).read(), path, "exec"), names)
    tests = [name for name in names if name.startswith("test_")]
    assert tests, f"{path} has no test"
    for name in tests:
        names[name]()
        print("passed", path, name)
"""


def sections(text: str) -> dict[str, str]:
    """Heading -> its Python blocks as one program, for the sections that have any."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    blocks = {
        title: re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {title: "\n\n".join(found) for title, found in blocks.items() if found}


def write_programs(folder: Path, programs: dict[str, str]) -> list[str]:
    paths = []
    for title, program in programs.items():
        path = folder / (title.lower().replace(" ", "_") + ".py")
        path.write_text("# SPDX-License-Identifier: Apache-2.0\n" + program, encoding="utf-8")
        paths.append(str(path))
    return paths


def run(paths: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", RUNNER, *paths]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


PROGRAMS = sections(TEXT)
MODEL = "Add a model"


def test_every_kind_of_extension_has_its_example():
    assert list(PROGRAMS) == [
        "Add an advantage estimator",
        "Add a policy loss",
        "Add a reward",
        "Add an engine",
        MODEL,
    ]


def test_the_examples_run(tmp_path):
    paths = write_programs(tmp_path, {title: program for title, program in PROGRAMS.items() if title != MODEL})
    done = run(paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed ") == len(paths)


@pytest.mark.slow
def test_the_example_of_a_model_runs(tmp_path):
    done = run(write_programs(tmp_path, {MODEL: PROGRAMS[MODEL]}))
    assert done.returncode == 0 and "passed " in done.stdout, done.stderr


def test_a_broken_example_is_noticed(tmp_path):
    broken = {"One": "def test_x():\n    assert 1 == 2\n", "Two": "x = 1\n"}
    for path in write_programs(tmp_path, broken):
        assert run([path]).returncode != 0


def test_the_examples_pass_the_linter(tmp_path):
    write_programs(tmp_path, PROGRAMS)
    # Not checked: the order of imports, because the second block of a section has its own below the first block's code.
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(ROOT / "pyproject.toml"),
        "--ignore",
        "E402,I001,B905,F811",
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_each_block_is_formatted(tmp_path):
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)):
        (tmp_path / f"block{number}.py").write_text(block)
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--diff",
        "--config",
        str(ROOT / "pyproject.toml"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
