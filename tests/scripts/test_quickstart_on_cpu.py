# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from verl.utils.config import compose_config

ROOT = Path(__file__).resolve().parents[2]


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "quickstart" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_commands_use_keys_that_exist():
    run = _load("run")
    sft = run.sft_command(Path("/q"), seed=3, steps=7, num_workers=2)
    assert sft[:2] == ["-m", "verl.trainer.sft_trainer"]
    config = compose_config("sft_trainer_engine", sft[2:])
    assert config.trainer.total_training_steps == config.trainer.save_freq == 7 and config.trainer.seed == 3
    grpo = run.grpo_command(Path("/q"), Path("/m"), 3, 7, 5, num_workers=2, context_parallel=2)
    config = compose_config("ppo_trainer", grpo[2:])
    assert config.actor_rollout_ref.actor.megatron.context_parallel_size == 2
    assert config.data.seed == 3 and config.trainer.test_freq == 5


def test_the_warm_up_fits_into_its_epochs():
    run = _load("run")
    config = compose_config("sft_trainer_engine", run.sft_command(Path("/q"), 0, 400, 2)[2:])
    assert config.trainer.total_epochs * (8000 // config.data.train_batch_size) >= 400


def _metrics(report):
    log = [(0, {report.VALIDATION_KEY: 0.4})]
    log += [(step, {"timing_s/step": step / 10, "critic/score/mean": 0.5}) for step in (1, 2, 3, 4, 5)]
    log[-1][1][report.VALIDATION_KEY] = 0.9
    return log


def test_summary_takes_first_and_last_validation_and_the_median_step():
    report = _load("report")
    summary = report.summarise(_metrics(report), {"sft": 1.0, "grpo": 2.0})
    assert (summary["held_out_before"], summary["held_out_after"]) == (0.4, 0.9)
    assert summary["grpo_step_seconds"] == pytest.approx(0.4)
    assert summary["grpo_phase_seconds"] == {"step": pytest.approx(0.4)}
    assert summary["seconds"] == {"sft": 1.0, "grpo": 2.0, "total": 3.0}
    assert summary["held_out_by_step"] == {"0": 0.4, "5": 0.9}


def _report(tmp_path, monkeypatch, rescored):
    report = _load("report")
    (tmp_path / "grpo").mkdir()
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in _metrics(report)]
    (tmp_path / "grpo" / "metrics.jsonl").write_text("".join(lines))
    monkeypatch.setattr(report, "score_with_transformers", lambda *args: rescored)
    report.write_report(tmp_path, tmp_path / "model", 0, 2, {"grpo": 1.0})


def test_report_writes_curves_and_summary(tmp_path, monkeypatch, capsys):
    _report(tmp_path, monkeypatch, rescored=0.9)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_rescored_with_transformers"] == 0.9
    assert {"python", "torch", "megatron-core", "verl"} <= summary["versions"].keys()
    assert "0.400 -> 0.900" in capsys.readouterr().out


def test_report_fails_when_the_saved_model_scores_otherwise(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="does not score what the last validation said"):
        _report(tmp_path, monkeypatch, rescored=0.89)


def test_a_wrong_seed_is_refused_before_anything_is_installed():
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "quickstart.sh", "abc"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and "a seed, a whole number" in done.stderr


def test_a_failing_command_ends_the_quickstart_with_its_exit_code(capsys):
    with pytest.raises(SystemExit) as caught:
        _load("run").run_python(["-c", "raise SystemExit(7)"])
    assert caught.value.code == 7
