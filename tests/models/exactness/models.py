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


def shrink(folder: str, target: str, layers: int) -> bool:
    """Write a tiny, randomly weighted model of the architecture in ``folder``.

    Depth, widths, experts and vocabulary are reduced; everything else of the configuration stays.

    Returns:
        whether it has experts.

    Raises:
        ValueError: the configuration is not that of a plain language model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if config.get_text_config() is not config:
        raise ValueError(
            f"{folder}: {config.model_type} is not a plain language model; give the folder of its text part"
        )
    grouped = getattr(config, "num_key_value_heads", config.num_attention_heads) < config.num_attention_heads
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if grouped else 4,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "dtype": "float32",
    }
    experts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(config, name, None)]
    sizes |= dict.fromkeys(experts, 4) | ({"num_experts_per_tok": 2} if experts else {})
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(target)
    sharpen(target)
    return bool(experts)
