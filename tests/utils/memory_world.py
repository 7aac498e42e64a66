# SPDX-License-Identifier: Apache-2.0
"""Real engines on tiny models: what each rank holds, counted tensor by tensor."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from tests.models.engine_world import Case, engine, loss_function, rank_batch
from verl.workers.config import McoreOptimizerConfig

HIDDEN, LAYERS = 64, 4
# Every row of a batch is as long as the others, so that each rank holds the same number of tokens.
LENGTHS = ((16, 16),) * 4
NUM_TOKENS = sum(p + r for p, r in LENGTHS)


def save_models(folder: str) -> dict[str, str]:
    """Random models by name. All widths are multiples of 64, so that no parameter is padded in a buffer."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    from tests.models.mtp_world import save_tiny_hy_v3
    from verl.utils.tiny_model import build_character_tokenizer, save_tiny_qwen3_moe

    sizes: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype="float32",
    )
    mla = dict(q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64)
    sparse = dict(first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=0, num_key_value_heads=4)
    made = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=64, tie_word_embeddings=False)),
        "deepseek": DeepseekV3ForCausalLM(
            DeepseekV3Config(**sizes | mla | experts | sparse, tie_word_embeddings=False)
        ),
    }
    paths = {name: os.path.join(folder, name) for name in (*made, "qwen3_moe", "hy_v3")}
    for name, model in made.items():
        model.save_pretrained(paths[name])
        build_character_tokenizer(64).save_pretrained(paths[name])
    save_tiny_qwen3_moe(
        paths["qwen3_moe"], layers=LAYERS, hidden=HIDDEN, head_dim=64, experts=4, moe_intermediate=64, vocab=64
    )
    save_tiny_hy_v3(paths["hy_v3"], 1)
    return paths


@dataclass(frozen=True)
class Job:
    """A model, a case, and how it is trained."""

    model: str
    case: Case
    optimizer: str = "adam"
    activations: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.case.name}"


@dataclass
class Held:
    """What one rank holds, in numbers and bytes."""

    pp_rank: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    peak: int = 0


def measure(rank: int, world_size: int, paths: dict[str, str], jobs: list[Job]) -> list[Held]:
    """One optimiser step of every job, and what its tensors add up to."""
    found = []
    for job in jobs:
        config = McoreOptimizerConfig(optimizer=job.optimizer, lr=1e-3, total_training_steps=10)
        with engine(paths[job.model], job.case, config) as built:
            kept = _Saved(built) if job.activations else None
            with built.train_mode():
                if kept is None:  # gradients of zero make the optimizer's state all the same
                    built.optimizer_zero_grad()
                    built.optimizer_step()
                else:
                    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
                        built.train_batch(rank_batch(job.case, built), loss_function(job.case))
            held = _count(built)
            if kept is not None:
                held.activations, held.peak = kept.forward, kept.peak
            found.append(held)
    return found


def _count(built: Any) -> Held:
    from megatron.core import parallel_state as mpu

    parameters = [p for module in built.module for p in module.parameters()]
    buffers = [b for m in built.module for b in (*m.buffers, *m.expert_parallel_buffers)]
    in_buffers = {id(p) for b in buffers if b.param_data is not None for p in b.params}
    weights = sum(b.param_data.nbytes for b in buffers if b.param_data is not None)
    weights += sum(p.nbytes for p in parameters if id(p) not in in_buffers)
    return Held(
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        parameters=sum(p.numel() for p in parameters),
        weights=weights,
        gradients=sum(b.grad_data.nbytes for b in buffers),
        optimizer=_optimizer_bytes(built.optimizer, {p.untyped_storage().data_ptr() for p in parameters}),
    )


def _optimizer_bytes(optimizer: Any, weights: set[int]) -> int:
    """Bytes of every tensor that the optimizer holds and that is neither a weight nor a scalar."""
    tensors: dict[int, torch.Tensor] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        states = [value for state in inner.state.values() for value in state.values()]
        masters = [p for group in inner.param_groups for p in group["params"]]
        for tensor in (t for t in [*states, *masters] if torch.is_tensor(t) and t.dim()):
            if tensor.untyped_storage().data_ptr() not in weights:
                tensors[id(tensor)] = tensor
    return sum(tensor.nbytes for tensor in tensors.values())


class _Box:
    """A saved tensor; it goes when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor, owner: "_Saved") -> None:
        self.tensor, self.owner = tensor, owner

    def __del__(self) -> None:
        self.owner.release(self.tensor)


class _Saved:
    """Bytes of the storages saved for the backward: at its start, and at the peak of the step."""

    def __init__(self, built: Any) -> None:
        self.weights = {p.untyped_storage().data_ptr() for m in built.module for p in m.parameters()}
        self.live = self.forward = self.peak = 0
        self._holders: Counter[int] = Counter()
        self._backward_began = False

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.is_nested or tensor.untyped_storage().data_ptr() in self.weights:  # nested: the loss's few columns
            return tensor
        storage = tensor.untyped_storage()
        self._holders[storage._cdata] += 1
        if self._holders[storage._cdata] == 1:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        return _Box(tensor, self)

    def unpack(self, saved: Any) -> torch.Tensor:
        if not self._backward_began:
            self._backward_began, self.forward = True, self.live
        return saved.tensor if isinstance(saved, _Box) else saved

    def release(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._holders[storage._cdata] -= 1
        if not self._holders[storage._cdata]:
            self.live -= storage.nbytes()


def read_config(path: str) -> dict[str, Any]:
    with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
        return json.load(file)
