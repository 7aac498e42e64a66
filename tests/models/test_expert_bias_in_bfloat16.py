# SPDX-License-Identifier: Apache-2.0
"""The routers' correction bias is float32 in a bfloat16 model, to the last bit, wherever the weights go."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.engine_world import Case, engine, loss_function, rank_batch
from tests.scripts.loading import load_script
from tests.utils_dist import run_world
from verl.utils.tiny_model import save_tiny_deepseek_v3

CASE = Case("bfloat16", loss="sft", dtype="bfloat16", distributed_optimizer=True)
CRITIC = Case("critic", loss="value", dtype="bfloat16")
SUFFIX = "e_score_correction_bias"


def save_model(folder: Path) -> str:
    """Weights in bfloat16, the bias in float32 with bits that bfloat16 does not have."""
    save_tiny_deepseek_v3(folder, hidden=32, experts=4, kv_lora_rank=16, moe_intermediate=24, dtype="bfloat16")
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if name.endswith(SUFFIX):
            weights[name] = 0.1 * torch.randn(tensor.shape, generator=generator)
            assert (weights[name] != weights[name].bfloat16()).all()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def bias_of(weights: Any) -> torch.Tensor:
    """The one bias among named tensors, which is read to its end."""
    (bias,) = [tensor.detach().clone() for name, tensor in weights if name.endswith(SUFFIX)]
    return bias


def routers_of(built: Any) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [part for chunk in built.module for part in chunk.modules() if isinstance(part, TopKRouter)]


def in_rollout(built: Any, path: str) -> torch.Tensor:
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.hf_rollout import HFRollout

    config = RolloutConfig(name="hf", prompt_length=8, response_length=8, dtype="bfloat16")
    rollout = HFRollout(config, HFModelConfig(path=path))
    for name, tensor in rollout.model.state_dict().items():
        if name.endswith(SUFFIX):
            tensor.zero_()
    rollout.update_weights(built.get_per_tensor_param()[0])
    return bias_of(rollout.model.state_dict().items())


def everywhere(rank: int, world: int, path: str, root: str) -> dict[str, torch.Tensor]:
    """The bias of the folder's model in each place, then of one that was trained for a step."""
    found = {}
    with engine(path, CASE) as built:
        built.export_hf(f"{root}/export")
        found["export"] = bias_of(load_file(f"{root}/export/model.safetensors").items())
        found["stream"] = bias_of(built.get_per_tensor_param()[0])
        found["rollout"] = in_rollout(built, path)
        with built.train_mode():
            built.optimizer_zero_grad()
            built.forward_backward_batch(rank_batch(CASE, built), loss_function(CASE))
            built.optimizer_step()
        found["trained"] = bias_of(built.get_per_tensor_param()[0])
        (router,) = routers_of(built)
        found["counts"] = router.local_tokens_per_expert.clone()
        built.save_checkpoint(f"{root}/checkpoint")
    with engine(path, CASE) as built:
        built.load_checkpoint(f"{root}/checkpoint")
        found["resumed"] = bias_of(built.get_per_tensor_param()[0])
    with engine(path, CRITIC) as built:
        (router,) = routers_of(built)
        router.expert_bias.add_(0.001)
        found["critic"] = bias_of(built.get_per_tensor_param()[0])
        found["critic, its own"] = router.expert_bias.clone()
    return found


def converted(rank: int, world: int, path: str, root: str) -> torch.Tensor:
    """The bias that the converter writes."""
    from verl.models.mcore.bridge import stream_hf_weights

    script = load_script("converter_hf_to_mcore.py")
    return bias_of(stream_hf_weights(*script.build(path, {}, "bfloat16", False, False)))


def rounded(rank: int, world: int, path: str, root: str) -> torch.Tensor:
    """The bias of an engine that casts everything, as Megatron would."""
    with mock.patch("verl.models.mcore.bridge._router_buffers_kept", lambda chunk: contextlib.nullcontext()):
        with engine(path, CASE) as built:
            return bias_of(built.get_per_tensor_param()[0])


def in_world(rank: int, world: int, path: str, root: str) -> dict[str, torch.Tensor]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    found = everywhere(rank, world, path, root) | {"rounded": rounded(rank, world, path, root)}
    found["converter"] = converted(rank, world, path, root)
    reset_megatron_state()
    return found


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.gloo
def test_the_bias_keeps_every_bit(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    source = bias_of(load_file(f"{path}/model.safetensors").items())
    (found,) = run_world(in_world, 1, path, str(tmp_path), timeout_s=120)
    for place in ("export", "stream", "rollout", "converter"):
        assert is_same(found[place], source), (place, found[place], source)
    assert not is_same(found["rounded"].float(), source)  # what this test is there to see
    moved = (found["trained"] - source).abs()
    assert moved.max() > 0 and (moved <= 1.001e-3).all()
    assert is_same(found["resumed"], found["trained"])
    assert is_same(found["critic"], found["critic, its own"]) and not is_same(found["critic"], source)
    assert found["counts"].dtype == torch.float32
