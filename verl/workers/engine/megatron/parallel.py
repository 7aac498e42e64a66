# SPDX-License-Identifier: Apache-2.0
"""Megatron's process groups: one layout per process, shared by all models that live in it."""

from typing import Any

import torch.distributed as dist

__all__ = ["initialize_model_parallel"]

_layout: dict[str, int | None] = {}


def initialize_model_parallel(config: Any) -> None:
    """Set up Megatron's groups for a layout, or check that those of this process have it; seed its generators.

    Args:
        config: ``McoreEngineConfig``.

    Raises:
        ValueError: the ranks cannot be divided into the layout, or another model of this process has another one.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    global _layout
    expert_tp = config.expert_tensor_parallel_size
    layout = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.tensor_model_parallel_size if expert_tp is None else expert_tp,
    }
    if not parallel_state.model_parallel_is_initialized():
        sizes = (layout[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context"))
        needed = 1
        for size in sizes:
            needed *= size
        if dist.get_world_size() % needed:
            raise ValueError(
                f"{dist.get_world_size()} ranks cannot be divided into tensor_model_parallel_size x "
                f"pipeline_model_parallel_size x context_parallel_size = {needed}; use a multiple of {needed}"
            )
        parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
        _layout = layout
    elif layout != _layout:
        wrong = {key: (_layout[key], value) for key, value in layout.items() if _layout[key] != value}
        raise ValueError(f"models in one worker must have the same layout; (first, this): {wrong}")
    model_parallel_cuda_manual_seed(config.seed)
