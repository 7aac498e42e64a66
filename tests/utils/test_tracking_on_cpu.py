# SPDX-License-Identifier: Apache-2.0
"""Metrics reach every backend with their types, and no backend can end a run; the progress line."""

import io
import json
import logging
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from verl.utils import tracking
from verl.utils.progress import TrainingProgress
from verl.utils.tracking import Tracking


@pytest.fixture(autouse=True)
def no_folders_from_the_environment(monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)


def read_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_file_writes_native_types_and_null_for_nan(tmp_path):
    log = Tracking("p", "e", "file", default_local_dir=tmp_path)
    data = {
        "int": np.int32(3),
        "bool": np.bool_(True),
        "float": np.float32(0.5),
        "double": np.float64(0.25),
        "long": np.longdouble(2),
        "zero_d": torch.tensor(7),
        "zero_d_bf16": torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
        "array": np.array([1, 2]),
        "nested": {"a": [np.int64(1), (torch.tensor([True]), None)]},
        "nan": float("nan"),
        "inf_array": np.array([np.inf, 1.0]),
        "text": "3",
    }
    log.log(data, step=np.int64(4))
    log.finish()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    want = {
        "int": 3,
        "bool": True,
        "float": 0.5,
        "double": 0.25,
        "long": 2.0,
        "zero_d": 7,
        "zero_d_bf16": 1.5,
        "array": [1, 2],
        "nested": {"a": [1, [[True], None]]},
        "nan": None,
        "inf_array": [None, 1.0],
        "text": "3",
    }
    assert line == {"step": 4, "data": want}
    assert {name: type(value) for name, value in line["data"].items()} == {
        name: type(value) for name, value in want.items()
    }
    assert type(tracking.to_native(np.float64(1))) is float


def test_file_goes_on_after_a_restart_and_follows_the_config(tmp_path):
    config = {"trainer": {"default_local_dir": str(tmp_path / "run")}}
    for step in (1, 2):
        log = Tracking("p", "e", ["file"], config=config)
        log.log({"x": step}, step)
        log.finish()
        log.finish()
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_file_path_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "other.jsonl"))
    Tracking("p", "e", "file", default_local_dir=tmp_path / "run").log({"x": 1}, 1)
    assert read_lines(tmp_path / "other.jsonl") == [{"step": 1, "data": {"x": 1}}]


def test_console_prints_one_line_per_step(tmp_path, capsys):
    log = Tracking("p", "e", "console", default_local_dir=tmp_path)
    log.log({"actor/pg_loss": np.float32(0.123456789), "n": 3, "text": "left out"}, 7)
    assert capsys.readouterr().out == "step:7 - actor/pg_loss:0.12346 - n:3\n"


def test_tensorboard_has_clean_distinct_tags(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Tracking("p", "e", ["tensorboard"], default_local_dir=tmp_path)
    log.log({"val//acc@1": 0.5, "val/acc_1": 0.25, "plain/x": torch.tensor(2.0), "text": "no"}, 3)
    log.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert values == {"val/acc_1": [(3, 0.5)], "val/acc_1_2": [(3, 0.25)], "plain/x": [(3, 2.0)]}


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match=r"trainer.logger=\['tensorbord'\].*console, tensorboard, file, wandb"):
        Tracking("p", "e", ["console", "tensorbord"])


def test_missing_wandb_is_one_warning_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        log = Tracking("p", "e", ["wandb", "file"], default_local_dir=tmp_path)
        log.log({"x": 1}, 1)
        log.log({"x": 1}, 2)
    (record,) = caplog.records
    assert "wandb" in record.getMessage() and "ModuleNotFoundError" in record.getMessage()
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2


def test_a_backend_that_raises_is_warned_about_once_and_tried_again(tmp_path, monkeypatch, caplog):
    calls = []

    class Failing:
        def __init__(self, *args):
            pass

        def log(self, values, step):
            calls.append(step)
            raise OSError("disk full")

        def finish(self):
            raise OSError("disk still full")

    monkeypatch.setitem(tracking._BACKENDS, "wandb", Failing)
    with caplog.at_level(logging.WARNING):
        log = Tracking("p", "e", ["wandb", "file"], default_local_dir=tmp_path)
        for step in range(3):
            log.log({"x": 1}, step)
        log.finish()
    assert calls == [0, 1, 2]
    assert ["disk full" in r.getMessage() for r in caplog.records] == [True, False]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3


def test_no_handler_or_level_of_the_root_logger_changes(tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    Tracking("p", "e", ["console", "file", "tensorboard"], default_local_dir=tmp_path).finish()
    assert (root.level, list(root.handlers)) == before


def test_progress_without_a_terminal_prints_a_line_now_and_then():
    out = io.StringIO()
    with TrainingProgress(40, "GRPO", console=Console(file=out)) as progress:
        for step in range(1, 41):
            progress.update(step, reward=0.5, grad_norm=np.float32(1.25), tokens_per_s=12345.6)
    lines = out.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[-1].startswith("GRPO 40/40  reward 0.500  grad norm 1.25  tokens/s 12,346")


def test_progress_on_a_terminal_draws_a_bar_with_the_figures():
    out = io.StringIO()
    with TrainingProgress(2, "GRPO", console=Console(file=out, force_terminal=True, width=120)) as progress:
        progress.update(1)
        progress.update(2, reward=float("nan"), tokens_per_s=10)
    text = out.getvalue()
    assert "GRPO" in text and "2/2" in text
    assert "reward nan" in text and "tokens/s 10" in text and "grad norm" not in text
