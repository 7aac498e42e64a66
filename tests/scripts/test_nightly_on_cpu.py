# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.loading import load_script
from tests.trainer.config.files import PROMPT, write_model, write_rows
from verl.trainer.ppo.preflight import validate_ppo_config
from verl.utils.config import compose_config
from verl.utils.tracking import Tracking

ROOT = Path(__file__).resolve().parents[2]
script = load_script("check_reward_rise.py")


def write_metrics(path, values, key="critic/score/mean"):
    lines = [json.dumps({"step": step, "data": {key: value}}) for step, value in enumerate(values, start=1)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([0.1] * 10 + [0.2] * 10, 0),
        ([0.1] * 10 + [0.151] * 10, 0),
        ([0.1] * 10 + [0.149] * 10, 1),
        ([0.2] * 10 + [0.1] * 10, 1),
        ([0.1] * 20, 1),
        ([0.0] * 10 + [9.0] * 5 + [0.0] * 10, 1),  # a peak in the middle is no rise
        ([0.1] * 10 + [None] + [0.9] * 10, 1),  # what the log writes for NaN
        ([0.1] * 9 + [0.9] * 9, 2),
        ([], 2),
    ],
)
def test_exit_code(tmp_path, values, code):
    assert script.main([write_metrics(tmp_path / "metrics.jsonl", values)]) == code


def test_it_reads_what_the_trainer_writes_and_skips_lines_of_other_metrics(tmp_path):
    log = Tracking("p", "e", "file", default_local_dir=tmp_path)
    log.log({"val-core/x": 0.5}, step=0)
    for step in range(1, 21):
        log.log({"critic/score/mean": step / 20}, step=step)
    log.finish()
    values = script.read_metric(tmp_path / "metrics.jsonl", "critic/score/mean")
    assert list(values) == list(range(1, 21)) and values[20] == 1.0
    assert script.measure_rise(list(values.values()), 10) == (pytest.approx(0.275), pytest.approx(0.775))


def test_a_resumed_run_counts_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [0.1, 0.2, 0.3])
    path.write_text(path.read_text() + json.dumps({"step": 2, "data": {"critic/score/mean": 0.9}}) + "\n")
    assert script.read_metric(path, "critic/score/mean") == {1: 0.1, 2: 0.9, 3: 0.3}


def test_unreadable_input_is_told_apart_from_no_rise(tmp_path, capsys):
    assert script.main([str(tmp_path / "none.jsonl")]) == 2
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1\n')
    assert script.main([str(path)]) == 2
    assert "line 1 is not a line of metrics" in capsys.readouterr().err
    assert script.main([write_metrics(path, [0.1] * 20), "--key", "critic/scores/mean"]) == 2


# Stands in for Python: records the command, and writes the metrics that the trainer would write.
STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >>"$RECORD"; printf '\\n' >>"$RECORD"
case "$*" in
*main_ppo*) mkdir -p "$NIGHTLY_OUT/run"; cp "$METRICS" "$NIGHTLY_OUT/run/metrics.jsonl" ;;
*check_reward_rise*) exec "$REAL_PYTHON" "$@" ;;
esac
"""


def run_nightly(tmp_path, values, *arguments):
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    write_metrics(tmp_path / "metrics.jsonl", values)
    environment = os.environ | {
        "PYTHON": str(stub),
        "REAL_PYTHON": sys.executable,
        "RECORD": str(tmp_path / "record"),
        "METRICS": str(tmp_path / "metrics.jsonl"),
        "NIGHTLY_OUT": str(tmp_path / "out"),
        "NIGHTLY_MODEL": str(tmp_path / "model"),
        "NIGHTLY_DATA": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/nightly_grpo.sh"), *arguments], env=environment, capture_output=True, text=True
    )
    commands = [line.split("\0")[:-1] for line in (tmp_path / "record").read_text().splitlines()]
    return done, commands


def test_its_command_passes_every_check_and_its_exit_code_is_that_of_the_rise(tmp_path):
    write_model(tmp_path / "model")
    done, commands = run_nightly(tmp_path, [0.1] * 10 + [0.3] * 10, "trainer.total_training_steps=3")
    assert done.returncode == 0 and "rose" in done.stdout, done.stderr
    assert commands[0][-2:] == ["--local_dataset_path", str(tmp_path)]
    (trainer,) = [command for command in commands if "verl.trainer.main_ppo" in command]
    for split in ("train", "test"):
        (tmp_path / "out/data").mkdir(exist_ok=True, parents=True)
        write_rows(tmp_path / f"out/data/{split}.parquet", [PROMPT] * 64)
    config = compose_config("ppo_trainer", trainer[2:])
    assert config.actor_rollout_ref.actor.megatron.context_parallel_size == 2
    assert config.trainer.total_training_steps == 3
    validate_ppo_config(config)


def test_a_reward_that_falls_fails_the_night(tmp_path):
    write_model(tmp_path / "model")
    done, _ = run_nightly(tmp_path, [0.3] * 10 + [0.1] * 10)
    assert done.returncode == 1 and "DID NOT RISE" in done.stdout
