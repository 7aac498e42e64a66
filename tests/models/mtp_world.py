# SPDX-License-Identifier: Apache-2.0
"""A tiny model with multi-token prediction layers, and the gradient of its objective written out for one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models.engine_world import VOCAB, Case, padded_batch
from tests.models.gradients import Gradients, whole_gradients

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, MOE_WIDTH, LAYERS = 32, 4, 2, 8, 4, 24, 2


class _Draw:
    """Random weights by hub name, large enough for routing and next tokens to be far from uniform."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * 2.5 / shape[-1] ** 0.5

    def scale(self, size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.generator)

    def mlp(self, prefix: str, width: int = MOE_WIDTH) -> dict[str, torch.Tensor]:
        named = {f"{prefix}.{name}_proj.weight": self.matrix(width, HIDDEN) for name in ("gate", "up")}
        return named | {f"{prefix}.down_proj.weight": self.matrix(HIDDEN, width)}

    def attention(self, layer: str) -> dict[str, torch.Tensor]:
        """A layer's attention and its two norms over the hidden size."""
        sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        named = {
            f"{layer}.self_attn.{name}_proj.weight": self.matrix(n * HEAD_DIM, HIDDEN) for name, n in sizes.items()
        }
        named[f"{layer}.self_attn.o_proj.weight"] = self.matrix(HIDDEN, HEADS * HEAD_DIM)
        named |= {f"{layer}.self_attn.{name}_norm.weight": self.scale(HEAD_DIM) for name in ("q", "k")}
        return named | {
            f"{layer}.{n}.weight": self.scale(HIDDEN) for n in ("input_layernorm", "post_attention_layernorm")
        }


def _save(folder: str, config: Any, weights: dict[str, torch.Tensor]) -> str:
    from verl.utils.tiny_model import build_character_tokenizer

    config.save_pretrained(folder)
    build_character_tokenizer(VOCAB).save_pretrained(folder)
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    return folder


def save_tiny_qwen3(folder: str, seed: int = 4) -> str:
    """A random dense Qwen3 with one prediction layer in hub format; embedding and output head are one matrix."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        mtp_num_hidden_layers=1,
        dtype="float32",
    )
    draw = _Draw(seed)
    weights = {
        "model.embed_tokens.weight": draw.matrix(VOCAB, HIDDEN),
        "mtp.fc.weight": draw.matrix(HIDDEN, 2 * HIDDEN),
    }
    norms = ("model.norm", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    weights |= {f"{name}.weight": draw.scale(HIDDEN) for name in norms}
    for layer in (*(f"model.layers.{i}" for i in range(LAYERS)), "mtp.layers.0"):
        weights |= draw.attention(layer) | draw.mlp(f"{layer}.mlp", 48)
    return _save(folder, config, weights)


def save_tiny_hy_v3(folder: str, depths: int, seed: int = 3) -> str:
    """A random HYV3 (MoE layers) in hub format, whose ``depths`` prediction layers follow the decoder's.

    Transformers does not know the prediction layers, so the weights are drawn here, name by name.
    """
    from transformers import HYV3Config

    config = HYV3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=MOE_WIDTH,
        mlp_layer_types=["sparse"] * LAYERS,
        max_position_embeddings=256,
        router_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        architectures=["HYV3ForCausalLM"],
        first_k_dense_replace=0,
        num_nextn_predict_layers=depths,
        dtype="float32",
    )
    draw = _Draw(seed)
    matrix, scale, mlp = draw.matrix, draw.scale, draw.mlp
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    weights["model.norm.weight"] = scale(HIDDEN)
    for number in range(LAYERS + depths):
        layer = f"model.layers.{number}"
        weights |= draw.attention(layer)
        if number >= LAYERS:
            weights |= {f"{layer}.{name}.weight": scale(HIDDEN) for name in ("enorm", "hnorm", "final_layernorm")}
            weights[f"{layer}.eh_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)
        weights[f"{layer}.mlp.router.gate.weight"] = matrix(EXPERTS, HIDDEN)
        weights |= mlp(f"{layer}.mlp.shared_mlp")
        for expert in range(EXPERTS):
            weights |= mlp(f"{layer}.mlp.experts.{expert}")
    return _save(folder, config, weights)


def sequences(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, whether each token is itself a trained target) of every row of the case's whole batch."""
    batch = padded_batch(case.lengths, case.masked_rows, case.torch_dtype)
    rows = []
    for i in range(batch.batch_size[0]):
        real = batch["attention_mask"][i].bool()
        trained = torch.cat([torch.zeros_like(batch["prompts"][i]), batch["response_mask"][i]])
        rows.append((batch["input_ids"][i][real], trained[real].bool()))
    return rows


@contextmanager
def _router_logits(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects what every router says; its own auxiliary losses are off meanwhile."""
    from megatron.core.transformer.moe.router import TopKRouter

    seen: list[torch.Tensor] = []
    coefficient, model.config.moe_z_loss_coeff = model.config.moe_z_loss_coeff, None
    routers = [part for part in model.modules() if isinstance(part, TopKRouter)]
    for router in routers:
        gating = router.gating
        router.gating = lambda x, gating=gating: seen.append(gating(x)) or seen[-1]
    try:
        yield seen
    finally:
        model.config.moe_z_loss_coeff = coefficient
        for router in routers:
            del router.gating


def reference(engine: Any, case: Case, main_factor: float = 1.0) -> tuple[Gradients, list[float]]:
    """Plain autograd of the unsharded model, one sequence at a time, no padding: (gradients by hub name, mean losses).

    The engine only lends its whole model; nothing of its schedule, gradient reduction or loss code runs.
    """
    model = engine.module[0].module
    rows, depths = sequences(case), model.config.mtp_num_layers
    counts = [sum(int(mask[k + 1 :].sum()) for _, mask in rows) for k in range(depths + 1)]
    total, sums, num_tokens = torch.zeros((), dtype=case.torch_dtype), [0.0] * (depths + 1), 0
    with _router_logits(model) as routed:
        for tokens, mask in rows:
            ids = tokens[None]
            entering, rope, *_ = model._preprocess(input_ids=ids, position_ids=torch.arange(len(tokens))[None])
            hidden = model.decoder(hidden_states=entering, attention_mask=None, rotary_pos_emb=rope)
            num_tokens += len(tokens)
            tied = model.share_embeddings_and_output_weights
            head, temperature = model.embedding.word_embeddings.weight if tied else model.output_layer.weight, 0.8
            for k in range(depths + 1):
                if k:
                    if len(tokens) <= k:
                        break
                    ahead, positions = ids[:, k:], torch.arange(k, len(tokens))[None]
                    embedded = model.embedding(input_ids=ahead, position_ids=positions)
                    if case.mtp.detach_encoder:
                        embedded, hidden = embedded.detach(), hidden.detach() if k == 1 else hidden
                    hidden = model.mtp.layers[k - 1]._proj_and_transformer_layer(
                        hidden_states=hidden[: len(tokens) - k],
                        decoder_input=embedded,
                        rotary_pos_emb=rope[: len(tokens) - k],
                    )
                    head, temperature = head.detach(), 1.0
                logits = (hidden[:, 0] @ head.T)[: len(tokens) - k - 1, :VOCAB] / temperature
                loss = torch.nn.functional.cross_entropy(logits, tokens[k + 1 :], reduction="none")[mask[k + 1 :]].sum()
                share = main_factor if k == 0 else case.mtp.mtp_loss_scaling_factor / depths
                total = total + share * loss / max(counts[k], 1)
                sums[k] += loss.item()
        squares = sum(logits.double().logsumexp(-1).square().sum() for logits in routed)
        total = total + case.z_loss * squares / num_tokens
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(total, parameters, allow_unused=True), strict=True):
        p.main_grad.copy_(torch.zeros_like(p) if gradient is None else gradient)
    return whole_gradients(engine), [s / max(n, 1) for s, n in zip(sums, counts, strict=True)]
