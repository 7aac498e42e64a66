# SPDX-License-Identifier: Apache-2.0
"""In-place weight refresh of transformers models: bit-equal, streamed, and loud about every name that does not fit."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl.utils.hf_weights import InPlaceLoader

SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen2_tied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, tie_word_embeddings=False
    ),
    "qwen3_moe_tied_one_dense_layer": lambda: Qwen3MoeConfig(
        **SMALL,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=3),
}


def build(kind, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype).eval()


def hub_tensors(model, folder):
    """The tensors as a checkpoint on the hub names them: what save_pretrained writes."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same_bits(model, source):
    want = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_saved_checkpoint_streams_into_another_model_bit_for_bit(kind, tmp_path):
    source, model = build(kind, 0), build(kind, 1)
    tensors = hub_tensors(source, tmp_path)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    loader = InPlaceLoader(model)
    loader.load(tensors.items())
    assert_same_bits(model, source)
    assert places == {name: p.data_ptr() for name, p in model.named_parameters()}
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, source(input_ids=ids).logits)


def test_second_push_and_any_order_and_a_reused_buffer(tmp_path):
    model = build("qwen3_moe", 9)
    loader = InPlaceLoader(model)
    for seed in (0, 1):
        source = build("qwen3_moe", seed)
        tensors = hub_tensors(source, tmp_path / str(seed))
        buffer = torch.empty(max(t.numel() for t in tensors.values()))

        def through_one_buffer(tensors=tensors, buffer=buffer):
            for name in reversed(list(tensors)):
                window = buffer[: tensors[name].numel()].view(tensors[name].shape)
                window.copy_(tensors[name])
                yield name, window
            buffer.fill_(float("nan"))

        loader.load(through_one_buffer())
        assert_same_bits(model, source)


def test_plan_survives_a_move_of_the_parameters(tmp_path):
    source, model = build("qwen3_moe", 0), build("qwen3_moe", 1)
    loader = InPlaceLoader(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    loader.load(hub_tensors(source, tmp_path).items())
    assert_same_bits(model, source)


def test_dtype_is_cast_to_the_parameter(tmp_path):
    source, model = build("qwen3_moe", 0), build("qwen3_moe", 1, torch.bfloat16)
    InPlaceLoader(model).load(hub_tensors(source, tmp_path).items())
    assert_same_bits(model, source.to(torch.bfloat16))


def test_all_faults_are_listed_in_one_error_and_the_stream_is_drained(tmp_path):
    model = build("qwen3_moe", 1)
    tensors = hub_tensors(build("qwen3_moe", 0), tmp_path)
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[gone]
    tensors["model.norm.weight"] = torch.zeros(7)
    pairs = [("model.surprise", torch.zeros(1)), ("lm_head.weight", tensors["lm_head.weight"]), *tensors.items()]
    stream = iter(pairs)
    with pytest.raises(ValueError, match="do not fit") as error:
        InPlaceLoader(model).load(stream)
    text = str(error.value)
    assert f"missing: {gone}" in text
    assert "unexpected: model.surprise" in text
    assert "given twice: lm_head.weight" in text
    assert "wrong shape: model.norm.weight is (7,), the model has (16,)" in text
    assert "4 faults" in text
    assert next(stream, None) is None


def test_fused_names_are_not_hub_names():
    model = build("qwen3_moe", 0)
    with pytest.raises(ValueError, match="unexpected: model.layers.0.mlp.experts.gate_up_proj"):
        InPlaceLoader(model).load(model.state_dict().items())


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_tied_weights_is_enough(name, tmp_path):
    source, model = build("qwen2_tied", 0), build("qwen2_tied", 1)
    tensors = hub_tensors(source, tmp_path)
    value = tensors.pop("model.embed_tokens.weight")
    InPlaceLoader(model).load([*tensors.items(), (name, value)])
    assert_same_bits(model, source)
    with pytest.raises(ValueError, match=r"missing: model.embed_tokens.weight or lm_head.weight|missing: lm_head"):
        InPlaceLoader(model).load(tensors.items())


def test_tied_names_with_different_values_are_refused(tmp_path):
    model = build("qwen2_tied", 1)
    tensors = hub_tensors(build("qwen2_tied", 0), tmp_path)
    tied = tensors["model.embed_tokens.weight"]
    InPlaceLoader(model).load([*tensors.items(), ("lm_head.weight", tied.clone())])
    with pytest.raises(ValueError, match="tied weights differ"):
        InPlaceLoader(model).load([*tensors.items(), ("lm_head.weight", tied + 1)])


def test_a_model_whose_conversion_copies_is_refused(monkeypatch):
    from transformers import core_model_loading

    def copying(model, state):
        return {name: tensor.clone() for name, tensor in state.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", copying)
    with pytest.raises(ValueError, match="cannot be refreshed in place"):
        InPlaceLoader(build("llama", 0))


def test_a_plan_with_a_hole_is_refused(monkeypatch):
    from transformers import core_model_loading

    def dropping(model, state):
        return {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", dropping)
    with pytest.raises(ValueError, match="no full plan for model.norm.weight"):
        InPlaceLoader(build("llama", 0))


def test_tensors_that_may_stay_need_not_be_given_and_are_taken_when_they_are(tmp_path):
    target, source = build("llama", 0), build("llama", 1)
    before = target.model.layers[1].mlp.up_proj.weight.clone()
    weights = hub_tensors(source, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rest = [(n, w) for n, w in weights.items() if n != name]
    with pytest.raises(ValueError, match=f"missing: {name}"):
        InPlaceLoader(target, may_stay=("down",)).load(rest)
    loader = InPlaceLoader(target, may_stay=("layers.1.mlp.up",))
    loader.load(rest)
    assert torch.equal(target.model.layers[1].mlp.up_proj.weight, before)
    loader.load(weights.items())
    assert_same_bits(target, source)
