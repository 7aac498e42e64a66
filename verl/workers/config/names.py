# SPDX-License-Identifier: Apache-2.0
"""The option names that a config may hold, kept apart from the code behind them so that a check needs no torch."""

from collections.abc import Iterable

from verl.utils.config import did_you_mean

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

_KL_BASE = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

# A trailing "+" keeps the value and takes the gradient of k2 (verl.algos.kl).
KL_PENALTIES = _KL_BASE + tuple(f"{name}+" for name in _KL_BASE)

POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "bypass_mode",
)

ADV_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "gae",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)

KL_CONTROLLERS = ("fixed", "adaptive")

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")

WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")

OPTIMIZERS = ("adam", "sgd")

DTYPES = ("bfloat16", "float32", "float64")

ROLLOUTS = ("hf",)

# Inference servers that other programs of this kind roll out with.
SERVER_ROLLOUTS = ("vllm", "sglang", "trtllm")

# Models (by the first letters of their architecture, and of their provider in megatron-bridge) that the engine refuses.
NOT_TRAINED = {
    "Qwen3VL": "training Qwen3-VL is not supported yet, because megatron-bridge's model hands its routers no padding "
    "mask and wants other positions than a text model; use one, such as Qwen3-MoE",
}

# Fields of override_transformer_config that only Ascend NPUs' fork of megatron-core has.
NPU_FIELDS = (
    "use_ascend_gdn",
    "use_flash_attn",
    "use_fused_rmsnorm",
    "use_fused_swiglu",
    "use_naive_l2norm",
    "use_triton_gdn",
)

CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def check_name(key: str, value: str, known: Iterable[str]) -> None:
    """Raise ``ValueError`` naming ``key``, ``value``, the known names and the nearest one, if it is none of them."""
    if problems := name_problems(key, value, known):
        raise ValueError(problems[0])


def name_problems(key: str, value: str, known: Iterable[str]) -> list[str]:
    """What `check_name` would say: one sentence, or none."""
    known = tuple(known)
    if value in known:
        return []
    words = [repr(name) for name in known]
    return [f"{key}={value!r} is not known; choose one of {', '.join(words)}.{did_you_mean(repr(value), words)}"]
