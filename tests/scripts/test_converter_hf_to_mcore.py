# SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> megatron-core -> any layout: the same bits, or an error that says what is wrong."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.scripts.loading import SCRIPTS, load_script
from tests.utils_dist import run_world
from verl.utils.checkpoint.dist_weights import dist_checkpoint_problem
from verl.utils.tiny_model import save_tiny_qwen3_moe

script = load_script("converter_hf_to_mcore.py")
SIZES: dict[str, Any] = dict(hidden=32, heads=4, kv_heads=2, head_dim=8, experts=4, moe_intermediate=24)
TP2_PP2_EP2 = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}


def arguments(source: Path | str, output: Path | str, *more: Any) -> list[str]:
    return ["--hf_model_path", str(source), "--output_path", str(output), *map(str, more)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE in bfloat16; its random weights are all different."""
    return Path(save_tiny_qwen3_moe(tmp_path_factory.mktemp("hf"), dtype="bfloat16", **SIZES))


@pytest.fixture(scope="module")
def one_process(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(checkpoint that one process wrote, what the script said)."""
    output = tmp_path_factory.mktemp("mcore") / "new"
    command = [sys.executable, str(SCRIPTS / "converter_hf_to_mcore.py"), *arguments(source, output, "--test")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


def test_one_process_converts_and_compares(one_process: tuple[Path, str], source: Path) -> None:
    output, said = one_process
    tensors = len(load_file(source / "model.safetensors"))
    assert f"{tensors} tensors as bfloat16 in {output} (1 processes, pipeline_model_parallel_size=1)" in said
    assert "every tensor of the checkpoint is the source's, bit by bit" in said
    assert dist_checkpoint_problem(str(output)) is None


def _convert(source: str, output: str) -> tuple[int, str]:
    flags = [word for name, size in TP2_PP2_EP2.items() for word in (f"--{name}", size)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = script.convert(script.parse(arguments(source, output, *flags, "--test")))
    return code, printed.getvalue()


def _weights(
    path: str, checkpoint: str, dtype: str, layout: dict[str, int], save_to: str | None = None
) -> dict[str, torch.Tensor]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    config = McoreEngineConfig(dtype=dtype, use_dist_checkpointing=True, dist_checkpointing_path=checkpoint, **layout)
    engine = MegatronEngineWithLMHead(HFModelConfig(path=path), config)
    try:
        engine.initialize()
        if save_to is not None:
            engine.save_checkpoint(save_to)
        return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    finally:
        reset_megatron_state()


def _in_a_world(
    rank: int, world_size: int, source: str, blank: str, other: str, one: str, place: str
) -> dict[str, Any]:
    """What four ranks see: a conversion, one that writes a wrong number, and checkpoints read in other layouts.

    ``blank`` is the model with other weights: what is read from a checkpoint cannot come from model.path.
    """
    from verl.utils.checkpoint import dist_weights
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    four, seen = os.path.join(place, "four"), {"converted": _convert(source, os.path.join(place, "four"))}
    reset_megatron_state()

    def save_something_else(chunks: list[Any], folder: str) -> None:
        if rank == 3:
            next(p for n, p in chunks[0].named_parameters() if "linear_fc2" in n).data[5, 7] += 1.0
        right(chunks, folder)

    right = dist_weights.save_dist_weights
    with mock.patch.object(dist_weights, "save_dist_weights", save_something_else):
        seen["fault"] = _convert(source, os.path.join(place, "fault"))
    reset_megatron_state()
    seen["one process, read in tp2 pp2 ep2"] = _weights(blank, one, "bfloat16", TP2_PP2_EP2)
    trained = os.path.join(place, "trained")
    seen["four, read in cp2 ep4"] = _weights(
        blank, four, "float32", {"context_parallel_size": 2, "expert_model_parallel_size": 4}, save_to=trained
    )
    inner = os.path.join(trained, "dist_ckpt")
    seen["a training checkpoint"] = _weights(blank, inner, "bfloat16", {"pipeline_model_parallel_size": 2})
    try:
        _weights(other, one, "bfloat16", TP2_PP2_EP2)
    except ValueError as error:
        seen["another model"] = str(error)
    return seen if rank == 0 else {key: seen[key] for key in ("converted", "fault", "another model")}


@pytest.mark.gloo
@pytest.mark.slow
def test_any_layout_reads_the_same_bits(source: Path, one_process: tuple[Path, str], tmp_path: Path) -> None:
    blank = save_tiny_qwen3_moe(tmp_path / "blank", dtype="bfloat16", seed=7, **SIZES)
    other = save_tiny_qwen3_moe(tmp_path / "other", dtype="bfloat16", **SIZES | {"experts": 8})
    ranks = run_world(_in_a_world, 4, str(source), blank, other, str(one_process[0]), str(tmp_path), timeout_s=240)
    seen, expected = ranks[0], load_file(source / "model.safetensors")
    assert seen["converted"][0] == 0 and "bit by bit" in seen["converted"][1]
    for key in ("one process, read in tp2 pp2 ep2", "four, read in cp2 ep4", "a training checkpoint"):
        assert seen[key].keys() == expected.keys(), key
        wrong = [name for name, right in expected.items() if not torch.equal(seen[key][name].to(right), right)]
        assert not wrong, (key, wrong)
    # The planted fault: one number of one expert on one rank.
    assert [rank["fault"][0] for rank in ranks] == [1] * 4
    assert seen["fault"][1].count("1 of 768 numbers differ") == 1 and seen["fault"][1].count("differ") == 1
    assert all("mlp.router.weight" in rank["another model"] for rank in ranks)
    assert "is it a whole checkpoint of the model in model.path?" in seen["another model"]


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        ("folder", [], "no config.json there"),
        ("architecture", [], "'Qwen3MoFForCausalLM' of its config.json. Did you mean Qwen3MoeForCausalLM?"),
        ("weights", [], "no weights (*.safetensors) there"),
        ("file", [], "model.safetensors is cut off: 300 bytes, and the header alone has"),
        ("last byte", [], "model.safetensors is cut off: "),
        ("pointer", [], "model.safetensors is a pointer of Git LFS; fetch the file itself with: git lfs pull"),
        ("shard", [], "lacks 1 of the files that model.safetensors.index.json names, among them gone.safetensors"),
        ("config", [], "config.json cannot be read: "),
        ("type", [], "its weights are I8; dequantise them"),
        ("output", [], "is not empty"),
        ("output file", [], "is a file"),
        ("disk", [], "GiB are free"),
        ("", ["--expert_model_parallel_size", 0], "--expert_model_parallel_size 0: at least 1 is needed"),
        ("", ["--tensor_model_parallel_size", 2], "nnodes x nproc_per_node=1 ranks cannot be divided into the layout"),
        ("", ["--pipeline_model_parallel_size", 3], "--pipeline_model_parallel_size=3 does not divide the 2 layers"),
        ("vocabulary", ["--tensor_model_parallel_size", 2], "--tensor_model_parallel_size=2 cannot divide the vocab"),
        ("", ["--expert_model_parallel_size", 3], "--expert_model_parallel_size=3 does not divide the 4 experts"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_words(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, change: str, flags: list, said: str
) -> None:
    folder, output = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if change == "architecture":
        config["architectures"] = ["Qwen3MoFForCausalLM"]
    if change == "vocabulary":
        config["vocab_size"] = 65
    if change != "folder":
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if change == "config":
        (folder / "config.json").write_text("{", encoding="utf-8")
    if change == "shard":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    if change in ("file", "last byte"):
        whole = (source / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: 300 if change == "file" else -1])
    elif change == "pointer":
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    elif change == "type":
        save_file({"a": torch.zeros(3, dtype=torch.int8)}, folder / "model.safetensors")
    elif change != "weights":
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    if change == "output":
        output.mkdir()
        (output / "x").touch()
    if change == "output file":
        output.touch()
    nothing = mock.patch.object(script.shutil, "disk_usage", return_value=mock.Mock(free=10))
    with nothing if change == "disk" else contextlib.nullcontext():
        assert script.main(arguments(folder, output, *flags)) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert all(line.startswith("error: ") for line in error.splitlines())
    # Keys of a trainer, advised or not, are no flags of the script.
    assert not any(word in error for word in ("engine.", "override_", "+", "--."))
    assert change == "output" or not output.is_dir(), "nothing is made before all is checked"


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    assert dist_checkpoint_problem(str(tmp_path / "none")) == "no such folder"
    (tmp_path / "dist_ckpt").mkdir()
    assert f"did you mean {tmp_path}/dist_ckpt?" in dist_checkpoint_problem(str(tmp_path))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "'zarr'; 'torch_dist' is read" in dist_checkpoint_problem(str(tmp_path))
    (tmp_path / "metadata.json").write_text("{")
    assert "could not be read" in dist_checkpoint_problem(str(tmp_path))
