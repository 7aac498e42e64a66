# SPDX-License-Identifier: Apache-2.0
"""A model's config.json, with what replaces its entries, or the reason why there is none."""

import json
from pathlib import Path

import pytest

from verl.trainer.ppo.preflight_model import read_model
from verl.utils.hf_config import architecture_of, find_hf_config, read_hf_config, text_config
from verl.utils.model_size import read_model_shape

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "model_configs"


def write(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "config.json"


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-VL-30B-A3B-Instruct"])
def test_an_entry_is_replaced_for_every_reader(name: str) -> None:
    model = {"path": str(CONFIGS / name), "override_config": {"num_hidden_layers": 4}}
    config, file = find_hf_config(model)
    assert config is not None and file == str(CONFIGS / name / "config.json")
    assert config["num_hidden_layers"] == 4
    facts = read_model(model)
    assert facts is not None and facts.number("num_hidden_layers") == 4
    assert read_model_shape(config).num_layers == 4
    assert text_config(read_hf_config(CONFIGS / name / "config.json"))["num_hidden_layers"] > 4


def test_what_is_no_config_is_said(tmp_path: Path) -> None:
    model = {"path": str(tmp_path)}
    assert find_hf_config({}) == (None, "no model is named")
    assert find_hf_config({"path": "/no/such/folder"})[1].startswith("/no/such/folder is neither a folder nor in")
    assert find_hf_config(model) == (None, f"{tmp_path}/config.json does not exist")
    write(tmp_path, [1])
    assert find_hf_config(model) == (None, f"{tmp_path}/config.json cannot be read: it holds no JSON object")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="config.json cannot be read: Expecting"):
        read_hf_config(tmp_path / "config.json")


def test_the_language_model_of_a_config(tmp_path: Path) -> None:
    plain = read_hf_config(write(tmp_path, {"architectures": ["A"], "text_config": None, "n": 1}))
    assert text_config(plain) is plain and architecture_of(plain) == "A"
    assert text_config({"text_config": {"n": 2}, "n": 1}) == {"n": 2}
    assert architecture_of({}) is architecture_of(None) is architecture_of({"architectures": []}) is None
