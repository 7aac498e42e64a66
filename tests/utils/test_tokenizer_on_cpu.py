# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, positions, response masks and the tiny model's folder."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from verl.utils.model import compute_position_id_with_mask, compute_response_mask
from verl.utils.tiny_model import build_character_tokenizer, save_tiny_qwen3_moe
from verl.utils.tokenizer import hf_processor, hf_tokenizer, set_pad_token_id

SMALL = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 4, "moe_intermediate": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_qwen3_moe(tmp_path_factory.mktemp("model"), **SMALL, seed=3)


def test_tiny_folder_opens_with_its_own_special_tokens(folder):
    tokenizer = hf_tokenizer(folder)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 64
    ids = tokenizer("17+25=<eos>")["input_ids"]
    assert len(ids) == 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == "17+25="
    assert tokenizer("~")["input_ids"] == [tokenizer.unk_token_id]
    assert hf_processor(folder) is None


def test_tiny_template_renders_a_user_message_as_its_bare_text(folder):
    tokenizer = hf_tokenizer(folder)
    user, answer = {"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}
    assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True) == "17+25="
    assert tokenizer.apply_chat_template([user, answer], tokenize=False) == "17+25=240<eos>"


def test_tiny_weights_have_hub_names_and_depend_on_the_seed_alone(folder, tmp_path):
    from safetensors.torch import load_file

    state = torch.random.get_rng_state()
    weights = load_file(f"{folder}/model.safetensors")
    again = load_file(save_tiny_qwen3_moe(tmp_path / "again", **SMALL, seed=3) + "/model.safetensors")
    other = load_file(save_tiny_qwen3_moe(tmp_path / "other", **SMALL, seed=4) + "/model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in weights
    assert "lm_head.weight" in weights  # untied
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_default_tiny_model_has_the_documented_size_and_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_qwen3_moe(tmp_path))
    assert sum(p.numel() for p in model.parameters()) == 903_936
    assert model.dtype == torch.float32
    assert model.config.norm_topk_prob is True
    generation = model.generation_config
    assert (generation.eos_token_id, generation.pad_token_id, generation.top_k) == (2, 0, 0)


def load_init_random_model():
    path = Path(__file__).parents[2] / "scripts" / "init_random_model.py"
    spec = importlib.util.spec_from_file_location("init_random_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_command_line_writes_the_sizes_it_is_given(tmp_path):
    from transformers import AutoConfig

    script = load_init_random_model()
    script.main(["--out", str(tmp_path), "--layers", "1", "--hidden", "32", "--experts", "4", "--dtype", "bfloat16"])
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.hidden_size, config.num_experts) == (1, 32, 4)
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family, size, architecture",
    [
        ("qwen2", ["--intermediate", "48"], "Qwen2ForCausalLM"),
        ("qwen3", ["--head-dim", "16"], "Qwen3ForCausalLM"),
        ("deepseek_v3", ["--experts", "4"], "DeepseekV3ForCausalLM"),
        ("mimo", ["--mtp-layers", "2"], "MiMoForCausalLM"),
    ],
)
def test_command_line_writes_every_family(tmp_path, capsys, family, size, architecture):
    from transformers import AutoModelForCausalLM

    script = load_init_random_model()
    script.main(["--out", str(tmp_path / family), "--family", family, "--layers", "2", "--hidden", "32", *size])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / family, trust_remote_code=family == "mimo")
    assert model.config.architectures == [architecture]
    key = {"--intermediate": "intermediate_size", "--head-dim": "head_dim", "--experts": "n_routed_experts"}
    assert getattr(model.config, key.get(size[0], "num_nextn_predict_layers")) == int(size[1])
    prompt = hf_tokenizer(tmp_path / family)("17+25=", return_tensors="pt")["input_ids"]
    assert 7 <= model.generate(prompt, max_new_tokens=3).shape[1] <= 9
    other = "--experts" if family in ("qwen2", "qwen3") else "--head-dim"
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path / "other"), "--family", family, other, "4"])
    assert f"--family {family} has no {other}" in capsys.readouterr().err


def test_vocabulary_too_small_for_digits_is_refused():
    with pytest.raises(ValueError, match="vocab=10 .* least is 19"):
        build_character_tokenizer(10)


def test_folder_without_tokenizer_is_refused_although_transformers_would_invent_one(folder, tmp_path):
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    with pytest.raises(ValueError, match=r"holds no tokenizer .*model\.tokenizer_path"):
        hf_tokenizer(tmp_path)


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_missing_local_folder_is_refused_without_asking_the_hub(path):
    for opener in (hf_tokenizer, hf_processor):
        with pytest.raises(ValueError, match="does not exist"):
            opener(path)


def test_missing_pad_token_becomes_eos_with_a_warning(tmp_path, caplog):
    tokenizer = build_character_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        opened = hf_tokenizer(tmp_path)
    assert opened.pad_token_id == opened.eos_token_id == 2
    assert "no pad token" in caplog.text
    assert hf_tokenizer(tmp_path, correct_pad_token=False).pad_token_id is None


def test_pad_token_that_is_there_is_kept_silently(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert hf_tokenizer(folder).pad_token_id == 0
    assert not caplog.records


def test_neither_pad_nor_eos_is_an_error():
    tokenizer = build_character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad token nor an EOS token"):
        set_pad_token_id(tokenizer)


def test_trust_remote_code_is_passed_on(folder, monkeypatch):
    from transformers import AutoTokenizer

    seen, real = [], AutoTokenizer.from_pretrained

    def spy(path, **kwargs):
        seen.append(kwargs["trust_remote_code"])
        return real(path, **kwargs)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", spy)
    hf_tokenizer(folder)
    hf_tokenizer(folder, trust_remote_code=True)
    assert seen == [False, True]


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert compute_position_id_with_mask(mask).tolist() == expected
    assert compute_position_id_with_mask(mask.bool()).tolist() == expected


@pytest.mark.parametrize(
    ("responses", "eos", "pad", "mask"),
    [
        ([5, 9, 0, 0], 9, 0, [1, 1, 0, 0]),
        ([5, 6, 0, 0], 9, 0, [1, 1, 0, 0]),  # no EOS: padding is not trained all the same
        ([5, 6, 7, 8], 9, 0, [1, 1, 1, 1]),
        ([5, 9, 9, 9], 9, 9, [1, 1, 0, 0]),  # pad id == EOS id: the first is the EOS
        ([9, 9, 9, 9], 9, 9, [1, 0, 0, 0]),
        ([5, 9, 6, 9], 9, 0, [1, 1, 0, 0]),
        ([5, 8, 6, 9], [9, 8], 0, [1, 1, 0, 0]),
        ([5, 8, 0, 0], (9, 8), 8, [1, 1, 0, 0]),
        ([5, 0, 6, 0], 9, 0, [1, 1, 1, 0]),  # a pad id that was sampled amid the text
        ([0, 0, 0, 0], 9, 0, [0, 0, 0, 0]),
        ([5, 6, 0, 0], None, None, [1, 1, 1, 1]),
        ([5, 6, 0, 0], None, 0, [1, 1, 0, 0]),
    ],
)
def test_response_mask_ends_at_the_first_eos_or_at_the_padding(responses, eos, pad, mask):
    result = compute_response_mask(torch.tensor([responses, [5, 9, 9, 9]]), eos, pad)
    assert result[0].tolist() == mask
    assert result.dtype == torch.int64
