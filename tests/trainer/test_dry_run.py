# SPDX-License-Identifier: Apache-2.0
"""Dry runs as real commands: what they print and return, and that they start, load and write nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.config.files import Files, write_files

ROOT = Path(__file__).resolve().parents[2]
A = "actor_rollout_ref"
LIMIT_S = 5.0  # CPU seconds; about 1.5 where nothing else runs
HEAVY = ("torch", "ray", "transformers", "megatron.core", "tensordict")

# Runs a command as `python3 -m` does, and tells what was loaded at its end.
PROGRAM = """
import importlib, sys
module = sys.argv.pop(1)
try:
    importlib.import_module(module).main()
finally:
    print("loaded", *sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = write_files(tmp_path_factory.mktemp("files"))
    fixture = ROOT / "tests" / "fixtures" / "model_configs" / "Qwen3-30B-A3B" / "config.json"
    (made.model / "config.json").write_bytes(fixture.read_bytes())
    return made


def run(folder: Path, module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a command in an empty folder, after checking that it kept to the rules."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    before = sum(os.times()[2:4])
    command = [sys.executable, "-c", PROGRAM, f"verl.trainer.{module}", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    seconds = sum(os.times()[2:4]) - before
    print(f"{module} {' '.join(arguments)}: {seconds:.1f} s of CPU time")
    said, _, loaded = done.stderr.rpartition("loaded ")
    assert set(HEAVY) & set(loaded.split()) == set()
    assert said.strip() == "", said
    assert list(folder.iterdir()) == []
    assert seconds < LIMIT_S
    return done.returncode, done.stdout


def test_a_sound_command_ends_with_0(files: Files, tmp_path: Path) -> None:
    output = ["trainer.default_local_dir=checkpoints", "hydra.run.dir=outputs"]
    code, said = run(tmp_path, "main_ppo", *files.ppo_arguments, "trainer.dry_run=True", *output)
    assert code == 0
    assert said.startswith("Dry run of verl.trainer.main_ppo: nothing is started.")
    assert said.rstrip().endswith("Nothing is wrong.")
    titles = [line for line in said.splitlines() if re.fullmatch(r"[A-Z][\w' ]+", line)]
    assert titles == [
        *("Layout", "One step", "Tokens", "Run", "Loss scaling", "Memory of one rank"),
        *("Keys that differ from their defaults", "Notes"),
    ]


def test_three_errors_at_once_end_with_2(files: Files, tmp_path: Path) -> None:
    wrong = [f"{A}.actor.ppo_mini_batchsize=4", "trainer.loger=[console]", "algorithm.adv_estimator=gppo"]
    code, said = run(tmp_path, "main_ppo", *files.ppo_arguments, *wrong, "trainer.dry_run=True")
    assert code == 2
    _, _, errors = said.partition("\n3 errors\n")
    joined = " ".join(errors.split())
    for name in (f"Did you mean {A}.actor.ppo_mini_batch_size?", "Did you mean trainer.logger?", "'gppo' is not known"):
        assert name in joined, said
    told = " ".join(said.split())
    assert "= tensor 1 x pipeline 1 x context 2 x data 1" in told, "the layout is told all the same"


def test_json_is_one_object_and_holds_the_errors(files: Files, tmp_path: Path) -> None:
    arguments = [*files.sft_arguments, "--json", "trainer.dry_run=True", "engine.tensor_model_parallel_size=3"]
    code, said = run(tmp_path, "sft_trainer", *arguments)
    report = json.loads(said)
    assert (code, report["exit_code"], report["ok"]) == (2, 2, False)
    assert any("tensor_model_parallel_size=3" in error for error in report["errors"])
    assert report["layout"]["tensor"] == 3 and report["layout"]["data"] is None
    assert report["batches"]["steps"]["rows"] == 16


def test_generation_and_evaluation(files: Files, tmp_path: Path) -> None:
    arguments = [f"data.path={files.prompts}", f"model.path={files.model}", "trainer.dry_run=json"]
    code, said = run(tmp_path, "main_generation", *arguments)
    assert (code, json.loads(said)["offline"]["responses"]) == (0, 80)


def test_json_without_a_dry_run_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl.trainer.main_eval", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr.splitlines() == [
        "error: --json is the form of a dry run's report; add trainer.dry_run=True, or leave out --json"
    ]
