# SPDX-License-Identifier: Apache-2.0
"""Models small enough for a laptop, with random weights and a character tokenizer, in Hugging Face format.

The quickstart trains the Qwen3-MoE, whose default sizes make 903,936 parameters; tests build smaller ones, and the
other families.
"""

import os
import shutil
import string
from collections.abc import Callable
from typing import Any

__all__ = [
    "CHAT_TEMPLATE",
    "FAMILIES",
    "build_character_tokenizer",
    "save_tiny_deepseek_v3",
    "save_tiny_mimo",
    "save_tiny_qwen2",
    "save_tiny_qwen3",
    "save_tiny_qwen3_moe",
]

_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}

# In order of usefulness: a small vocabulary keeps the first ones.
_CHARACTERS = string.digits + "+-*= " + string.ascii_lowercase + "\n.,?!:;/#()<>'\"$%_&" + string.ascii_uppercase

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def build_character_tokenizer(vocab: int = 64, pad_is_eos: bool = False) -> Any:
    """One token per character, no merges, nothing added around a text.

    The chat template renders a user (or system) message as its bare text and an assistant message as its text followed
    by EOS, marked as a generation span.

    Args:
        vocab: largest number of tokens, the four special ones (pad, bos, eos, unk: ids 0-3) included; at least 19, so
            that digits and `+-*= ` fit. Characters without a token of their own become `<unk>`.
        pad_is_eos: let EOS be the pad token as well (to test what must hold for such tokenizers).

    Returns:
        A transformers fast tokenizer, `len(tokenizer) <= vocab`.

    Raises:
        ValueError: `vocab` is too small.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    num_special = len(_SPECIAL_TOKENS)
    if vocab < num_special + 15:
        raise ValueError(f"vocab={vocab} is too small for the character tokenizer; the least is {num_special + 15}")
    tokens = [*_SPECIAL_TOKENS.values(), *_CHARACTERS[: vocab - num_special]]
    # BPE without merges: every character stays a token of its own, and offsets come for free.
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>")
    backend = Tokenizer(model)
    backend.decoder = decoders.Fuse()
    special = dict(_SPECIAL_TOKENS, pad_token=_SPECIAL_TOKENS["eos_token" if pad_is_eos else "pad_token"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _save(
    folder: str | os.PathLike,
    family: tuple[str, str],
    sizes: dict[str, Any],
    *,
    pad_is_eos: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> str:
    """Draw the model in float32 from `seed` (the caller's torch random state is left alone) and write its folder."""
    import torch
    import transformers

    tokenizer = build_character_tokenizer(sizes["vocab_size"], pad_is_eos)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config_class, model_class = (getattr(transformers, name) for name in family)
    config = config_class(dtype="float32", **sizes, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return _write(folder, model.to(getattr(torch, dtype)), tokenizer)


def _write(folder: str | os.PathLike, model: Any, tokenizer: Any) -> str:
    from transformers import GenerationConfig

    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return os.fspath(folder)


def save_tiny_qwen3_moe(
    folder: str | os.PathLike,
    *,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    experts: int = 8,
    experts_per_token: int = 2,
    moe_intermediate: int = 128,
    vocab: int = 64,
    max_positions: int = 4096,
    tie_word_embeddings: bool = False,
    pad_is_eos: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> str:
    """Write a random Qwen3-MoE with its tokenizer, chat template and generation settings to `folder`.

    Weights are drawn in float32 from `seed` (the caller's torch random state is left alone) and stored as `dtype`, one
    tensor per expert as on the hub. Every layer is a MoE layer; top-k probabilities are normalised.

    Args:
        folder: created if missing.
        layers, hidden, heads, kv_heads, head_dim, experts, experts_per_token: sizes, as in
            `transformers.Qwen3MoeConfig`.
        moe_intermediate, vocab, max_positions, tie_word_embeddings: likewise.
        pad_is_eos: see `build_character_tokenizer`.
        dtype: "float32", "bfloat16" or "float64".
        seed: of the weights.

    Returns:
        The folder's path.

    Raises:
        ValueError: `vocab` is too small for the tokenizer.
    """
    sizes = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=moe_intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=moe_intermediate,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_word_embeddings,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    family = ("Qwen3MoeConfig", "Qwen3MoeForCausalLM")
    return _save(folder, family, sizes, pad_is_eos=pad_is_eos, dtype=dtype, seed=seed)


def _dense_sizes(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def save_tiny_qwen2(
    folder: str | os.PathLike,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab: int = 64,
    dtype: str = "float32",
    seed: int = 0,
) -> str:
    """Write a random Qwen2.5 (dense, with a bias on queries, keys and values); see :func:`save_tiny_qwen3_moe`."""
    sizes = _dense_sizes(layers, hidden, heads, kv_heads, intermediate, vocab)
    return _save(folder, ("Qwen2Config", "Qwen2ForCausalLM"), sizes, dtype=dtype, seed=seed)


def save_tiny_qwen3(
    folder: str | os.PathLike,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    vocab: int = 64,
    dtype: str = "float32",
    seed: int = 0,
) -> str:
    """Write a random Qwen3 (dense, with norms on queries and keys); see :func:`save_tiny_qwen3_moe`."""
    sizes = _dense_sizes(layers, hidden, heads, kv_heads, intermediate, vocab) | {"head_dim": head_dim}
    return _save(folder, ("Qwen3Config", "Qwen3ForCausalLM"), sizes, dtype=dtype, seed=seed)


def save_tiny_deepseek_v3(
    folder: str | os.PathLike,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    q_lora_rank: int | None = None,
    kv_lora_rank: int = 32,
    nope_head_dim: int = 16,
    rope_head_dim: int = 8,
    value_head_dim: int = 16,
    experts: int = 8,
    experts_per_token: int = 2,
    moe_intermediate: int = 48,
    vocab: int = 64,
    dtype: str = "float32",
    seed: int = 0,
) -> str:
    """Write a random DeepSeek-V3 with the shape of Moonlight; see :func:`save_tiny_qwen3_moe`.

    Multi-head latent attention (queries are compressed only with a `q_lora_rank`), one dense layer, then MoE layers
    with a shared expert, a sigmoid router and its correction bias, all of which is 0 at first.
    """
    sizes = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=nope_head_dim,
        qk_rope_head_dim=rope_head_dim,
        v_head_dim=value_head_dim,
        intermediate_size=2 * moe_intermediate,
        moe_intermediate_size=moe_intermediate,
        n_routed_experts=experts,
        num_experts_per_tok=experts_per_token,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.446,
        norm_topk_prob=True,
        vocab_size=vocab,
        max_position_embeddings=4096,
    )
    return _save(folder, ("DeepseekV3Config", "DeepseekV3ForCausalLM"), sizes, dtype=dtype, seed=seed)


def save_tiny_mimo(
    folder: str | os.PathLike,
    *,
    layers: int = 2,
    mtp_layers: int = 1,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab: int = 64,
    dtype: str = "float32",
    seed: int = 0,
) -> str:
    """Write a random MiMo: a Qwen2.5 with `mtp_layers` multi-token prediction layers; see :func:`save_tiny_qwen3_moe`.

    As on the hub, transformers learns of the architecture from a Python file in the folder, here a copy of
    `verl/utils/tiny_mimo.py`, so that whoever opens it must set ``trust_remote_code=True``.
    """
    import torch

    from verl.utils import tiny_mimo

    tokenizer = build_character_tokenizer(vocab)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = _dense_sizes(layers, hidden, heads, kv_heads, intermediate, vocab)
    config = tiny_mimo.MiMoConfig(num_nextn_predict_layers=mtp_layers, dtype="float32", **sizes, **ids)
    module = os.path.basename(tiny_mimo.__file__).removesuffix(".py")
    config.auto_map = {"AutoConfig": f"{module}.MiMoConfig", "AutoModelForCausalLM": f"{module}.MiMoForCausalLM"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_mimo.MiMoForCausalLM(config)
    _write(folder, model.to(getattr(torch, dtype)), tokenizer)
    shutil.copy(tiny_mimo.__file__, folder)
    return os.fspath(folder)


# Family on the command line of scripts/init_random_model.py -> what writes it.
FAMILIES: dict[str, Callable[..., str]] = {
    "qwen3_moe": save_tiny_qwen3_moe,
    "qwen2": save_tiny_qwen2,
    "qwen3": save_tiny_qwen3,
    "deepseek_v3": save_tiny_deepseek_v3,
    "mimo": save_tiny_mimo,
}
