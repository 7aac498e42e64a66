# SPDX-License-Identifier: Apache-2.0
"""The tiny models of the checks, saved as Hugging Face folders."""

import os

from safetensors.torch import load_file, save_file

from tests.models.engine_world import VOCAB, save_sharp_model


def save_models(folder: str) -> dict[str, str]:
    """Write a two-layer and a four-layer Qwen3-MoE and a two-layer dense Qwen3; returns their folders by kind."""
    return {
        "moe": save_sharp_model(os.path.join(folder, "moe")),
        "deep": save_sharp_model(os.path.join(folder, "deep"), layers=4, hidden=16, moe_intermediate=12),
        "dense": _save_dense(os.path.join(folder, "dense")),
    }


def _save_dense(folder: str) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    sharpen(folder)
    return folder


def sharpen(folder: str, factor: float = 4.0) -> None:
    """Scale up the matrices of a saved model, so that its routing and next tokens are far from uniform."""
    path = os.path.join(folder, "model.safetensors")
    weights = {name: w * factor if w.dim() > 1 else w for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
