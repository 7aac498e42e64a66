# SPDX-License-Identifier: Apache-2.0
"""Which rank holds what: sizes of the layout, groups of ranks, layers of the pipeline's stages.

Megatron numbers ranks with the tensor size fastest, then context, data and pipeline; experts are laid out anew over the
same ranks with expert tensor fastest, then expert, expert data and pipeline (``parallel_state.RankGenerator`` with the
order tp-cp-ep-dp-pp).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from verl.trainer.ppo.preflight_batch import model_parallel_size
from verl.utils.model_split import PipelineSplit, SplitError, built_layers

# Groups shown in the text; the JSON report has all of them.
MAX_GROUPS_SHOWN = 8

_WHAT = {
    "tensor": "share each matrix",
    "context": "share each sequence",
    "data": "take different rows of a batch",
    "gradient": "add up gradients and share the optimizer's state (data x context)",
    "pipeline": "share the layers",
    "model": "hold one copy of the model (tensor x pipeline)",
    "expert": "share the experts",
    "expert_tensor": "share each expert's matrices",
    "expert_data": "add up the experts' gradients",
}


@dataclass(frozen=True)
class World:
    """The processes: how many, where that is said, and how many of them share a node."""

    size: int
    key: str
    ranks_per_node: int


@dataclass(frozen=True)
class Groups:
    """Groups of global ranks that together do ``what``; ``ranks`` holds one tuple for each group."""

    name: str
    what: str
    size: int
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayoutReport:
    """The layout of one engine.

    ``data`` and ``expert_data`` are None where the ranks do not divide; then there are no groups. ``stages`` holds the
    number of layers of each pipeline stage (with virtual stages, of all its chunks); None, with the reason in
    ``stages_unknown``, where it cannot be told. ``experts`` is the number of experts of a layer, 0 for a dense model,
    None if unknown. ``roles`` says what each process holds.
    """

    key: str
    world_size: int
    world_key: str
    ranks_per_node: int
    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    data: int | None
    expert: int
    expert_tensor: int
    expert_data: int | None
    sequence_parallel: bool
    experts: int | None
    groups: tuple[Groups, ...]
    stages: tuple[int, ...] | None
    stages_unknown: str
    roles: tuple[str, ...]
    notes: tuple[str, ...]


def rank_groups(sizes: Mapping[str, int], members: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that differ in their coordinates along ``members`` only.

    Args:
        sizes: size of each axis, the fastest first; a rank is the mixed-radix number of its coordinates.
        members: the axes that a group runs along.

    Returns:
        One tuple of ascending ranks for each group, in the order of the other coordinates, the fastest first.
    """
    strides, stride = {}, 1
    for name, size in sizes.items():
        strides[name] = stride
        stride *= size

    def offsets(names: list[str]) -> list[int]:
        found = [0]
        for name in names:
            found = [start + i * strides[name] for i in range(sizes[name]) for start in found]
        return found

    within = offsets([name for name in sizes if name in members])
    return tuple(
        tuple(sorted(start + step for step in within)) for start in offsets([n for n in sizes if n not in members])
    )


def describe_layout(
    engine: Mapping[str, Any],
    key: str,
    world: World,
    num_layers: int | None,
    num_experts: int | None,
    roles: tuple[str, ...],
) -> LayoutReport:
    """The layout of ``engine`` (the node at ``key``), whose sizes are all at least 1.

    Args:
        engine: the engine's node.
        key: its key.
        world: the processes.
        num_layers: of the model; None if unknown.
        num_experts: of a layer; None if unknown.
        roles: what lives in the processes, in words.
    """
    size = world.size
    tp, pp, cp = (engine[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context"))
    ep, etp = engine["expert_model_parallel_size"], engine["expert_tensor_parallel_size"] or tp
    dp = size // model_parallel_size(engine) if size % model_parallel_size(engine) == 0 else None
    edp = size // (ep * etp * pp) if size % (ep * etp * pp) == 0 else None
    groups: list[Groups] = []
    if dp is not None:
        groups += _dense_groups(tp, cp, dp, pp)
    if dp is not None and edp is not None:
        groups += _expert_groups(etp, ep, edp, pp)
    stages, unknown = layers_of_stages(engine, num_layers)
    return LayoutReport(
        key=key,
        world_size=size,
        world_key=world.key,
        ranks_per_node=world.ranks_per_node,
        tensor=tp,
        pipeline=pp,
        virtual_pipeline=engine["virtual_pipeline_model_parallel_size"],
        context=cp,
        data=dp,
        expert=ep,
        expert_tensor=etp,
        expert_data=edp,
        sequence_parallel=bool(engine["sequence_parallel"]) and tp > 1,
        experts=num_experts,
        groups=tuple(groups),
        stages=stages,
        stages_unknown=unknown,
        roles=roles,
        notes=tuple(_node_notes(groups, world.ranks_per_node, has_experts=num_experts != 0)),
    )


def _groups(sizes: Mapping[str, int], name: str, members: tuple[str, ...]) -> Groups:
    return Groups(name, _WHAT[name], prod(sizes[axis] for axis in members), rank_groups(sizes, members))


def _dense_groups(tp: int, cp: int, dp: int, pp: int) -> list[Groups]:
    sizes = {"tensor": tp, "context": cp, "data": dp, "pipeline": pp}
    kinds: dict[str, tuple[str, ...]] = {name: (name,) for name in sizes}
    kinds |= {"gradient": ("context", "data"), "model": ("tensor", "pipeline")}
    return [_groups(sizes, name, members) for name, members in kinds.items()]


def _expert_groups(etp: int, ep: int, edp: int, pp: int) -> list[Groups]:
    sizes = {"expert_tensor": etp, "expert": ep, "expert_data": edp, "pipeline": pp}
    return [_groups(sizes, name, (name,)) for name in ("expert", "expert_tensor", "expert_data")]


def _node_notes(groups: list[Groups], ranks_per_node: int, has_experts: bool) -> list[str]:
    """Groups that talk in every layer and do so between nodes."""
    notes = []
    talking = ("tensor", "context", *(("expert", "expert_tensor") if has_experts else ()))
    for group in groups:
        crosses = any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in group.ranks)
        if crosses and group.name in talking:
            notes.append(
                f"{group.name} groups cross nodes: their ranks exchange data in every layer over the network between "
                f"nodes ({group.size} ranks a group, {ranks_per_node} a node)"
            )
    return notes


def layers_of_stages(engine: Mapping[str, Any], num_layers: int | None) -> tuple[tuple[int, ...] | None, str]:
    """Transformer layers of each pipeline stage, or None and the reason."""
    layers = built_layers(engine["override_transformer_config"], num_layers)
    if layers is None:
        return None, "needs config.json"
    try:
        return PipelineSplit.of_engine(engine).layers_of_stages(layers), ""
    except SplitError as error:
        return None, str(error)


def describe_groups(groups: Groups, space: str = " ") -> str:
    """The groups in a line: ``0-1, 2-3`` for neighbours, ``0 4, 1 5`` for others, the first few of many.

    ``space`` stands between the ranks of a group.
    """
    shown = ", ".join(_ranks_in_words(ranks).replace(" ", space) for ranks in groups.ranks[:MAX_GROUPS_SHOWN])
    more = len(groups.ranks) - MAX_GROUPS_SHOWN
    return f"{shown}, and {more} more groups" if more > 0 else shown


def _ranks_in_words(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(steps) == 1:
        return f"{ranks[0]} to {ranks[-1]} in steps of {steps.pop()}"
    return f"{' '.join(map(str, ranks[:4]))} ... {ranks[-1]} ({len(ranks)} ranks)"
