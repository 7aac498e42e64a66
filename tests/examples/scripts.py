# SPDX-License-Identifier: Apache-2.0
"""The run_*.sh scripts of examples/ and recipe/, what their headers claim, and how a test starts one."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
FIXTURES = REPO_ROOT / "tests" / "fixtures" / "model_configs"
SIZES = ("TP", "PP", "CP", "DP", "EP", "ETP", "expert-DP")


@dataclass(frozen=True)
class Script:
    """One script; everything else is read from its text."""

    path: Path

    @property
    def name(self) -> str:
        """Path below the repository, which is how documents name it."""
        return self.path.relative_to(REPO_ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def claim(self, field: str) -> str:
        """What the header says under `field`, on one line."""
        found = re.search(rf"^# {field}: +((?:.*\n)(?:# {{{len(field) + 2},}}\S.*\n)*)", self.text, re.MULTILINE)
        assert found, f"{self.name}: no '# {field}:' in the header"
        return re.sub(r"\n# +", " ", found[1]).strip()

    @property
    def layout(self) -> dict[str, int]:
        """Sizes that the header gives, 1 where it gives none."""
        given = dict(re.findall(r"\b((?:expert-|E)?[TPCDE]P)=(\d+)", self.claim("Layout")))
        return {name: int(given.get(name, 1)) for name in SIZES}

    @property
    def fixture(self) -> Path | None:
        """The public model's config.json folder; None for scripts that train a model made here."""
        hub_name = re.search(r"^MODEL_PATH=\"\$\{MODEL_PATH:-([\w.-]+/[\w.-]+)\}\"$", self.text, re.MULTILINE)
        return FIXTURES / hub_name[1].split("/")[1] if hub_name else None

    @property
    def is_sft(self) -> bool:
        return "verl.trainer.sft_trainer" in self.text

    def run(self, model: Path, data: Path, out: Path, *arguments: str, timeout: float = 120, **env: str):
        """Run the script as a user does, on given files; its other settings are its own."""
        prefix = "sft_" if self.is_sft else ""
        files = {"TRAIN_FILES": data / f"{prefix}train.parquet", "VAL_FILES": data / f"{prefix}test.parquet"}
        given = {"MODEL_PATH": model, **files, "OUT": out, "PYTHON": sys.executable, "HF_MODULES_CACHE": out / "hf"}
        inherited = {key: value for key, value in os.environ.items() if key not in ("NNODES", "N_GPUS_PER_NODE")}
        return subprocess.run(
            ["bash", str(self.path), *arguments],
            cwd=out.parent,  # a script must work from anywhere
            env=inherited | {key: str(value) for key, value in given.items()} | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def all_scripts() -> list[Script]:
    """Every run_*.sh, found by its name, so that a new one cannot escape the tests."""
    return [Script(path) for top in ("examples", "recipe") for path in sorted((REPO_ROOT / top).rglob("run_*.sh"))]
