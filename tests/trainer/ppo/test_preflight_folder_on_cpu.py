# SPDX-License-Identifier: Apache-2.0
"""Model folders whose files are cut off, swapped or of another model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.config.files import write_model
from verl.trainer.ppo.preflight_files import check_model_folder
from verl.trainer.ppo.preflight_folder import safetensors_problem, tokenizer_problem, weights_problem

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"vocab_size": 4, "hidden_size": 2}
EMBEDDING = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}


def write_tensors(file: Path, header: dict, data: int = 32) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


def problems(folder: Path, **model: str) -> list[str]:
    node = {"path": str(folder), "hf_config_path": None, "tokenizer_path": None, "override_config": {}} | model
    return check_model_folder("model", node)


def test_what_safetensors_writes_is_whole(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn):
        file = tmp_path / f"{dtype}.safetensors"
        save_file({"a": torch.zeros(3, 2).to(dtype), "b": torch.zeros(()).to(dtype)}, file, metadata={"format": "pt"})
        assert safetensors_problem(file) == ""
        file.write_bytes(file.read_bytes()[:-1])
        assert "is cut off" in safetensors_problem(file)
    assert weights_problem(tmp_path).startswith(
        "has weights that cannot be read: torch.bfloat16.safetensors is cut off"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x00\x00\x00", "does not begin like a safetensors file"),
        (b"not a tensor file at all", "does not begin like a safetensors file"),
        ((500).to_bytes(8, "little") + b"{}", "is cut off: 10 bytes, and the header alone has 508"),
        ((2).to_bytes(8, "little") + b"{,", "has a header that is no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "has a header that is no JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a pointer of Git LFS", ),
    ],
)  # fmt: skip
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert safetensors_problem(file).startswith(f"model.safetensors {words}")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"shape": [4, 3]}, "gives w of shape [4, 3] in F32 32 bytes"),
        ({"dtype": "BF16"}, "gives w of shape [4, 2] in BF16 32 bytes"),
        ({"data_offsets": [-32, 0]}, "gives w of shape"),
        ({"data_offsets": None}, "has no dtype, shape and data_offsets for w"),
        ({"shape": "large"}, "has no dtype, shape and data_offsets for w"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, entry: dict, words: str) -> None:
    good = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
    file = write_tensors(tmp_path / "model.safetensors", {"w": good | entry})
    assert words in safetensors_problem(file)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", EMBEDDING)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a.safetensors", "w": "a.safetensors"}}))
    assert weights_problem(tmp_path) == (
        "lacks 1 tensors that model.safetensors.index.json names, among them w of a.safetensors"
    )
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}))
    assert weights_problem(tmp_path, SIZES) == ""
    index.write_text("{}")
    assert "cannot be read: KeyError('weight_map')" in weights_problem(tmp_path)


def test_weights_of_another_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **SIZES)
    write_tensors(folder / "model.safetensors", EMBEDDING)
    assert problems(folder) == []
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3MoeForCausalLM"]} | SIZES | {"hidden_size": 3})
    )
    (found,) = problems(folder)
    assert "of another model than its config.json" in found and "[4, 2]" in found and "[4, 3]" in found


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **SIZES)
    file = folder / "tokenizer.json"
    for vocab in ({"a": 0, "b": 4}, [["a", 0.0]] * 5):
        file.write_text(json.dumps({"model": {"vocab": vocab}}))
        (found,) = problems(folder)
        assert found.startswith(f"model.path={folder} has a tokenizer of 5 tokens, more than the 4")
        assert tokenizer_problem(file, 5) == tokenizer_problem(file, None) == ""
    # Added tokens above the vocabulary occur in public models, whose texts do not hold them.
    file.write_text(json.dumps({"model": {"vocab": {"a": 3}}, "added_tokens": [{"id": 4, "content": "<image>"}]}))
    assert problems(folder) == []
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{")
    (found,) = problems(folder, tokenizer_path=str(other))
    assert found.startswith(f"model.tokenizer_path={other} has a tokenizer.json that cannot be read: Expecting")
    (found,) = problems(folder, tokenizer_path=str(tmp_path / "nowhere"))
    assert found.startswith("model.tokenizer_path=") and "has no tokenizer" in found


@pytest.mark.parametrize("content", ["", "[]", '"text"', "null", "{", "{}", '{"architectures": "Qwen3MoeForCausalLM"}'])
def test_a_config_that_is_none(tmp_path: Path, content: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(content)
    (found,) = problems(folder)
    assert "config.json" in found and ("cannot be read" in found or "names no architectures" in found)


def test_an_empty_folder_is_one_problem(tmp_path: Path) -> None:
    (found,) = problems(tmp_path)
    assert found.startswith(f"model.path={tmp_path} is an empty folder")


def test_an_unknown_architecture_is_answered_briefly_and_all_can_be_listed(tmp_path: Path) -> None:
    (found,) = problems(write_model(tmp_path / "model", architectures=["GPT2LMHeadModel"]))
    assert "GPT2LMHeadModel, which megatron-bridge cannot load" in found and len(found) < 500
    module = found.rpartition("python3 -m ")[2]
    listed = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"Qwen3MoeForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM"} <= set(listed.split())
