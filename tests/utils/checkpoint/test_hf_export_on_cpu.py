# SPDX-License-Identifier: Apache-2.0
"""What stands in an exported folder: names, shards, configuration, tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.utils.checkpoint.hf_export import save_hf_folder
from verl.utils.tiny_model import save_tiny_qwen3_moe


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(save_tiny_qwen3_moe(str(tmp_path / "source"), hidden=32, head_dim=8, experts=2, moe_intermediate=8))


def weights_of(source: Path) -> dict[str, torch.Tensor]:
    return load_file(source / "model.safetensors")


def add_to_source(source: Path, **tensors: torch.Tensor) -> None:
    save_file(weights_of(source) | tensors, source / "model.safetensors", metadata={"format": "pt"})


def test_shards_hold_every_tensor_once_and_load(source: Path, tmp_path: Path) -> None:
    weights = {name: tensor + 1 for name, tensor in weights_of(source).items()}
    save_hf_folder(weights.items(), str(source), str(tmp_path / "out"), max_shard_bytes=4096)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys() and len(set(index["weight_map"].values())) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_other_names_than_the_source_has_are_refused(source: Path, tmp_path: Path, change: str) -> None:
    weights = weights_of(source)
    if change == "missing":
        weights.pop("model.norm.weight")
    else:
        weights["model.other.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=f"{change}.*model.(norm|other).weight"):
        save_hf_folder(weights.items(), str(source), str(tmp_path / "out"))


def test_buffers_of_older_folders_are_not_missed(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    add_to_source(source, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    save_hf_folder(weights.items(), str(source), str(tmp_path / "out"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.2.eh_proj.weight"])
def test_layers_that_were_not_built_are_neither_missed_nor_announced(source: Path, tmp_path: Path, name: str) -> None:
    weights = weights_of(source)
    add_to_source(source, **{name: torch.zeros(4)})
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="missing"):
        save_hf_folder(weights.items(), str(source), str(tmp_path / "with"))
    save_hf_folder(weights.items(), str(source), str(tmp_path / "out"), without_mtp=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_another_configuration_and_tokenizer_are_written(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer_config.json").write_text("{}")
    (other / "model.safetensors").write_text("not to be copied")
    config = Qwen3Config(rms_norm_eps=0.125)
    save_hf_folder(
        weights_of(source).items(), str(source), str(tmp_path / "out"), config=config, tokenizer_source=str(other)
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 0.125
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights_of(source).keys()
