# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a Megatron engine through megatron-core's distributed checkpointing.

The files do not depend on the layout: a run may be resumed with another tensor, pipeline, context or data parallel
size, as far as megatron-core can map the optimizer's state.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.checkpoint.dist_weights import sharded_model_state

__all__ = ["load_checkpoint", "save_checkpoint"]

_FOLDER = "dist_ckpt"
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _contents(engine: Any, key: str) -> list[str]:
    config = engine.checkpoint_config
    return list(getattr(config, key)) if config is not None else ["model", "optimizer", "extra"]


def _model_keys(engine: Any) -> list[str]:
    return ["model"] if len(engine.module) == 1 else [f"model{i}" for i in range(len(engine.module))]


def _state(engine: Any, contents: list[str], is_loading: bool) -> dict[str, Any]:
    from megatron.core.utils import unwrap_model

    metadata = dict(_METADATA)  # megatron-core writes the present group into it
    chunks = unwrap_model(engine.module)
    model = {
        key: sharded_model_state(chunk, metadata) for key, chunk in zip(_model_keys(engine), chunks, strict=True)
    }
    state: dict[str, Any] = dict(model) if "model" in contents else {}
    if "optimizer" in contents and engine.optimizer is not None:
        state["optimizer"] = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return state


def save_checkpoint(engine: Any, local_path: str) -> None:
    """Write what ``checkpoint.save_contents`` names to ``local_path``. Collective.

    ``extra`` is the learning-rate schedule and each rank's random states (torch's and Megatron's). ``hf_model`` is
    not written here: the trainers ask for it with ``export_hf``, next to this folder.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    contents = _contents(engine, "save_contents")
    folder = os.path.join(local_path, _FOLDER)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    engine.to("device", model=True, optimizer=True, grad=False)
    dist_checkpointing.save(_state(engine, contents, is_loading=False), folder)
    if "extra" in contents:
        extra = {"random": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if engine.lr_scheduler is not None:
            extra["schedule"] = engine.lr_scheduler.state_dict()
        torch.save(extra, os.path.join(local_path, f"extra_rank_{dist.get_rank()}.pt"))
    engine.offload_as_configured()
    dist.barrier()


def load_checkpoint(engine: Any, local_path: str) -> None:
    """Read what ``checkpoint.load_contents`` names from ``local_path``. Collective.

    Raises:
        ValueError: when the folder holds no checkpoint, or its optimizer state cannot be mapped to this layout.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    folder = os.path.join(local_path, _FOLDER)
    if not os.path.isdir(folder):
        raise ValueError(f"{local_path} holds no checkpoint (no {_FOLDER} folder in it)")
    contents = _contents(engine, "load_contents")
    engine.to("device", model=True, optimizer=True, grad=True)
    if "optimizer" in contents and engine.optimizer is not None:
        _make_optimizer_state(engine)
    try:
        loaded = dist_checkpointing.load(_state(engine, contents, is_loading=True), folder)
    except KeyError as error:
        raise ValueError(
            f"{local_path}: {error} is not in the checkpoint. Either it was saved without it, or the dense and the "
            "expert parameters of a mixture of experts had separate optimizers there and share one here (or the "
            "reverse): resume with the same expert and tensor split, or with checkpoint.load_contents=[model]"
        ) from error
    if "model" in contents:
        for key, chunk in zip(_model_keys(engine), unwrap_model(engine.module), strict=True):
            chunk.load_state_dict(loaded[key])
    if "optimizer" in loaded:
        # Megatron finds a parameter group by its rates too, so those of the configuration stand in for the saved ones.
        _set_rates(loaded["optimizer"], engine.optimizer_config.lr, engine.optimizer_config.min_lr)
        engine.optimizer.load_state_dict(loaded["optimizer"])
    elif "model" in contents and engine.optimizer is not None:
        engine.optimizer.reload_model_params()
    if "extra" in contents:
        _load_extra(engine, local_path)
    engine.offload_as_configured()
    dist.barrier()


def _set_rates(state: Any, lr: float, min_lr: float) -> None:
    """Write the rates into every parameter group of a (nested) optimizer state."""
    if isinstance(state, list):
        for item in state:
            _set_rates(item, lr, min_lr)
    if isinstance(state, dict):
        if "max_lr" in state and "min_lr" in state:
            state["max_lr"], state["min_lr"] = lr, min_lr
        for value in state.values():
            _set_rates(value, lr, min_lr)


def _make_optimizer_state(engine: Any) -> None:
    """torch's Adam has no state before its first step, and the distributed optimizer reads it to know what to load.

    A step with zero gradients and zero learning rate makes it and changes no parameter.
    """
    groups = engine.optimizer.param_groups
    rates = [(group["lr"], group["weight_decay"]) for group in groups]
    for group in groups:
        group["lr"] = group["weight_decay"] = 0.0
    engine.optimizer_zero_grad()
    engine.optimizer.step()
    for group, (rate, decay) in zip(groups, rates, strict=True):
        group["lr"], group["weight_decay"] = rate, decay


def _load_extra(engine: Any, local_path: str) -> None:
    own = os.path.join(local_path, f"extra_rank_{dist.get_rank()}.pt")
    path = own if os.path.exists(own) else os.path.join(local_path, "extra_rank_0.pt")
    if not os.path.exists(path):
        raise ValueError(
            f"{local_path}: no schedule and random state ({os.path.basename(path)}); "
            "set checkpoint.load_contents without extra"
        )
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    extra = torch.load(path, weights_only=True)
    if path == own:  # a rank that did not exist then keeps the state of its own seed
        torch.set_rng_state(extra["random"])
        get_cuda_rng_tracker().set_states(extra["tracker"])
    if "schedule" in extra and engine.lr_scheduler is not None:
        engine.lr_scheduler.num_steps = 0  # loading adds the saved number of steps
        engine.lr_scheduler.load_state_dict(extra["schedule"])
        for group in engine.optimizer.param_groups:  # a group's own rates come before the schedule's
            group["max_lr"], group["min_lr"] = engine.lr_scheduler.max_lr, engine.lr_scheduler.min_lr
        engine.lr_scheduler.step(0)
