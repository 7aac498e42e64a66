# SPDX-License-Identifier: Apache-2.0
"""Config of the rollout: how responses are sampled and how their log-probs are recomputed."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config.names import DTYPES, name_problems


@dataclass
class SamplingConfig(BaseConfig):
    """How validation samples; ``top_k`` -1 keeps every token, ``do_sample`` False is greedy."""

    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0.0
    n: int = 1
    do_sample: bool = False

    def _problems(self) -> list[str]:
        problems = _sampling_problems(self)
        if self.do_sample and self.temperature == 0:
            problems.append("do_sample=True needs a temperature above 0, for example 1.0")
        return problems


@dataclass
class CheckpointEngineConfig(BaseConfig):
    """How new weights reach the rollout: buckets of this many megabytes at a time."""

    update_weights_bucket_megabytes: int = 2048


@dataclass
class RolloutConfig(BaseConfig):
    """Sampling of ``n`` responses a prompt, and the batches of the log-prob pass that follows.

    ``prompt_length`` and ``response_length`` are the padded widths P and R. ``top_k`` -1 keeps every token.
    ``log_prob_*`` split the pass that recomputes log-probs, as ``ActorConfig`` splits training. The fields from
    ``gpu_memory_utilization`` on steer rollout servers; the in-process rollout "hf" does not read them.

    Raises ``ValueError`` for an unknown dtype or a value out of range.
    """

    name: str = ""
    mode: str = "async"
    load_format: str = "auto"
    n: int = 1
    seed: int = 0
    prompt_length: int = 512
    response_length: int = 512
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    dtype: str = "bfloat16"
    calculate_log_probs: bool = True
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    gpu_memory_utilization: float = 0.5
    tensor_model_parallel_size: int = 2
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    max_num_batched_tokens: int | None = 8192
    max_model_len: int | None = None
    max_num_seqs: int | None = 256
    enforce_eager: bool = False
    free_cache_engine: bool = True
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enable_rollout_routing_replay: bool = False
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)

    def _problems(self) -> list[str]:
        problems = name_problems("mode", self.mode, ("async", "sync"))
        problems += name_problems("dtype", self.dtype, DTYPES)
        problems += _sampling_problems(self)
        if self.do_sample and self.temperature == 0:
            problems.append("temperature=0 is greedy: set do_sample=False, or a temperature above 0 such as 1.0")
        for name in ("prompt_length", "response_length", "log_prob_max_token_len_per_gpu"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        return problems


def _sampling_problems(config: SamplingConfig | RolloutConfig) -> list[str]:
    problems = []
    if config.n < 1:
        problems.append(f"n={config.n} must be at least 1")
    if config.temperature < 0:
        problems.append(f"temperature={config.temperature} must not be negative")
    if not 0 < config.top_p <= 1:
        problems.append(f"top_p={config.top_p} must lie in (0, 1]; 1.0 keeps every token")
    if config.top_k != -1 and config.top_k < 1:
        problems.append(f"top_k={config.top_k} must be -1 (keep every token) or at least 1")
    return problems
