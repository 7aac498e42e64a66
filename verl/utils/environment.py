# SPDX-License-Identifier: Apache-2.0
"""The Python that the commands need, and what they do when another one starts them.

Only the standard library is used, in a form that old Pythons read: they are to say a sentence too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

__all__ = ["MIN_PYTHON", "environment_problem", "refuse_other_python", "use_environment"]

MIN_PYTHON = (3, 12)

_ROOT = Path(__file__).resolve().parents[2]
# What every command needs. A dry run does without torch.
_NEEDED = ("omegaconf",)


def environment_problem(*packages: str) -> str | None:
    """Why a command that needs these packages too cannot run with this Python: a sentence, with what to do about it.

    None when it can.
    """
    if sys.version_info < MIN_PYTHON:
        need, have = (".".join(map(str, version[:2])) for version in (MIN_PYTHON, sys.version_info))
        what = f"Python {need} or later is needed, and this is Python {have} ({sys.executable})"
    else:
        missing = [name for name in (*_NEEDED, *packages) if importlib.util.find_spec(name) is None]
        if not missing:
            return None
        what = f"{missing[0]} is not installed for this Python ({sys.executable})"
    folder = _folder()
    make = "" if _python().is_file() else "make the environment with: bash scripts/setup_env.sh; then "
    return f"{what}; {make}enter it with: source {folder}/bin/activate"


def use_environment(*packages: str) -> None:
    """For the top of a script: go on in the environment of this checkout where the Python that started it has none.

    The environment is ``.venv``, or the folder named by ``VERL_VENV``. Without one the script ends with exit code 2 and
    a sentence.

    Args:
        packages: what the script needs besides the packages that every command does.
    """
    if environment_problem(*packages) is None:
        return
    python = _python()
    # A link to the interpreter is not followed: the place of the link is what makes it an environment.
    if not python.is_file() or Path(sys.executable) == python:
        refuse_other_python(*packages)
    os.execv(python, [str(python), *sys.argv])


def refuse_other_python(*packages: str) -> None:
    """End with exit code 2 and the sentence of :func:`environment_problem` if there is one."""
    problem = environment_problem(*packages)
    if problem:
        print(problem, file=sys.stderr)
        raise SystemExit(2)


def _folder() -> str:
    return os.environ.get("VERL_VENV") or ".venv"


def _python() -> Path:
    folder = os.environ.get("VERL_VENV")
    return (Path(folder).absolute() if folder else _ROOT / ".venv") / "bin" / "python"
