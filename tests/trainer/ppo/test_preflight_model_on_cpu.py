# SPDX-License-Identifier: Apache-2.0
"""Models and layouts that do not go together, known from config.json alone; and all those that do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.trainer.ppo import preflight_model
from verl.trainer.ppo.preflight_model import (
    check_generation_model,
    check_model,
    check_override_config,
    check_ppo_models,
    check_sft_model,
)
from verl.utils.config import compose_config, to_tree

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "model_configs"
A = "actor_rollout_ref"

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
MOE = DENSE | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 24}
LATENT = MOE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_experts": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "num_nextn_predict_layers": 1,
}
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
OTC = "override_transformer_config"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = (f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))


def problems(config: dict | Path, folder: Path, longest: int = 8, mtp: bool = False, **layout: Any) -> list[str]:
    """What is said of a model in a layout."""
    if isinstance(config, dict):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        folder = config
    engine = {"sequence_parallel": True, "dtype": "float32", OTC: layout.pop("overrides", {})}
    engine |= {name: None if short in ("vpp", "etp") else 1 for short, name in SHORT.items()}
    engine |= {SHORT.get(name, name): value for name, value in layout.items()}
    model = {"path": str(folder), "hf_config_path": None, "override_config": {}, "mtp": {"enable": mtp}}
    return check_model("model", model, "engine", engine, (longest, f"data.max_length={longest}"))


WRONG = [
    (
        DENSE | {"num_hidden_layers": 3},
        {"pp": 2},
        ["pipeline_model_parallel_size=2 does not divide the 3", "use 1 or 3"],
    ),
    (DENSE | {"num_hidden_layers": 1}, {"pp": 2}, ["does not divide the 1 layers", "use 1,"]),
    (
        DENSE | {"num_hidden_layers": 2},
        {"pp": 2, "vpp": 2},
        ["vpp", "=2 does not divide the 1 layers of a stage", "null"],
    ),
    (DENSE | {"num_hidden_layers": 6}, {"pp": 2, "vpp": 2}, ["the 3 layers of a stage", "use 3 or null"]),
    (DENSE, {"pp": 2, "vpp": 1}, ["vpp", "=1 is no division", "null"]),
    (DENSE, {"pp": 2, "overrides": {FIRST: 4}}, [f"{FIRST}=4 leaves 0 of the 4 layers", "all stages must get layers"]),
    (DENSE, {"pp": 2, "overrides": {FIRST: 2, LAST: 1}}, [f"{FIRST}=2 and engine.{OTC}.{LAST}=1 leaves 1"]),
    (DENSE, {"pp": 2, "vpp": 2, "overrides": {FIRST: 1}}, ["vpp", "does not divide the 1 layers of a stage", "null"]),
    (
        DENSE,
        {"pp": 2, "vpp": 2, "overrides": {FIRST: 2, LAST: 2}},
        ["vpp", f"=2 does not go with engine.{OTC}.{FIRST}=2 and", "set one of these sizes only"],
    ),
    (
        DENSE,
        {"pp": 2, "overrides": {FIRST: 2, LOSS: True}},
        [f"{FIRST}=2 and engine.{OTC}.account_for_*_in_pipeline_split exclude each other"],
    ),
    (DENSE, {"overrides": {FIRST: 2}}, [f"{FIRST}=2 leaves 2 of the 4 layers", "and no other stage"]),
    (DENSE, {"pp": 2, "overrides": {"num_layers": 3}}, ["does not divide the 3 layers"]),
    (DENSE, {"pp": 2, "overrides": {LOSS: True}}, ["the 4 layers", "counted 5", "use 1 or 5"]),
    (
        MOE | {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"tp": 2},
        ["tp", "=2 cannot divide the 3 atten", "use 1"],
    ),
    (DENSE | {"num_attention_heads": 6, "num_key_value_heads": 3}, {"tp": 2}, ["3 heads of keys and values", "use 1"]),
    (DENSE | {"num_attention_heads": 8, "num_key_value_heads": 6}, {"tp": 4}, ["6 heads of keys and values", "use 2"]),
    (DENSE | {"intermediate_size": 15}, {"tp": 2}, ["15 columns of the dense layers (intermediate_size)", "use 1"]),
    (
        DENSE | {"vocab_size": 65},
        {"tp": 2},
        ["vocabulary of 65 tokens", "use 1,", f"+engine.{OTC}.should_pad_vocab=True"],
    ),
    (
        MOE | {"moe_intermediate_size": 15},
        {"tp": 2},
        ["15 columns of an expert", "expert_tensor_parallel_size follows"],
    ),
    (
        MOE | {"moe_intermediate_size": 15},
        {"etp": 2},
        ["expert_tensor_parallel_size=2 does not divide the 15", "1 or 3"],
    ),
    (LATENT | {"moe_intermediate_size": 15}, {"tp": 2, "etp": 1}, ["15 columns of the shared experts"]),
    (LATENT | {"intermediate_size": 15}, {"tp": 2}, ["15 columns of the dense layers"]),
    (MOE | {"num_experts": 5}, {"ep": 2}, ["expert_model_parallel_size=2 does not divide the 5 experts", "use 1 or 5"]),
    (DENSE, {"ep": 2}, ["expert_model_parallel_size=2 needs experts", "dense model", "set it to 1"]),
    (MOE, {"tp": 2, "sequence_parallel": False}, ["sequence_parallel=False", "tp", "=2 for a model with experts"]),
    (MOE | {"architectures": ["GptOssForCausalLM"]}, {"tp": 2}, ["expert_tensor_parallel_size=2", "bias", "size=1"]),
    (DENSE, {"mtp": True}, ["model.mtp.enable=True needs layers", "has none", "model.mtp.enable=False"]),
    (LATENT | {"num_nextn_predict_layers": 0}, {"mtp": True}, ["model.mtp.enable=True needs layers"]),
    (DENSE, {"longest": 257}, ["data.max_length=257 tokens is more than the 256 positions", "override_config.max_pos"]),
    (DENSE | {"architectures": ["Gemma3ForCausalLM"]}, {}, ["Gemma3ForCausalLM needs the package transformer_engine"]),
    (DENSE | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}, {}, ["window of 16 tokens"]),
    (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": DENSE, "num_hidden_layers": 2},
        {"pp": 3},
        ["the 4 layers"],
    ),
]


@pytest.mark.parametrize(("config", "layout", "parts"), WRONG, ids=lambda value: str(value)[-60:])
def test_a_layout_that_the_model_cannot_have_is_refused_in_one_sentence(
    config: dict, layout: dict, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ("transformer_engine" in parts[0] or "window" in parts[0]):
        monkeypatch.setattr(preflight_model, "_check_transformer_engine", lambda path, facts: [])
    found = problems(config, tmp_path / "model", **layout)
    assert len(found) == 1, found
    for part in parts:
        assert SHORT.get(part, part) in found[0], found[0]
    assert (
        "Gpt" in found[0]
        or "vpp" in layout
        or "exclude" in found[0]
        or str(tmp_path / "model" / "config.json") in found[0]
    ), found[0]


# Each of these was built and trained for a step in a world of two or four processes.
RIGHT = [
    (DENSE, {"pp": 2, "vpp": 2}),
    (MOE, {"pp": 4}),
    (MOE | {"num_hidden_layers": 3}, {"pp": 2, "overrides": {FIRST: 2}}),
    (MOE | {"num_hidden_layers": 3}, {"pp": 2, "overrides": {LAST: 2}}),
    (MOE | {"num_hidden_layers": 3}, {"pp": 2, "overrides": {EMBEDDING: True}}),
    (MOE | {"num_hidden_layers": 2}, {"pp": 2, "overrides": {EMBEDDING: True, LOSS: True}}),
    (MOE | {"num_hidden_layers": 3}, {"pp": 2, "overrides": {"pipeline_model_parallel_layout": "Et|ttL"}}),
    (MOE | {"num_key_value_heads": 1}, {"tp": 2}),
    (MOE, {"tp": 4, "etp": 1}),
    (DENSE | {"num_attention_heads": 8}, {"tp": 4}),
    (MOE | {"moe_intermediate_size": 15, "intermediate_size": 15}, {"tp": 2, "etp": 1, "ep": 2}),
    (DENSE | {"vocab_size": 65}, {"tp": 2, "overrides": {"should_pad_vocab": True}}),
    (DENSE, {"tp": 2, "sequence_parallel": False}),
    (LATENT, {"tp": 2, "mtp": True}),
    (LATENT, {"cp": 2, "ep": 2, "pp": 2}),
    (DENSE | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"longest": 1024}),
    ({"architectures": ["Qwen3ForCausalLM"]}, {"pp": 7, "tp": 3, "longest": 10**6}),
]


@pytest.mark.parametrize(("config", "layout"), RIGHT, ids=lambda value: str(value)[-60:])
def test_a_layout_that_works_is_not_refused(config: dict, layout: dict, tmp_path: Path) -> None:
    assert problems(config, tmp_path / "model", **layout) == []


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("DeepSeek-V3", {"tp": 8, "pp": 16, "ep": 32, "etp": 1, "overrides": {FIRST: 3, LAST: 2}}),
        ("MiMo-7B-RL", {"tp": 4, "pp": 2, "mtp": True}),
        ("Moonlight-16B-A3B-Instruct", {"tp": 4, "pp": 3, "ep": 8, "etp": 1}),
        ("Qwen2.5-7B-Instruct", {"tp": 4, "pp": 2, "cp": 2}),
        ("Qwen3-30B-A3B", {"tp": 4, "pp": 2, "vpp": 4, "ep": 8, "etp": 1}),
        ("Qwen3-8B", {"tp": 8, "pp": 2, "vpp": 9}),
    ],
)
def test_public_models_in_usual_layouts(name: str, layout: dict) -> None:
    assert problems(CONFIGS / name, CONFIGS, longest=8192, **layout) == []


def test_the_sizes_that_are_offered_are_right(tmp_path: Path) -> None:
    config = DENSE | {"num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 66, "intermediate_size": 60}
    (found,) = problems(config, tmp_path / "model", tp=4)
    assert "use 3 or 6" in found
    for size in (3, 6):
        assert problems(config, tmp_path / "model", tp=size) == []


def test_the_keys_are_those_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"num_hidden_layers": 3}))
    paths = [f"{A}.model.path={tmp_path}", "data.max_prompt_length=256", "data.max_response_length=8"]
    paths += [f"{A}.actor.megatron.pipeline_model_parallel_size=2", f"{A}.rollout.name=hf"]
    tree = to_tree(compose_config("ppo_trainer", paths))
    layers, positions = check_ppo_models(tree)
    assert layers.startswith(f"{A}.actor.megatron.pipeline_model_parallel_size=2 does not divide the 3 layers")
    assert positions.startswith("data.max_prompt_length=256 + data.max_response_length=8 = 264 tokens are more than")
    assert f"+{A}.model.override_config.max_position_embeddings=264" in positions
    # The critic follows the actor, so it has the same fault and no sentence of its own; with another model it has.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(DENSE | {"num_hidden_layers": 5}))
    tree["critic"]["model"]["path"] = str(tmp_path / "other")
    assert "critic.megatron.pipeline_model_parallel_size=2 does not divide the 5" in check_ppo_models(tree)[2]
    own = [f"model.path={tmp_path}", "engine.tensor_model_parallel_size=3"]
    sft = to_tree(compose_config("sft_trainer_engine", own))
    assert [error.split("=")[0] for error in check_sft_model(sft)] == [
        "engine.tensor_model_parallel_size",
        "data.max_length",
    ]
    offline = to_tree(compose_config("generation", [f"model.path={tmp_path}", "rollout.response_length=300"]))
    (found,) = check_generation_model(offline)
    assert "rollout.response_length=300" in found and "256 positions" in found


def test_neither_torch_nor_transformers_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.trainer.ppo.test_preflight_model_on_cpu import CONFIGS, problems\n"
        "problems(CONFIGS / 'DeepSeek-V3', CONFIGS, tp=3, pp=2, ep=5, mtp=True)\n"
        "loaded = {'torch', 'transformers', 'megatron.core', 'ray'} & set(sys.modules)\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_hiden_layers": 1}, "num_hiden_layers=1 is not an entry of"),
        ({"num_hiden_layers": 1}, "Did you mean num_hidden_layers?"),
        ({"num_hidden_layers": "abc"}, "num_hidden_layers='abc' replaces 4 in"),
        ({"num_hidden_layers": 2, "max_position_embeddings": 512, "rope_theta": 1e4, "attention_dropout": 0.1}, ""),
    ],
)
def test_entries_of_the_hugging_face_config_that_are_replaced(tmp_path: Path, given: dict, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    found = check_override_config("model", {"path": str(tmp_path), "hf_config_path": None, "override_config": given})
    assert len(found) == bool(words) and all(words in error for error in found), found
