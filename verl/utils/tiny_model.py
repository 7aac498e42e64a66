# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-MoE small enough for a laptop, with random weights and a character tokenizer, in Hugging Face format.

The quickstart trains it; tests build smaller ones. Sizes and vocabulary are arguments, the defaults make 903,936
parameters.
"""

import os
import string
from typing import Any

__all__ = ["CHAT_TEMPLATE", "build_character_tokenizer", "save_tiny_qwen3_moe"]

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
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = build_character_tokenizer(vocab, pad_is_eos)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen3MoeConfig(
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
        dtype="float32",
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return os.fspath(folder)
