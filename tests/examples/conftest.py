# SPDX-License-Identifier: Apache-2.0
"""Data for the example scripts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import REPO_ROOT


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command in every header makes, from the excerpt that the tests carry."""
    folder = tmp_path_factory.mktemp("gsm8k")
    command = [sys.executable, "examples/data_preprocess/gsm8k.py", "--local_save_dir", str(folder)]
    local = ["--local_dataset_path", "tests/data/gsm8k"]
    subprocess.run([*command, *local], cwd=REPO_ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def dry_folder(tmp_path_factory: pytest.TempPathFactory):
    """Makes a model folder of a config.json (None: the quickstart's) and a tokenizer, without weights."""
    from verl.utils.tiny_model import build_character_tokenizer

    def make(fixture: Path | None) -> Path:
        folder = tmp_path_factory.mktemp("model")
        build_character_tokenizer().save_pretrained(folder)
        if fixture is None:
            config = json.loads((REPO_ROOT / "tests/fixtures/model_configs/Qwen3-30B-A3B/config.json").read_text())
            config |= dict(num_hidden_layers=2, hidden_size=128, head_dim=32, num_attention_heads=4, vocab_size=64)
            config |= dict(num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
            (folder / "config.json").write_text(json.dumps(config))
        else:
            (folder / "config.json").write_bytes((fixture / "config.json").read_bytes())
        return folder

    return make
