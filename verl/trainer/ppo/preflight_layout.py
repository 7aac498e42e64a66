# SPDX-License-Identifier: Apache-2.0
"""Checks of the layout against the world, and which sizes would do in place of those that do not.

A size is proposed only if it makes the sentence go away that proposes it, put in alone; of these, the ones that leave
nothing else wrong with the layout come first.
"""

from collections.abc import Callable, Iterable, Mapping
from math import lcm
from typing import Any

from verl.trainer.ppo.preflight_batch import model_parallel_size, near_multiples
from verl.trainer.ppo.preflight_tables import LAYOUT_FIELDS

__all__ = ["check_layout", "fits_world", "nearest"]

_DENSE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")

# Whether an engine's node with other sizes could be laid out.
Allows = Callable[[Mapping[str, Any]], bool]


def _expert_size(engine: Mapping) -> int:
    """Ranks that together hold one copy of the experts: expert * expert tensor * pipeline."""
    ep, etp, pp = (engine[name] for name in _EXPERT)
    return int(ep * (etp or engine["tensor_model_parallel_size"]) * pp)


def fits_world(engine: Mapping, world_size: int) -> bool:
    """Whether the ranks divide into the layout, for dense parts and experts, and virtual stages have a pipeline."""
    has_stages = engine["pipeline_model_parallel_size"] > 1 or not engine["virtual_pipeline_model_parallel_size"]
    return has_stages and world_size % model_parallel_size(engine) == 0 and world_size % _expert_size(engine) == 0


def nearest(value: int, candidates: Iterable[int]) -> list[int]:
    """The nearest candidates below and above ``value``, as far as there are any."""
    others = sorted(set(candidates) - {value})
    return [size for size in others if size < value][-1:] + [size for size in others if size > value][:1]


def check_layout(
    engine: Mapping, path: str, world_size: int, world_words: str, model_allows: Allows | None = None
) -> list[str]:
    """Whether the ranks divide into the layout, for dense parts and for experts.

    Args:
        engine: the engine's node; its sizes are at least 1.
        path: its key.
        world_size: ranks.
        world_words: what they are called.
        model_allows: whether the model can be laid out by a node.
    """
    tp, pp, cp = (engine[name] for name in _DENSE)
    ep, etp = engine["expert_model_parallel_size"], engine["expert_tensor_parallel_size"] or tp
    dense, expert = model_parallel_size(engine), _expert_size(engine)

    def allows(node: Mapping) -> bool:
        return fits_world(node, world_size) and (model_allows is None or model_allows(node))

    errors = []
    if world_size % dense:

        def fits_dense(node: Mapping) -> bool:
            return world_size % model_parallel_size(node) == 0

        advice = _advice(engine, _DENSE, world_size, allows, fits_dense)
        errors.append(
            f"{world_words}={world_size} ranks cannot be divided into {path}: tensor_model_parallel_size={tp} x "
            f"pipeline_model_parallel_size={pp} x context_parallel_size={cp} = {dense}; use {advice}"
        )
    # What the dense parts' sizes make wrong by themselves is said once.
    shared = pp if engine["expert_tensor_parallel_size"] else etp * pp
    if world_size % expert and (not errors or world_size % shared == 0):

        def fits_experts(node: Mapping) -> bool:
            return world_size % _expert_size(node) == 0

        advice = _advice(engine, _EXPERT, world_size, allows, fits_experts)
        errors.append(
            f"{world_words}={world_size} ranks cannot be divided into the experts' layout of {path}: "
            f"expert_model_parallel_size={ep} x expert_tensor_parallel_size={etp} x pipeline {pp} = {expert}; use "
            f"{advice}"
        )
    for name in LAYOUT_FIELDS:
        override = engine["override_transformer_config"].get(name, engine[name])
        if override != engine[name]:
            errors.append(
                f"{path}.override_transformer_config.{name}={override!r} contradicts {path}.{name}={engine[name]!r}; "
                "set the latter only"
            )
    return errors


def _advice(engine: Mapping, names: tuple[str, ...], world_size: int, *allowed: Allows) -> str:
    """Sizes that would do, put in alone, and numbers of ranks that suit dense parts and experts.

    Args:
        engine: the engine's node.
        names: of the sizes.
        world_size: ranks.
        allowed: what has to hold, the most wanted first; the first that any size makes hold decides.
    """
    proposals: list[str] = []
    for allows in allowed:
        for name in names:
            own = engine[name] or engine["tensor_model_parallel_size"]
            sizes = [size for size in range(1, world_size + 1) if allows({**engine, name: size})] if own > 1 else []
            near = nearest(own, sizes)
            if near:
                proposals.append(f"{name}={' or '.join(map(str, near))}")
        if proposals:
            break
    ranks = near_multiples(world_size, lcm(model_parallel_size(engine), _expert_size(engine)))
    return ", or ".join([*proposals, f"{ranks} ranks"])
