# SPDX-License-Identifier: Apache-2.0
"""The command line: a refusal is a sentence and exit code 2, a fault is a traceback and exit code 1."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
import time
from verl.trainer.ppo.preflight import run_hydra, validate_ppo_config

def prepare(config):
    if config.trainer.project_name == "check":
        validate_ppo_config(config)
    if config.trainer.project_name == "none":
        return None
    return lambda: start(config)

def start(config):
    assert not {"torch", "ray"} & set(sys.modules)
    if config.trainer.project_name == "fault":
        raise ValueError("inside\\nthe run")
    if config.trainer.project_name == "slow":
        print("started", flush=True)
        time.sleep(60)
    print("started", config.trainer.total_epochs)

run_hydra(prepare, "ppo_trainer")
"""


@pytest.fixture
def run(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))

    def call(*arguments: str, **env: str) -> subprocess.CompletedProcess:
        environment = {
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        environment |= {"PYTHONPATH": str(ROOT)} | env
        command = [sys.executable, str(program), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return call


def test_a_number_for_a_whole_group_is_refused(run) -> None:
    result = run("data=5")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "data=5: a whole group of keys takes no number; write KEY.NAME=VALUE" in result.stderr


def test_what_prepare_returns_is_run(run) -> None:
    result = run("trainer.total_epochs=2")
    assert (result.returncode, result.stdout.strip()) == (0, "started 2"), result.stderr
    result = run("trainer.project_name=none")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_an_unknown_key_is_one_sentence_and_exit_code_2(run) -> None:
    result = run("trainer.total_epoch=2")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: trainer.total_epoch is not a key of ppo_trainer. Did you mean trainer.total_epochs?"
    ]


def test_every_problem_is_a_line_and_only_the_first_rank_says_it(run) -> None:
    result = run("trainer.project_name=check", "trainer.n_gpus_per_node=3")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert lines[0] == f"{len(lines) - 1} errors"
    assert any("actor_rollout_ref.rollout.name must be set" in line for line in lines)
    assert "Traceback" not in result.stderr
    silent = run("trainer.total_epoch=2", RANK="1")
    assert (silent.returncode, silent.stderr) == (2, "")


def test_an_error_after_the_start_has_a_traceback_and_its_cause_as_the_last_line(run) -> None:
    result = run("trainer.project_name=fault")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1] == "error: ValueError: inside the run"


def test_ctrl_c_ends_in_one_line_and_130(run, tmp_path: Path) -> None:
    run("trainer.project_name=none")  # writes the program
    command = [sys.executable, str(tmp_path / "program.py"), "trainer.project_name=slow"]
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip() == "stopped by Ctrl-C"
