# SPDX-License-Identifier: Apache-2.0
"""Config of the megatron-core training engine, of its checkpoints, and of the worker that runs it."""

from dataclasses import dataclass, field, fields
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.names import CHECKPOINT_CONTENTS, DTYPES, name_problems
from verl.workers.config.optimizer import McoreOptimizerConfig


@dataclass
class RouterReplayConfig(BaseConfig):
    """Replay of recorded expert choices. ``mode``: only "disabled" is supported."""

    mode: str = "disabled"


@dataclass
class McoreEngineConfig(BaseConfig):
    """How one model is laid out, computed and split into micro-batches by the megatron-core engine.

    The world holds ``tensor * pipeline * context * data`` ranks (``*_model_parallel_size``; data is what is left over);
    experts are laid out anew as ``expert_tensor * expert * pipeline * expert data``. ``expert_tensor_parallel_size``
    None means the tensor size. Token budgets (``max_token_len_per_gpu`` for training, ``infer_max_token_len_per_gpu``
    without gradients) are per rank: a micro-batch may hold budget * context_parallel_size tokens, since a sequence is
    split over the context ranks. The ``override_*`` dicts go to megatron-core's ``TransformerConfig`` and
    ``DistributedDataParallelConfig`` as they are. ``per_token_loss_guards`` refuses the combinations that verl
    documents as unsafe with ``calculate_per_token_loss`` (``docs/objective.md``); False lifts the refusal.

    Raises ``ValueError`` for a size below 1, virtual stages without a pipeline, or an unknown dtype.
    """

    _mutable_fields = frozenset(
        {
            "use_dynamic_bsz",
            "max_token_len_per_gpu",
            "micro_batch_size_per_gpu",
            "infer_max_token_len_per_gpu",
            "infer_micro_batch_size_per_gpu",
            "use_remove_padding",
            "use_fused_kernels",
            "forward_only",
        }
    )

    strategy: str = "megatron"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    dtype: str = "bfloat16"
    seed: int = 42
    use_mbridge: bool = True
    vanilla_mbridge: bool = False
    use_dist_checkpointing: bool = False
    dist_checkpointing_path: str | None = None
    use_megatron_fsdp: bool = False
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int | None = None
    micro_batch_size_per_gpu: int | None = None
    infer_max_token_len_per_gpu: int | None = None
    infer_micro_batch_size_per_gpu: int | None = None
    use_remove_padding: bool = True
    use_fused_kernels: bool = False
    forward_only: bool = False
    per_token_loss_guards: bool = True
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    override_ddp_config: dict[str, Any] = field(default_factory=dict)
    override_mcore_model_config: dict[str, Any] = field(default_factory=dict)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)

    @property
    def dist_checkpoint(self) -> str | None:
        """The megatron-core checkpoint that the first weights are read from, if it is not the Hugging Face folder."""
        return self.dist_checkpointing_path if self.use_dist_checkpointing else None

    def _problems(self) -> list[str]:
        problems = name_problems("strategy", self.strategy, ("megatron",))
        problems += name_problems("dtype", self.dtype, DTYPES)
        if self.use_dist_checkpointing and not self.dist_checkpointing_path:
            problems.append(
                "use_dist_checkpointing=True needs dist_checkpointing_path, a folder that "
                "scripts/converter_hf_to_mcore.py wrote"
            )
        if dict(self.override_ddp_config or {}).get("overlap_param_gather"):
            problems.append(
                "override_ddp_config.overlap_param_gather=True is not supported, since rollout, export and checkpoint "
                "would read parameters before they are gathered; set it to False"
            )
        for name in (f.name for f in fields(self) if f.name.endswith("_parallel_size")):
            size = getattr(self, name)
            if size is not None and size < 1:
                problems.append(f"{name}={size} must be at least 1")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            problems.append(
                f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size} needs "
                "pipeline_model_parallel_size of 2 or more; set it to null or add pipeline stages"
            )
        return problems


@dataclass
class McoreCheckpointConfig(BaseConfig):
    """What a checkpoint holds: any of "model", "optimizer", "extra" (schedule, random state, step) and "hf_model".

    ``load_contents`` names the parts read back on resume. ``strict`` is accepted and not
    read: megatron-core checks the keys it is asked for.
    """

    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    load_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    async_save: bool = False
    strict: bool = True

    def _problems(self) -> list[str]:
        problems: list[str] = []
        for name in ("save_contents", "load_contents"):
            for part in getattr(self, name):
                problems += name_problems(name, part, CHECKPOINT_CONTENTS)
        return problems


@dataclass
class TrainingWorkerConfig(BaseConfig):
    """Everything a ``TrainingWorker`` needs to build its engine.

    ``model_type`` is the engine registry's name ("language_model" or "value_model"). ``optimizer_config`` None makes an
    engine that only infers. ``extra_context`` is handed to the engine untouched.
    """

    model_type: str = "language_model"
    model_config: HFModelConfig | None = None
    engine_config: McoreEngineConfig | None = None
    optimizer_config: McoreOptimizerConfig | None = None
    checkpoint_config: McoreCheckpointConfig = field(default_factory=McoreCheckpointConfig)
    profiler_config: Any = None
    extra_context: dict[str, Any] = field(default_factory=dict)
