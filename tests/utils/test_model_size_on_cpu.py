# SPDX-License-Identifier: Apache-2.0
"""Parameter counts from config.json: published totals, transformers' own models, layouts that cannot be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.special_sanity.test_import_time import HEAVY, measure
from verl.utils.model_size import (
    COMPONENTS,
    KNOWN_ARCHITECTURES,
    Layout,
    ModelShape,
    as_built,
    layout_problems,
    num_parameters,
    padded_numel,
    parameter_groups,
    parameters_on_rank,
    read_model_shape,
    stage_layers,
)
from verl.utils.model_split import PipelineSplit

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "model_configs"
# What each hub page shows, multi-token prediction included where the number in the second place is not 0. DeepSeek-V3's
# page counts scales of its 8-bit weights too; its paper has 671 billion (arXiv 2412.19437).
PUBLISHED = {
    "Qwen2.5-7B-Instruct": (7_615_616_512, 0),
    "Qwen3-8B": (8_190_735_360, 0),
    "Qwen3-30B-A3B": (30_532_122_624, 0),
    "Qwen3-VL-30B-A3B-Instruct": (31_070_754_032, 0),
    "MiMo-7B-RL": (7_833_409_536, 210_790_400),
}
WITHOUT_MTP = {"DeepSeek-V3": 671_026_404_352, "Moonlight-16B-A3B-Instruct": 15_960_108_544}


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))


def shape(name: str) -> ModelShape:
    return read_model_shape(config(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_one(name: str) -> None:
    found = num_parameters(shape(name))
    assert (found["total"], found["mtp"]) == PUBLISHED[name]
    assert sum(found[component] for component in COMPONENTS) == found["total"]


@pytest.mark.parametrize("name", [*(name for name, (_, mtp) in PUBLISHED.items() if not mtp), *WITHOUT_MTP])
def test_total_is_that_of_the_model_in_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = AutoConfig.from_pretrained(CONFIGS / name)
    auto = AutoModelForImageTextToText if hasattr(settings, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(settings)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(shape(name).without_mtp())["total"] == expected
    assert expected == WITHOUT_MTP.get(name, expected)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Glm4MoeForCausalLM", {}),
        ("Glm4MoeForCausalLM", {"use_qk_norm": True, "attention_bias": True}),
        ("HYV3ForCausalLM", {}),
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("Qwen3VLForConditionalGeneration", {}),
    ],
)
def test_every_family_has_the_parameters_of_transformers(architecture: str, settings: dict[str, Any]) -> None:
    import torch
    import transformers

    cls = getattr(transformers, architecture)
    given = cls.config_class(**settings)
    with torch.device("meta"):
        model = cls(given)
    config = json.loads(given.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(read_model_shape(config).without_mtp())["total"] == expected


def test_deepseek_prediction_layer_has_the_size_of_the_paper() -> None:
    # 11.5 billion of its own, embedding and head shared (DeepSeek-V3's README_WEIGHTS).
    assert 11.5e9 < num_parameters(shape("DeepSeek-V3"))["mtp"] < 11.7e9


@pytest.mark.parametrize("name", [*PUBLISHED, *WITHOUT_MTP])
def test_ranks_of_a_split_model_hold_the_whole_together(name: str) -> None:
    whole = shape(name).without_mtp()
    last = whole.num_layers // 4
    layout = Layout(pp=2, world_size=2, split=PipelineSplit(2, first=whole.num_layers - last, last=last))
    parts = [parameters_on_rank(whole, layout, stage) for stage in range(layout.pp)]
    assert sum(part["total"] for part in parts) == num_parameters(whole)["total"]


def test_tensor_and_expert_ranks_split_what_megatron_splits() -> None:
    whole, layout = shape("Qwen3-30B-A3B"), Layout(tp=4, ep=8, etp=1, world_size=32)
    one, rank = num_parameters(whole), parameters_on_rank(whole, layout, 0)
    for name, divisor in {
        "embedding": 4,
        "output_head": 4,
        "attention": 4,
        "experts": 8,
        "router": 1,
        "norms": 1,
    }.items():
        assert rank[name] * divisor == one[name], name


def test_fewer_key_value_heads_than_tensor_ranks_split_the_fused_matrix_evenly() -> None:
    whole = shape("Qwen3-30B-A3B")  # 4 key-value heads
    rank = parameters_on_rank(whole, Layout(tp=8, world_size=8), 0)
    assert rank["attention"] * 8 == num_parameters(whole)["attention"]


def test_compressing_matrices_are_whole_on_every_tensor_rank_with_transformer_engine() -> None:
    whole, layout = shape("DeepSeek-V3").without_mtp(), Layout(tp=8, world_size=8)
    counts = [parameters_on_rank(whole, layout, 0, transformer_engine=te)["attention"] for te in (True, False)]
    compressing = 61 * 7168 * (1536 + 512 + 64)
    assert counts[0] - counts[1] == compressing * 7 // 8


def test_prediction_layers_bring_an_embedding_to_the_last_stage() -> None:
    whole = shape("MiMo-7B-RL")
    stages = [parameters_on_rank(whole, Layout(pp=2, world_size=2), stage) for stage in range(2)]
    assert stages[1]["embedding"] == stages[0]["embedding"] == 151_680 * 4096
    assert stages[1]["mtp"] == PUBLISHED["MiMo-7B-RL"][1] and stages[0]["mtp"] == 0


def test_dense_layers_among_sparse_ones() -> None:
    mixed = config("Qwen3-30B-A3B") | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    kinds = read_model_shape(mixed).moe_layers
    assert kinds[:5] == (False, False, False, True, False) and sum(kinds) == 23
    assert num_parameters(read_model_shape(mixed))["dense_mlp"] == 25 * 3 * 2048 * 6144


def test_virtual_stages_take_every_other_run_of_layers() -> None:
    layout = Layout(pp=2, vpp=2, world_size=2)
    small = replace(shape("Qwen3-8B"), num_layers=8, moe_layers=(False,) * 8)
    assert stage_layers(small, layout, 0) == [0, 1, 4, 5]
    assert stage_layers(small, layout, 1) == [2, 3, 6, 7]


def test_uneven_stages() -> None:
    layout = Layout(pp=16, world_size=16, split=PipelineSplit(16, first=3, last=2))
    deepseek = shape("DeepSeek-V3")
    layers = [stage_layers(deepseek, layout, stage) for stage in range(16)]
    assert [len(each) for each in layers] == [3, *[4] * 14, 2]
    assert sum(layers, []) == list(range(61))


def test_critic_has_one_number_for_each_position_and_ties_nothing() -> None:
    tied = replace(shape("Qwen3-8B"), tied=True)
    assert parameters_on_rank(tied, Layout(), 0)["output_head"] == 0
    assert parameters_on_rank(tied, Layout(), 0, value_head=True)["output_head"] == 4096 + 1


def test_buffers_start_parameters_at_multiples_of_64_and_end_at_multiples_of_the_shards() -> None:
    groups = parameter_groups(read_model_shape(config("Qwen3-8B")), Layout(), 0)
    total = sum(group.total for group in groups)
    assert total <= padded_numel(groups, 8) < total + 64 * sum(group.copies for group in groups) + 128
    assert padded_numel(groups, 96) % 384 == 0


def test_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Qwen3MoForCausalLM are not known") as error:
        read_model_shape({"architectures": ["Qwen3MoForCausalLM"]})
    assert all(name in str(error.value) for name in KNOWN_ARCHITECTURES)
    with pytest.raises(ValueError, match="no architectures"):
        read_model_shape({})


@pytest.mark.parametrize(
    ("name", "key"),
    [("Qwen3-8B", "intermediate_size"), ("Qwen3-30B-A3B", "num_experts"), ("DeepSeek-V3", "v_head_dim")],
)
def test_missing_size_is_named(name: str, key: str) -> None:
    given = config(name)
    del given[key]
    with pytest.raises(ValueError, match=f"lacks {key}"):
        read_model_shape(given)


def test_layouts_that_do_not_divide_say_what_does_not() -> None:
    whole = shape("Qwen3-30B-A3B")
    assert not layout_problems(whole, Layout(tp=4, pp=2, cp=2, ep=4, etp=1, world_size=16))
    problems = " | ".join(layout_problems(whole, Layout(tp=5, pp=7, ep=3, etp=1, world_size=8)))
    for text in ("world size=8", "vocabulary of 151936", "32 attention heads", "experts=128", "48 layers cannot be"):
        assert text in problems
    with pytest.raises(ValueError, match="cannot be laid out so: 48 layers cannot be divided by 5 pipeline"):
        parameters_on_rank(whole, Layout(pp=5, world_size=5), 0)


def test_a_padded_vocabulary_and_a_number_of_layers_are_what_is_built() -> None:
    whole = shape("Qwen3-8B")
    assert as_built(whole, Layout(tp=2, world_size=2, pads_vocabulary=True)).vocab_size == 152_064  # 2 x 128 x 594
    assert shape("DeepSeek-V3").vocab_multiple == 1280
    whole = read_model_shape(config("Qwen3-8B") | {"vocab_size": 151_935})
    assert "vocabulary of 151935" in " ".join(layout_problems(whole, Layout(tp=2, world_size=2)))
    layout = Layout(tp=2, world_size=2, pads_vocabulary=True, num_layers=4)
    built = as_built(whole, layout)
    assert (built.vocab_size, built.num_layers, len(built.moe_layers)) == (151_936, 4, 4)
    assert as_built(whole, replace(layout, vocabulary_multiple=128)).vocab_size == 152_064
    assert as_built(built, layout) == built and not layout_problems(whole, layout)
    rank, layer = parameters_on_rank(whole, layout, 0), 3 * 4096 * 12288 // 2
    assert rank["embedding"] == 151_936 * 4096 // 2 and rank["dense_mlp"] == 4 * layer


def test_the_layout_of_an_engine() -> None:
    overrides = {"num_layers": 34, "account_for_embedding_in_pipeline_split": True, "should_pad_vocab": True}
    overrides["account_for_loss_in_pipeline_split"] = True
    sizes = dict(tensor_model=1, pipeline_model=4, context=1, expert_model=1, expert_tensor=None)
    engine = {f"{name}_parallel_size": size for name, size in sizes.items()}
    engine |= {"virtual_pipeline_model_parallel_size": None, "sequence_parallel": True}
    layout = Layout.of_engine(engine | {"override_transformer_config": overrides}, 4)
    held = [stage_layers(as_built(shape("Qwen3-8B"), layout), layout, stage) for stage in range(4)]
    assert [len(layers) for layers in held] == [8, 9, 9, 8] and sum(held, []) == list(range(34))
    assert layout.pads_vocabulary and layout.vocabulary_multiple is None and layout.expert_tp == 1


def test_importing_loads_nothing_heavy() -> None:
    seconds, modules = measure("import verl.utils.model_size, verl.utils.memory_estimate")
    assert seconds < 1.0 and not modules.intersection(HEAVY)
