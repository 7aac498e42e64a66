# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the groups of a dry run are those that megatron-core makes."""

import inspect
from typing import Any

import pytest

from verl.trainer.dry_run.layout import World, describe_groups, describe_layout, layers_of_stages, rank_groups
from verl.utils.config import default_tree
from verl.workers.engine.megatron import parallel

# tensor, context, data, pipeline; expert tensor, expert
LAYOUTS = [
    (1, 1, 1, 1, 1, 1),
    (2, 1, 1, 1, 2, 1),
    (1, 2, 2, 1, 1, 4),
    (2, 2, 1, 2, 1, 2),
    (2, 2, 2, 2, 2, 2),
    (4, 2, 3, 1, 1, 8),
    (2, 1, 4, 3, 1, 2),
    (1, 4, 2, 2, 2, 4),
]


def engine(**changes: Any) -> dict:
    names = {
        "tp": "tensor_model",
        "pp": "pipeline_model",
        "cp": "context",
        "ep": "expert_model",
        "etp": "expert_tensor",
    }
    names |= {"vpp": "virtual_pipeline_model"}
    tree = dict(default_tree("sft_trainer_engine")["engine"])
    return tree | {f"{names[key]}_parallel_size" if key in names else key: value for key, value in changes.items()}


def layout(size: int, per_node: int | None = None, experts: int = 0, **changes: Any):
    world = World(size, "here", per_node or size)
    return describe_layout(engine(**changes), "engine", world, 8, experts, ("all of it",))


@pytest.fixture(scope="module")
def generator():
    from megatron.core.parallel_state import RankGenerator, initialize_model_parallel

    order = inspect.signature(initialize_model_parallel).parameters["order"].default
    return lambda **sizes: RankGenerator(order=order, **sizes)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_groups_are_those_of_megatron(generator, sizes: tuple[int, ...]) -> None:
    tp, cp, dp, pp, etp, ep = sizes
    world = tp * cp * dp * pp
    report = layout(world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
    dense = generator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp)
    expert = generator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1)
    theirs = {
        "tensor": dense.get_ranks("tp"),
        "context": dense.get_ranks("cp"),
        "data": dense.get_ranks("dp"),
        "pipeline": dense.get_ranks("pp"),
        "gradient": dense.get_ranks("dp-cp"),
        "model": dense.get_ranks("tp-pp"),
        "expert": expert.get_ranks("ep"),
        "expert_tensor": expert.get_ranks("tp"),
        "expert_data": expert.get_ranks("dp"),
    }
    assert {groups.name: [list(ranks) for ranks in groups.ranks] for groups in report.groups} == theirs
    assert all(len(ranks) == groups.size for groups in report.groups for ranks in groups.ranks)


def test_the_engine_leaves_the_order_to_megatron() -> None:
    assert "order=" not in inspect.getsource(parallel)


def test_another_order_of_the_axes_would_be_seen(generator) -> None:
    theirs = generator(tp=2, ep=1, dp=2, pp=1, cp=2).get_ranks("cp")
    wrong = rank_groups({"tensor": 2, "data": 2, "context": 2, "pipeline": 1}, ("context",))
    assert [list(ranks) for ranks in wrong] != theirs


def test_groups_of_eight_ranks_by_hand() -> None:
    report = layout(8, tp=2, cp=2, ep=4, etp=1)
    groups = {group.name: group.ranks for group in report.groups}
    assert groups["tensor"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups["context"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups["data"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups["gradient"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups["expert"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (report.data, report.expert_data) == (2, 2)


def test_ranks_that_do_not_divide_have_no_groups() -> None:
    report = layout(6, tp=4)
    assert (report.data, report.expert_data, report.groups) == (None, None, ())
    assert layout(6, tp=2, ep=4, etp=1).expert_data is None
    assert {group.name for group in layout(6, tp=2, ep=4, etp=1).groups} == {
        *("tensor", "context", "data", "pipeline", "gradient", "model")
    }


def test_groups_in_words() -> None:
    groups = {group.name: describe_groups(group) for group in layout(8, tp=2, cp=2).groups}
    assert groups["tensor"] == "0-1, 2-3, 4-5, 6-7"
    assert groups["context"] == "0 2, 1 3, 4 6, 5 7"
    many = {group.name: describe_groups(group) for group in layout(64, tp=2).groups}
    assert many["tensor"].endswith("14-15, and 24 more groups")
    assert many["data"] == "0 to 62 in steps of 2, 1 to 63 in steps of 2"


def test_groups_between_nodes_are_told() -> None:
    assert layout(16, per_node=8, tp=8).notes == ()
    (note,) = layout(16, per_node=8, tp=16).notes
    assert note.startswith("tensor groups cross nodes") and "16 ranks a group, 8 a node" in note
    assert [note.split()[0] for note in layout(16, per_node=8, tp=4, cp=4).notes] == ["context"]
    assert [note.split()[0] for note in layout(16, per_node=8, ep=16, experts=16).notes] == ["expert"]


COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, (8,)),
        ({"pp": 4}, (2, 2, 2, 2)),
        ({"pp": 2, "vpp": 2}, (4, 4)),
        ({"pp": 3, "override_transformer_config": {"num_layers_in_first_pipeline_stage": 2}}, (2, 3, 3)),
        ({"pp": 3, "override_transformer_config": {"num_layers_in_last_pipeline_stage": 4}}, (2, 2, 4)),
        ({"pp": 2, "override_transformer_config": {"num_layers": 4}}, (2, 2)),
        (
            {"pp": 5, "override_transformer_config": dict.fromkeys(COUNTED, True)},
            (1, 2, 2, 2, 1),
        ),
        ({"pp": 3}, None),
        ({"pp": 2, "vpp": 3}, None),
        ({"pp": 2, "override_transformer_config": {"account_for_loss_in_pipeline_split": True}}, None),
    ],
)
def test_layers_of_the_stages(changes: dict, stages: tuple[int, ...] | None) -> None:
    found, reason = layers_of_stages(engine(**changes), 8)
    assert found == stages
    assert bool(reason) == (stages is None)


def test_layers_of_an_unknown_model() -> None:
    assert layers_of_stages(engine(), None) == (None, "needs config.json")
