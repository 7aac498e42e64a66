# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a Megatron engine through megatron-core's distributed checkpointing.

The files do not depend on the layout: a run may be resumed with other parallel sizes, and with or without the
distributed optimizer.
"""

import contextlib
import os
from collections.abc import Iterator
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.checkpoint.agreement import raise_everywhere
from verl.utils.checkpoint.dist_weights import cause, dist_checkpoint_problem, sharded_model_state
from verl.utils.checkpoint.optimizer_state import requested_state, restore_steps, stored_names

__all__ = ["load_checkpoint", "save_checkpoint"]

_FOLDER = "dist_ckpt"
_OPTIMIZER = "optimizer."
_REQUEST = "optimizer of this run"  # beside "optimizer", under which megatron-core returns the saved run's
_WAY_OUT = (
    "set checkpoint.load_contents=[model,extra] to load it with a fresh optimizer, or start a new run from the "
    "checkpoint's Hugging Face folder (hf_model in checkpoint.save_contents)"
)
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
    model = {key: sharded_model_state(chunk, metadata) for key, chunk in zip(_model_keys(engine), chunks, strict=True)}
    state: dict[str, Any] = dict(model) if "model" in contents else {}
    if "optimizer" in contents and engine.optimizer is not None:
        state["optimizer"] = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return state


@contextlib.contextmanager
def _on_the_device(engine: Any, grad: bool) -> Iterator[None]:
    """The engine's state on the device within the context, and where it is kept after it, error or not."""
    engine.to("device", model=True, optimizer=True, grad=grad)
    try:
        yield
    finally:
        engine.offload_as_configured()


def save_checkpoint(engine: Any, local_path: str) -> None:
    """Write what ``checkpoint.save_contents`` names to ``local_path``. Collective.

    ``extra`` is the learning-rate schedule and each rank's random states (torch's and Megatron's). ``hf_model`` is
    not written here: the trainers ask for it with ``export_hf``, next to this folder.

    Raises:
        OSError: on every rank, when the folder or a rank's ``extra`` cannot be written.
    """
    from megatron.core import dist_checkpointing

    contents = _contents(engine, "save_contents")
    folder = os.path.join(local_path, _FOLDER)
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            failure = error
    raise_everywhere(failure)
    with _on_the_device(engine, grad=False):
        dist_checkpointing.save(_state(engine, contents, is_loading=False), folder)
    if "extra" in contents:
        _save_extra(engine, local_path)
    dist.barrier()


def _save_extra(engine: Any, local_path: str) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    extra = {"random": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if engine.lr_scheduler is not None:
        extra["schedule"] = engine.lr_scheduler.state_dict()
    path = os.path.join(local_path, f"extra_rank_{dist.get_rank()}.pt")
    failure: Exception | None = None
    try:
        torch.save(extra, path)
    except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError of a full disk
        failure = OSError(f"{path} cannot be written: {cause(error)}")
    raise_everywhere(failure)


def load_checkpoint(engine: Any, local_path: str) -> None:
    """Read what ``checkpoint.load_contents`` names from ``local_path``. Collective.

    Weights that come without the optimizer's state start a fresh optimizer.

    Raises:
        ValueError: on every rank, when the folder holds no checkpoint, or not all that is asked for.
    """
    folder = os.path.join(local_path, _FOLDER)
    problem = dist_checkpoint_problem(folder)
    if not os.path.isdir(folder):
        problem = f"{local_path} holds no checkpoint (no {_FOLDER} folder in it)"
    elif problem is not None:
        problem = f"{folder}: {problem}"
    raise_everywhere(ValueError(problem) if problem else None)
    contents = _contents(engine, "load_contents")
    if engine.optimizer is None:
        contents = [part for part in contents if part != "optimizer"]
    extra, is_own = _read_extra(local_path) if "extra" in contents else ({}, False)
    with _on_the_device(engine, grad=True):
        _load_tensors(engine, folder, contents)
    _set_extra(engine, extra, is_own)
    dist.barrier()


def _load_tensors(engine: Any, folder: str, contents: list[str]) -> None:
    from megatron.core.utils import unwrap_model

    if "optimizer" in contents:
        _make_optimizer_state(engine)
    loaded = _load(_state(engine, contents, is_loading=True), folder, contents)
    if "model" in contents:
        for key, chunk in zip(_model_keys(engine), unwrap_model(engine.module), strict=True):
            chunk.load_state_dict(loaded[key])
    # The tree of the saved optimizer is in what is loaded whether asked for or not.
    if "optimizer" in contents:
        restore_steps(loaded[_REQUEST], loaded.get("optimizer"))
        engine.optimizer.load_state_dict(loaded[_REQUEST])
    elif "model" in contents and engine.optimizer is not None:
        engine.optimizer.reload_model_params()


def _load(state: dict[str, Any], folder: str, contents: list[str]) -> dict[str, Any]:
    """Read ``state`` from ``folder``, the optimizer's under the key ``_REQUEST``. Collective; errors on all ranks."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    stored = dist_checkpointing.load_tensors_metadata(folder)
    request = requested_state(state.pop("optimizer"), stored) if "optimizer" in contents else {}
    absent = sorted(stored_names([state, request]) - set(stored))
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, absent)
    names = sorted({name for names in everywhere for name in names})
    if names:
        raise ValueError(f"{folder}: {_what_is_absent(names, stored)}")
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, folder)
        if "optimizer" in contents:  # by itself, since it may name the same tensors as the model
            loaded[_REQUEST] = dist_checkpointing.load({_REQUEST: request}, folder)[_REQUEST]
    except (CheckpointException, CheckpointingException) as error:  # a shape that differs, a file that is cut off
        raise ValueError(f"{folder}: {cause(error)}; is it a whole checkpoint of the model in model.path?") from error
    return loaded


def _what_is_absent(names: list[str], stored: dict[str, Any]) -> str:
    of_model = [name for name in names if not name.startswith(_OPTIMIZER)]
    if of_model and not any(not name.startswith(_OPTIMIZER) for name in stored):
        return (
            "it was saved without the weights; set checkpoint.load_contents to what checkpoint.save_contents named then"
        )
    if of_model:
        return (
            f"{len(of_model)} kinds of parameters of this model are not in it, such as {of_model[0]}; is it a "
            "checkpoint of the model in model.path?"
        )
    if not any(name.startswith(_OPTIMIZER) for name in stored):
        return f"it was saved without the optimizer's state, so a fresh optimizer is needed: {_WAY_OUT}"
    return (
        f"its optimizer's state lacks {len(names)} kinds of tensors that this run's optimizer has, such as {names[0]}, "
        f"so it cannot be mapped to this run: {_WAY_OUT}"
    )


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


def _read_extra(local_path: str) -> tuple[dict[str, Any], bool]:
    """This rank's ``extra``, or the first rank's, and whether it is its own. Collective; errors on all ranks."""
    own = os.path.join(local_path, f"extra_rank_{dist.get_rank()}.pt")
    path = own if os.path.exists(own) else os.path.join(local_path, "extra_rank_0.pt")
    extra: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        extra = torch.load(path, weights_only=True)
    except FileNotFoundError:
        failure = ValueError(
            f"{local_path}: no schedule and random state ({os.path.basename(path)}); "
            "set checkpoint.load_contents without extra"
        )
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:  # a file that is cut off
        failure = ValueError(f"{path} cannot be read ({cause(error)}); set checkpoint.load_contents without extra")
    raise_everywhere(failure)
    return extra, path == own


def _set_extra(engine: Any, extra: dict[str, Any], is_own: bool) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if is_own:  # a rank that did not exist then keeps the state of its own seed
        torch.set_rng_state(extra["random"])
        get_cuda_rng_tracker().set_states(extra["tracker"])
    if "schedule" in extra and engine.lr_scheduler is not None:
        engine.lr_scheduler.num_steps = 0  # loading adds the saved number of steps
        engine.lr_scheduler.load_state_dict(extra["schedule"])
        for group in engine.optimizer.param_groups:  # a group's own rates come before the schedule's
            group["max_lr"], group["min_lr"] = engine.lr_scheduler.max_lr, engine.lr_scheduler.min_lr
        engine.lr_scheduler.step(0)
