# SPDX-License-Identifier: Apache-2.0
"""The layers of pipeline stages are those that megatron-core builds, and what it refuses is refused."""

import itertools
from typing import Any

import pytest

from tests.special_sanity.test_import_time import HEAVY, measure
from verl.utils.model_split import PipelineSplit, SplitError, Widths, built_layers, tensor_rules

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = (f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
OVERRIDES: list[dict[str, Any]] = [
    *({}, {FIRST: 1}, {FIRST: 2}, {LAST: 2}, {LAST: 4}, {FIRST: 2, LAST: 4}, {FIRST: 4, LAST: 4}, {FIRST: 0}),
    *({EMBEDDING: True}, {LOSS: True}, {EMBEDDING: True, LOSS: True}, {EMBEDDING: True, FIRST: 2}),
]


def engine(pp: int, vpp: int | None, overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "override_transformer_config": overrides,
    }


def of_megatron(num_layers: int, pp: int, vpp: int | None, overrides: dict[str, Any]) -> tuple | None:
    """Layers of every virtual stage of every stage; None if megatron-core refuses the configuration or the building."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=torch.float32,
            **overrides,
        )
        chunks = range(vpp) if vpp else [None]
        return tuple(
            tuple(
                range(start, start + get_num_layers_to_build(config, chunk, stage))
                for chunk in chunks
                for start in [get_transformer_layer_offset(config, chunk, stage)]
            )
            for stage in range(pp)
        )
    except (ValueError, AssertionError, ZeroDivisionError):
        return None


def test_layers_are_those_that_megatron_builds() -> None:
    built = 0
    for num_layers, pp, vpp, overrides in itertools.product((7, 8, 12), (1, 2, 3, 4), (None, 2), OVERRIDES):
        if pp == 1 and vpp:
            continue  # is refused elsewhere
        try:
            own = PipelineSplit.of_engine(engine(pp, vpp, overrides)).layers(num_layers)
        except SplitError:
            own = None
        expected = of_megatron(num_layers, pp, vpp, overrides)
        if expected is not None and sum(len(chunk) for stage in expected for chunk in stage) != num_layers:
            expected = None  # where no stage or a negative number of layers is left, megatron-core loses layers
        assert own == expected, (num_layers, pp, vpp, overrides)
        built += own is not None
    assert built > 50


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "overrides", "kind", "numbers", "words"),
    [
        (7, 2, None, {}, "stages", (7, 2), "7 layers cannot be divided by 2 pipeline stages"),
        (8, 2, None, {LOSS: True}, "stages", (9, 2), "8 layers (with embedding and loss 9) cannot be divided by 2"),
        (8, 2, 3, {}, "chunks", (4, 3), "the 4 layers of a stage cannot be divided by 3 virtual stages"),
        (8, 3, None, {FIRST: 3}, "ends", (5, 2), "5 of 8 layers are left for 2 stages"),
        (8, 2, 2, {FIRST: 4, LAST: 4}, "middle", (0, 0), "need a stage between"),
        (8, 2, None, {FIRST: 3, LOSS: True}, "both", (0, 0), "exclude"),
        (8, 2, None, {"pipeline_model_parallel_layout": "Et|L"}, "layout", (0, 0), "layout decides"),
    ],
)
def test_why_layers_cannot_be_divided(num_layers, pp, vpp, overrides, kind, numbers, words) -> None:
    with pytest.raises(SplitError) as error:
        PipelineSplit.of_engine(engine(pp, vpp, overrides)).layers(num_layers)
    assert (error.value.kind, (error.value.number, error.value.parts)) == (kind, numbers)
    assert words in str(error.value)


def test_numbers_of_layers_on_the_stages() -> None:
    # The embedding and the loss each stand for a layer: 34 + 2 over 4 stages.
    split = PipelineSplit.of_engine(engine(4, None, {EMBEDDING: True, LOSS: True}))
    assert split.layers_of_stages(34) == (8, 9, 9, 8)


def test_what_an_override_says_in_place_of_the_model() -> None:
    assert built_layers({"num_layers": 4}, 36) == 4
    assert built_layers({"num_layers": "four"}, 36) == built_layers(None, 36) == built_layers({}, 36) == 36
    assert built_layers({}, None) is None


def test_every_width_has_its_rule() -> None:
    numbers = dict(heads=6, dense=10, shared=14, expert=22, vocabulary=26, vision_heads=34)
    rules = tensor_rules(Widths(kv_heads=3, linear_heads={"linear_num_key_heads": 12}, context=2, **numbers))
    assert [[size for size in range(1, 8) if rule.allows(size)] for rule in rules] == [
        *([1, 2, 3, 6], [1, 3, 6], [1, 2, 5], [1, 2, 7], [1, 2], [1, 2], [1, 2], [1, 2, 3, 6])
    ]
    assert [rule.is_vocabulary for rule in rules] == [False] * 5 + [True] + [False] * 2
    assert tensor_rules(Widths()) == []


def test_importing_loads_nothing_heavy() -> None:
    seconds, modules = measure("import verl.utils.model_split")
    assert seconds < 1.0 and not modules.intersection(HEAVY)
