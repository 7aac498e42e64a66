# SPDX-License-Identifier: Apache-2.0
"""The environment script, run with stand-ins for Python, pip and uv: no network, nothing installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
NEEDED_TOOLS = ("bash", "sha256sum", "cut", "cat", "dirname", "mkdir", "rm", "touch", "ls", "flock", "cp", "grep")

# Answers like an interpreter of version @VERSION@, makes environments that hold a copy of itself, and notes every call
# of pip. It fails in pip while the file @NOTES@/pip_fails exists.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *platform.python_version*) echo @VERSION@ ;;
    "-m venv --clear "*)
        echo "venv" >>@NOTES@/calls
        rm -rf "$4"
        mkdir -p "$4/bin" "$4/lib/python3.12/site-packages"
        touch "$4/pyvenv.cfg"
        cp "$0" "$4/bin/python" ;;
    "-m pip "*)
        echo "$*" | grep -q no-deps && echo "pip --no-deps" >>@NOTES@/calls || echo "pip" >>@NOTES@/calls
        [[ ! -e @NOTES@/pip_fails ]] ;;
    *ensurepip*) @ENSUREPIP@ ;;
esac
"""


class Checkout:
    """A copy of the script with requirement files, and a PATH on which only the stand-ins can be found."""

    def __init__(self, folder: Path):
        self.folder, self.notes, self.bin = folder / "repo", folder / "notes", folder / "bin"
        self.venv = self.folder / ".venv"
        for path in (self.folder / "scripts", self.notes, self.bin):
            path.mkdir(parents=True)
        shutil.copy(REPO_ROOT / "scripts/setup_env.sh", self.folder / "scripts")
        for name in ("requirements.txt", "requirements-mcore.txt", "requirements-test.txt"):
            (self.folder / name).write_text(f"{name}-package==1\n")
        for tool in NEEDED_TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    def add_program(self, name: str, text: str) -> Path:
        path = self.bin / name if "/" not in name else self.folder.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def add_python(self, name: str, version: str = "3.12.9", ensurepip: str = "true") -> Path:
        text = FAKE_PYTHON.replace("@VERSION@", version).replace("@NOTES@", str(self.notes))
        return self.add_program(name, text.replace("@ENSUREPIP@", ensurepip))

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.bin), "HOME": str(self.folder.parent / "home"), **env}
        command = [str(self.bin / "bash"), str(self.folder / "scripts/setup_env.sh"), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """What was called since the last question."""
        notes = self.notes / "calls"
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


EVERYTHING = ["venv", "pip", "pip --no-deps"]


def refusal(result: subprocess.CompletedProcess) -> str:
    """The one sentence of a refused call."""
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("setup_env: ")
    return lines[0]


def test_first_call_installs_and_second_does_nothing(checkout):
    checkout.add_python("python3.12")
    assert checkout.run().returncode == 0
    assert checkout.calls() == EVERYTHING
    link = checkout.venv / "lib/python3.12/site-packages/verl-checkout.pth"
    assert link.read_text() == f"{checkout.folder}\n"
    second = checkout.run()
    assert (second.returncode, second.stdout, second.stderr, checkout.calls()) == (0, "", "", [])


def test_changed_requirements_are_installed_into_the_same_environment(checkout):
    checkout.add_python("python3.12")
    checkout.run()
    checkout.calls()
    (checkout.folder / "requirements-mcore.txt").write_text("requirements-mcore.txt-package==2\n")
    assert checkout.run().returncode == 0
    assert checkout.calls() == ["pip", "pip --no-deps"]
    assert checkout.run().returncode == 0 and checkout.calls() == []


def test_a_broken_install_is_not_taken_for_complete_and_starts_afresh(checkout):
    checkout.add_python("python3.12")
    (checkout.notes / "pip_fails").touch()
    assert checkout.run().returncode != 0
    assert checkout.calls() == ["venv", "pip"]
    (checkout.notes / "pip_fails").unlink()
    assert checkout.run().returncode == 0
    assert checkout.calls() == EVERYTHING
    assert checkout.run().returncode == 0 and checkout.calls() == []


def test_verl_venv_names_another_folder(checkout, tmp_path):
    checkout.add_python("python3.12")
    assert checkout.run(VERL_VENV=str(tmp_path / "cache/venv")).returncode == 0
    assert (tmp_path / "cache/venv/.verl-stamp").is_file() and not checkout.venv.exists()


def test_one_environment_serves_the_checkout_that_called_last(checkout, tmp_path):
    checkout.add_python("python3.12")
    checkout.run(VERL_VENV=str(tmp_path / "venv"))
    moved = tmp_path / "moved"
    checkout.folder.rename(moved)
    checkout.folder = moved
    checkout.calls()
    assert checkout.run(VERL_VENV=str(tmp_path / "venv")).returncode == 0 and checkout.calls() == []
    assert (tmp_path / "venv/lib/python3.12/site-packages/verl-checkout.pth").read_text() == f"{moved}\n"


@pytest.mark.parametrize(
    "place", ["python3.12", "home/.pyenv/versions/3.12.4/bin/python", "roots/versions/3.12/bin/python"]
)
def test_python_is_found(checkout, tmp_path, place):
    checkout.add_python(place)
    assert checkout.run(PYENV_ROOT=str(tmp_path / "roots")).returncode == 0
    assert checkout.calls() == EVERYTHING


def test_a_shim_that_does_not_start_is_passed_over(checkout):
    checkout.add_program("python3.12", "#!/bin/bash\necho 'pyenv: command not found' >&2; exit 127\n")
    found = checkout.add_python("home/.pyenv/versions/3.12.4/bin/python")
    result = checkout.run()
    assert result.returncode == 0 and f"with {found}" in result.stdout


def test_uv_is_asked_last_and_may_install_python(checkout):
    python = checkout.add_python("uv_pythons/python3.12")
    flag = checkout.notes / "installed"
    checkout.add_program(
        "uv",
        f'#!/bin/bash\n[[ "$2" == install ]] && touch {flag}\n[[ "$2" == find && -e {flag} ]] && echo {python}\n',
    )
    assert checkout.run().returncode == 0
    assert checkout.calls() == EVERYTHING


def test_no_python_is_one_clear_sentence(checkout):
    checkout.add_python("python3.12", ensurepip="false")
    sentence = refusal(checkout.run())
    assert "no Python 3.12 with venv support was found" in sentence and "PYTHON=/path/to/python3.12" in sentence
    assert not checkout.venv.exists()


@pytest.mark.parametrize("installed", [False, True], ids=["fresh", "already_installed"])
def test_the_wrong_python_is_refused_with_both_versions(checkout, installed):
    if installed:
        checkout.add_python("python3.12")
        checkout.run()
    wrong = checkout.add_python("python3.11", version="3.11.7")
    sentence = refusal(checkout.run(PYTHON=str(wrong)))
    assert sentence == f"setup_env: PYTHON={wrong} is Python 3.11.7, but Python 3.12 is needed."


def test_a_python_that_does_not_start_is_refused(checkout):
    assert "PYTHON=/no/such/python does not start" in refusal(checkout.run(PYTHON="/no/such/python"))


def test_a_python_without_ensurepip_is_refused(checkout):
    python = checkout.add_python("bare", ensurepip="false")
    assert "lacks the ensurepip module" in refusal(checkout.run(PYTHON=str(python)))


def test_a_folder_with_other_files_is_left_alone(checkout, tmp_path):
    checkout.add_python("python3.12")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").touch()
    assert "is not a virtual environment" in refusal(checkout.run(VERL_VENV=str(tmp_path / "photos")))
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.png"] and checkout.calls() == []


def test_an_environment_of_another_python_is_left_alone(checkout):
    checkout.add_python("repo/.venv/bin/python", version="3.11.7")
    (checkout.venv / "pyvenv.cfg").touch()
    checkout.add_python("python3.12")
    assert "is an environment of Python 3.11.7, but Python 3.12 is needed" in refusal(checkout.run())
    assert checkout.calls() == []


def test_hash_follows_the_requirements_alone(checkout):
    first = checkout.run("--hash").stdout
    assert len(first.strip()) == 16 and checkout.run("--hash").stdout == first
    (checkout.folder / "requirements.txt").write_text("other==1\n")
    assert checkout.run("--hash").stdout != first
    assert not checkout.venv.exists()
