# SPDX-License-Identifier: Apache-2.0
"""Every run_*.sh, as written, against its own header: its command line composes, is right, and dry-runs here."""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.examples.scripts import REPO_ROOT, Script, all_scripts

SCRIPTS = {script.name: script for script in all_scripts()}
FOLDERS = ("grpo_trainer", "ppo_trainer", "sft", "mtp_trainer", "dapo", "gspo", "moe_cp")
GIB = 2**30
CARD_GIB = 79.1  # what a card of "80 GB" offers to a program


def test_every_folder_has_scripts_with_context_parallelism() -> None:
    for folder in FOLDERS:
        own = [script for name, script in SCRIPTS.items() if f"/{folder}/" in name]
        assert any(script.layout["CP"] > 1 for script in own), folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_written_like_the_others(name: str) -> None:
    script = SCRIPTS[name]
    lines = script.text.splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "# SPDX-License-Identifier: Apache-2.0"]
    assert lines[-1].strip() == '"$@"', "further arguments must come last, so that they win"
    assert script.path.stat().st_mode & stat.S_IXUSR
    assert max(map(len, lines)) <= 120
    assert name in script.text, "the header shows how the script is called"
    for field in ("GPUs", "Layout", "Regime", "Memory", "Curve"):
        assert script.claim(field)
    # What the header says of an environment variable is what the script does.
    head, _, body = script.text.partition("set -euo pipefail")
    defaults = dict(re.findall(r'^(\w+)="\$\{\1:-(.+)\}"$', body, re.MULTILINE))
    told = dict(re.findall(r"^#   ([A-Z_]+) .*\((.+)\)$", head, re.MULTILINE))
    assert defaults.keys() == told.keys()
    for variable, default in defaults.items():
        assert told[variable] == default or "quickstart" in told[variable]
        assert f'"${variable}"' in body


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_dry_runs_as_its_header_says(name: str, gsm8k: Path, dry_folder, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    assert script.fixture is None or script.fixture.is_dir(), f"{name} needs {script.fixture}/config.json"
    out = tmp_path / "out"
    out.mkdir()
    done = script.run(dry_folder(script.fixture), gsm8k, out, "trainer.dry_run=True", "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["errors"] == [] and report["exit_code"] == 0
    assert not list(tmp_path.glob("outputs")) and not any(out.iterdir()), "a dry run writes nothing"

    layout, told = report["layout"], script.layout
    keys = {"TP": "tensor", "PP": "pipeline", "CP": "context", "DP": "data"}
    assert {size: layout[key] for size, key in keys.items()} == {size: told[size] for size in keys}
    assert layout["world_size"] == math.prod(told[size] for size in keys)
    assert layout["world_size"] == int(re.search(r"\d+", script.claim("GPUs"))[0])
    assert layout["context"] > 1
    if told["EP"] > 1:
        keys = {"EP": "expert", "ETP": "expert_tensor", "expert-DP": "expert_data"}
        assert {size: layout[key] for size, key in keys.items()} == {size: told[size] for size in keys}

    flag = re.match(r"calculate_per_token_loss (on|off)", script.claim("Regime"))[1] == "on"
    assert all(regime["regime"]["per_token"] is flag for regime in report["regimes"])
    check_memory(script, report["memory"])


def check_memory(script: Script, memory: dict[str, Any]) -> None:
    """The header's figures are those of the estimate of today, and a GPU of 80 GB has some room beside it."""
    estimate, host = memory["estimate"]["total"] / GIB, memory["host_bytes_of_a_machine"] / GIB
    told = float(re.match(r"([\d.]+) GiB a (?:GPU|process)", script.claim("Memory"))[1])
    assert estimate == pytest.approx(told, abs=0.5), f"{script.name}: header {told} GiB, dry run {estimate:.1f} GiB"
    if "of 80 GB" in script.claim("GPUs"):
        assert estimate <= 0.88 * CARD_GIB
        assert "not measured on a GPU" in script.claim("Memory")
        phases = {"generate": "in generation", "save_checkpoint": "while a checkpoint is saved"}
        assert phases[memory["estimate"]["worst_phase"].split()[-1]] in script.claim("Memory")
    if host and "of 80 GB" in script.claim("GPUs"):
        assert float(re.match(r"(\d+) GiB of a machine's memory", script.claim("Host"))[1]) == round(host)
    else:
        assert "# Host:" not in script.text


WRONG = {
    "examples/grpo_trainer/run_qwen3_8b_megatron.sh": (
        "actor_rollout_ref.actor.megatron.context_parallel_size=3",
        "context_parallel_size=3",
    ),
    "recipe/moe_cp/run_qwen3_30b_a3b_cp4_megatron.sh": (
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "calculate_per_token_loss=True",
    ),
    "examples/sft/run_qwen2_5_7b_megatron.sh": ("data.train_batch_size=127", "data.train_batch_size=127"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_fault_is_found(name: str, gsm8k: Path, dry_folder, tmp_path: Path) -> None:
    fault, words = WRONG[name]
    out = tmp_path / "out"
    out.mkdir()
    model = dry_folder(SCRIPTS[name].fixture)
    done = SCRIPTS[name].run(model, gsm8k, out, fault, "trainer.dry_run=True", "--json")
    assert done.returncode == 2, done.stdout[-1000:]
    assert any(words in error for error in json.loads(done.stdout)["errors"])


def test_the_vision_model_s_run_is_refused_and_its_dry_run_says_why(gsm8k: Path, dry_folder, tmp_path: Path) -> None:
    script = SCRIPTS["examples/grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh"]
    out, model = tmp_path / "out", dry_folder(script.fixture)
    out.mkdir()
    done = script.run(model, gsm8k, out, "trainer.dry_run=True", "--json")
    notes = json.loads(done.stdout)["notes"]
    assert done.returncode == 0 and any("needs the package transformer_engine" in note for note in notes), notes
    done = script.run(model, gsm8k, out)
    assert done.returncode == 2 and "needs the package transformer_engine" in done.stderr, done.stderr
    assert "DRY RUN ONLY" in script.text


def test_the_table_of_scripts_is_complete() -> None:
    table = (REPO_ROOT / "docs" / "start" / "examples.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip().strip("`"): line for line in table.splitlines() if line.startswith("| `")}
    assert rows.keys() == SCRIPTS.keys()
    for name, row in rows.items():
        script = SCRIPTS[name]
        for size, value in script.layout.items():
            assert value == 1 or f"{size}={value}" in row, f"{name}: {size}={value} is not in the table"
        told = re.match(r"([\d.]+) GiB", script.claim("Memory"))[1]
        assert told in row, f"{name}: {told} GiB is not in the table"
        if "# Host:" in script.text:
            told = re.match(r"\d+ GiB", script.claim("Host"))[0]
            assert f"| {told} |" in row, f"{name}: {told} of host memory is not in the table"
        gpus = re.search(r"\d+", script.claim("GPUs"))[0]
        assert re.search(rf"\| {gpus}\b", row), f"{name}: {gpus} GPUs is not in the table"


def test_common_part_is_sourced_and_not_run() -> None:
    common = REPO_ROOT / "examples" / "common.sh"
    assert not os.access(common, os.X_OK)
    assert all("common.sh" in script.text for script in SCRIPTS.values())
