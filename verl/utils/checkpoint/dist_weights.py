# SPDX-License-Identifier: Apache-2.0
"""Weights of a model as a distributed checkpoint of megatron-core: written in one layout, read in any.

The folder is what ``scripts/converter_hf_to_mcore.py`` writes and ``megatron.dist_checkpointing_path`` names. The
folder ``dist_ckpt`` of a training checkpoint is one as well. Importing this module does not import torch.
"""

import json
import os
import re
from collections.abc import Iterable
from typing import Any

from verl.utils.checkpoint.agreement import raise_everywhere

__all__ = ["cause", "dist_checkpoint_problem", "load_dist_weights", "save_dist_weights", "sharded_model_state"]

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_EXPERT_NORM = re.compile(r"^(.*)\bpre_mlp_layernorm\.\w+$")


def dist_checkpoint_problem(folder: str) -> str | None:
    """What keeps ``folder`` from being read as a distributed checkpoint, in words; None if nothing does.

    Reads one small file.
    """
    path = os.path.join(folder, "metadata.json")
    if not os.path.isdir(folder):
        return "no such folder"
    if not os.path.isfile(path):
        inner = os.path.join(folder, "dist_ckpt")
        hint = f"; did you mean {inner}?" if os.path.isdir(inner) else ""
        return f"no metadata.json in it, so it is no complete distributed checkpoint of megatron-core{hint}"
    try:
        with open(path, encoding="utf-8") as file:
            backend = json.load(file)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        return f"its metadata.json could not be read ({error!r})"
    return None if backend == "torch_dist" else f"it has the format {backend!r}; 'torch_dist' is read"


def sharded_model_state(chunk: Any, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """A pipeline chunk's sharded state under the keys that TransformerEngine's layers have.

    megatron-core's local layers store the norm before experts under the name of a dense layer's fused norm, which a
    model with TransformerEngine's layers does not find; here both have one name.
    """
    state: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)
    for name, entry in state.items():
        match = _EXPERT_NORM.match(name)
        if match and f"{match.group(1)}mlp.router.weight" in state:
            entry.key = entry.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return state


def _states(modules: list[Any]) -> dict[str, dict[str, Any]]:
    return {str(index): sharded_model_state(chunk) for index, chunk in enumerate(modules)}


def save_dist_weights(modules: list[Any], folder: str) -> None:
    """Write the weights of a model to ``folder``, which must exist and be empty. Collective.

    Args:
        modules: the model's pipeline chunks on this rank, not wrapped.
        folder: the same for every rank, on storage that all of them see.
    """
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(_states(modules), folder)


def load_dist_weights(modules: list[Any], folder: str, vocab_size: int) -> None:
    """Read weights written in this or another layout into a model. Collective.

    Values are converted to the model's types. What the checkpoint has besides (an optimizer's state, layers that are
    not built) is not read.

    Args:
        modules: the model's pipeline chunks on this rank, not wrapped.
        folder: the checkpoint.
        vocab_size: tokens of the model. The rows of embedding and head are filled up to a number that depends on the
            layout, so megatron-core takes any number of them.

    Raises:
        ValueError: on every rank, when the folder holds no checkpoint, when it lacks parameters of the model, or when
            they have other shapes.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    said = f"megatron.dist_checkpointing_path={folder}"
    problem = dist_checkpoint_problem(folder)
    raise_everywhere(ValueError(f"{said}: {problem}") if problem else None)
    for key, entry in dist_checkpointing.load_tensors_metadata(folder).items():
        if key in _VOCABULARY and entry.global_shape[0] < vocab_size:
            raise ValueError(f"{said}: {entry.global_shape[0]} rows in {key}, and model.path has {vocab_size} tokens")
    try:
        # "Unexpected" is what is asked for and not there.
        loaded, _, missing = dist_checkpointing.load(_states(modules), folder, strict="return_unexpected")
    except (CheckpointException, CheckpointingException) as error:
        raise ValueError(f"{said}: {cause(error)}; is it a whole checkpoint of the model in model.path?") from error
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, _without_extra_state(missing))
    absent = sorted({key for keys in everywhere for key in keys})
    if absent:
        raise ValueError(
            f"{said}: {len(absent)} kinds of parameters of the model in model.path are not in it, such as {absent[0]}"
        )
    for index, chunk in enumerate(modules):
        # TransformerEngine's extra state describes a quantisation that the weights of a checkpoint need not have.
        result = chunk.load_state_dict(loaded[str(index)], strict=False)
        lacking = _without_extra_state(result.missing_keys) + _without_extra_state(result.unexpected_keys)
        assert not lacking, lacking


def _without_extra_state(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("_extra_state")]


def cause(error: BaseException) -> str:
    """One line about what went wrong; torch wraps what each rank said."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error).strip().split("\n")[0]
