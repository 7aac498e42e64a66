# SPDX-License-Identifier: Apache-2.0
"""The container files. Nothing is built here; what they copy and run exists and the versions are the pinned ones."""

import os
import re
import shlex
import subprocess

import pytest

from tests.special_sanity.checks import REPO_ROOT

DOCKERFILES = ["docker/Dockerfile.cpu", "docker/Dockerfile.gpu"]


def read(path: str) -> str:
    return (REPO_ROOT / path).read_text(encoding="utf-8")


def instructions(source: str) -> list[tuple[str, str]]:
    """(instruction, its text) with continued lines joined and comments left out."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def copied(source: str) -> list[str]:
    sources = []
    for name, text in instructions(source):
        if name in ("COPY", "ADD"):
            *paths, _ = [word for word in shlex.split(text) if not word.startswith("--")]
            sources += paths
    return sources


def pins() -> dict[str, str]:
    lines = [line for name in ("requirements.txt", "requirements-mcore.txt") for line in read(name).splitlines()]
    found = (re.match(r"([A-Za-z-]+)(?:\[\w+\])?==(\S+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def arguments(source: str) -> dict[str, str]:
    return dict(text.split("=", 1) for name, text in instructions(source) if name == "ARG")


@pytest.mark.parametrize("path", DOCKERFILES)
def test_what_is_copied_and_run_exists(path):
    source = read(path)
    source = source.removeprefix("# syntax=docker/dockerfile:1\n")  # the name of an image, not a path
    assert len(copied(source)) >= 4
    for name in [*copied(source), *re.findall(r"\b(?:scripts|docker|tests|examples)/[\w/.-]*\w", source)]:
        assert (REPO_ROOT / name).exists(), f"{path}: {name} does not exist"


@pytest.mark.parametrize("path", DOCKERFILES)
def test_the_environment_is_made_from_every_requirement_file(path):
    assert {p.name for p in REPO_ROOT.glob("requirements*.txt")} <= set(copied(read(path)))
    assert any(name == "RUN" and "bash scripts/setup_env.sh" in text for name, text in instructions(read(path)))


@pytest.mark.parametrize("path", DOCKERFILES)
def test_instructions_are_known_and_the_base_has_a_version(path):
    parsed = instructions(read(path))
    assert {name for name, _ in parsed} <= {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "CMD"}
    assert parsed[0][0] == "FROM" and re.search(r":\S*\d", parsed[0][1])


def test_versions_agree_everywhere():
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", read("docs/start/install.md"), re.MULTILINE)
    table = {name: version for name, version in rows}
    for name, version in pins().items():
        assert table.pop(name) == version, f"docs/start/install.md: {name}"
    args = arguments(read("docker/Dockerfile.gpu"))
    assert table.pop("vLLM") == args.pop("VLLM_VERSION")
    assert f"vllm=={read('docs/start/install.md').split('| vLLM | ')[1].split(' ')[0]}" in read("setup.py")
    engine = table.pop("TransformerEngine")
    assert engine == args.pop("TRANSFORMER_ENGINE_VERSION") and f"pytorch]=={engine}'" in read("docs/start/install.md")
    assert args == {}
    cuda = table.pop("CUDA")
    assert f"nvidia/cuda:{cuda}." in read("docker/Dockerfile.gpu")
    assert table.pop("Python") == "3.12" and "python:3.12-" in read("docker/Dockerfile.cpu")
    assert table == {}


def test_the_readme_and_the_package_name_the_pinned_versions():
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", read("README.md"), re.MULTILINE))
    assert rows.pop("Python") == "3.12" and len(rows) > 4
    assert rows == {name: version for name, version in pins().items() if name in rows}
    # What vLLM and the images say of setuptools is what our own file allows.
    assert re.search(r"^setuptools<81$", read("requirements.txt"), re.MULTILINE)
    assert "TransformerEngine " + arguments(read("docker/Dockerfile.gpu"))["TRANSFORMER_ENGINE_VERSION"] in read(
        "docs/start/install.md"
    )


def test_the_table_says_which_cuda_the_torch_wheel_has():
    import torch

    if torch.version.cuda is None:
        pytest.skip("this torch is a build without CUDA")
    assert f"| CUDA | {torch.version.cuda} |" in read("docs/start/install.md")


def test_the_build_context_leaves_out_what_is_large_and_keeps_what_is_copied():
    ignored = read(".dockerignore").split()
    assert {".git", ".venv", "outputs"} <= set(ignored)
    for path in DOCKERFILES:
        hidden = [name for name in copied(read(path)) if name.split("/")[0] in ignored]
        assert not hidden, f"{path}: copies {', '.join(hidden)}, which .dockerignore leaves out; take it away there"


def ignored_by_git_alone(gitignore: str, dockerignore: str) -> list[str]:
    git, docker = (
        {line.removeprefix("**/").strip("/") for line in text.splitlines() if line and not line.startswith("#")}
        for text in (gitignore, dockerignore)
    )
    return sorted(git - docker)


def test_the_build_context_leaves_out_what_git_ignores():
    missing = ignored_by_git_alone(read(".gitignore"), read(".dockerignore"))
    assert not missing, f".dockerignore: add what .gitignore has and no image needs: {', '.join(missing)}"


@pytest.mark.parametrize("pattern", [".mypy_cache", "docs/_build", "**/*.egg-info"])
def test_a_pattern_taken_away_is_missed(pattern):
    without = [line for line in read(".dockerignore").splitlines() if line != pattern]
    assert ignored_by_git_alone(read(".gitignore"), "\n".join(without)) == [pattern.removeprefix("**/")]


def run_gpu_ci(tmp_path, *words, image_is_there=False):
    """Run docker/gpu_ci.sh with a docker that records its calls; returns (result, calls)."""
    docker = tmp_path / "docker"
    inspect = 0 if image_is_there else 1
    docker.write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$*" >>"$RECORD"\n'
        f'if [[ "$1" == image ]]; then exit {inspect}; fi\n'
        '[[ "$1" != run ]] || exit 7\n'
    )
    docker.chmod(0o755)
    record = tmp_path / "record"
    record.write_text("")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RECORD": str(record),
        "VERL_CI_CACHE": str(tmp_path / "cache"),
    }
    command = ["bash", str(REPO_ROOT / "docker/gpu_ci.sh"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done, record.read_text().splitlines()


def test_the_image_is_built_once(tmp_path):
    done, calls = run_gpu_ci(tmp_path, "build")
    assert done.returncode == 0, done.stderr
    assert calls[1].startswith("build --file docker/Dockerfile.gpu --tag verl-gpu:")
    _, again = run_gpu_ci(tmp_path, "build", image_is_there=True)
    assert again == calls[:1]


def test_a_command_gets_its_gpus_and_its_exit_code_comes_back(tmp_path):
    done, calls = run_gpu_ci(tmp_path, "run", "2", "bash", "scripts/test.sh", "-m", "gpu")
    assert done.returncode == 7
    assert "--gpus 2 " in calls[0] and calls[0].endswith(" bash scripts/test.sh -m gpu")
    assert f"--volume {REPO_ROOT}:/workspace/verl " in calls[0]


@pytest.mark.parametrize("words", [[], ["run"], ["run", "2"], ["run", "all", "ls"], ["run", "0", "ls"], ["push"]])
def test_a_wrong_call_says_how(tmp_path, words):
    done, calls = run_gpu_ci(tmp_path, *words)
    assert done.returncode == 2 and "usage:" in done.stderr and calls == []
