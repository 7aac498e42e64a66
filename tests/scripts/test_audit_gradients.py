# SPDX-License-Identifier: Apache-2.0
"""The user's audit: its arguments, the layouts it picks, and one small run on a folder that holds only a config."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.audit_gradients import fitting_layouts, parse
from tests.utils_dist import REPO_ROOT


def test_keys_and_folders_are_checked_by_name(tmp_path: Path) -> None:
    folder, settings, layout = parse(["cp=2", "z_loss=0.5", "out=x.md"])
    assert folder is None and layout == {"cp": 2} and settings["z_loss"] == 0.5 and settings["out"] == "x.md"
    for arguments, message in {
        ("wolrd=2",): "wolrd: no such key; did you mean world?",
        ("cp=two",): "cp=two: a number is needed",
        (str(tmp_path),): "no config.json there",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse(list(arguments))


def test_layouts_fit_the_processes_and_the_model() -> None:
    assert set(fitting_layouts(1, True, {})) == {"one process", "overlapped"}
    four = fitting_layouts(4, True, {})
    assert {"dp4", "cp2 dp2", "cp4", "tp2 cp2", "pp2 vpp2 dp2", "tp2 cp2 ep2"} <= set(four)
    assert four["pp2 vpp2 dp2"]["model"] == "deep"
    dense = fitting_layouts(4, False, {})
    assert not any("ep" in name.split("dp")[0] for name in dense) and "tp2 dp2 without sp" in dense
    assert fitting_layouts(2, True, {"cp": 2}) == {"cp2": {"cp": 2, "model": "moe"}}
    with pytest.raises(ValueError, match="does not fit 2 processes"):
        fitting_layouts(2, True, {"cp": 4})


@pytest.mark.gloo
@pytest.mark.slow
def test_a_folder_with_only_a_config_is_audited(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    out = tmp_path / "table.md"
    script = str(REPO_ROOT / "scripts" / "audit_gradients.py")
    command = [sys.executable, script, str(tmp_path), "world=2", "cp=2", "cases=1", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 3 cases beyond their limits" in done.stdout
    assert "| cp2 | 3 |" in out.read_text(encoding="utf-8")
