# SPDX-License-Identifier: Apache-2.0
"""The in-process rollout against transformers' own generate, plain forward passes and arithmetic."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

from verl.protocol import DataProto
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.hf_rollout import HFRollout

VOCAB, EOS, PAD, P, R = 24, 1, 0, 7, 6


def save_model(folder, seed=0, top_k=50):
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # sharper than a fresh model, so that greedy choices and cuts are clear
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    # What a real checkpoint brings along and the rollout must not obey.
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=top_k, top_p=0.5, temperature=0.3, eos_token_id=EOS, pad_token_id=PAD
    )
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), top_k=1)


def make_rollout(path, **changes):
    settings = {"name": "hf", "prompt_length": P, "response_length": R, "dtype": "float32", **changes}
    return HFRollout(RolloutConfig(**settings), HFModelConfig(path=path))


def prompts(lengths, seed=0, **meta):
    """Left-padded random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), P), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, P - length :] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, P - length :] = 1
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return DataProto(
        batch=TensorDict(tensors, batch_size=[len(lengths)]),
        non_tensor_batch={"uid": np.array([f"u{i}" for i in range(len(lengths))], dtype=object)},
        meta_info={"eos_token_id": EOS, "pad_token_id": PAD, **meta},
    )


def one_prompt_many_times(count, length=4, **meta):
    return prompts([length], **meta).repeat(count, interleave=True)


def plain_log_probs(model, batch, temperature=1.0):
    """Log-prob of each response token from one forward pass per row, without padding; [B, R], 0 outside the mask."""
    result = torch.zeros(batch["responses"].shape)
    with torch.no_grad():
        for row in range(len(result)):
            real = batch["attention_mask"][row].bool()
            ids = batch["input_ids"][row][real][None]
            num = int(batch["response_mask"][row].sum())
            logits = model(input_ids=ids).logits[0, -num - 1 : -1] / temperature
            result[row, :num] = logits.log_softmax(-1).gather(-1, ids[0, -num:, None])[:, 0]
    return result


def force_token(rollout, choose):
    """Replace the model's logits: `choose(step, rows) -> token per row`; counts the steps."""
    original, steps = rollout.model.forward, []

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        tokens = choose(len(steps), len(output.logits))
        steps.append(len(output.logits))
        output.logits = torch.full_like(output.logits, -30.0)
        output.logits[torch.arange(len(tokens)), -1, torch.tensor(tokens)] = 30.0
        return output

    rollout.model.forward = forward
    return steps


def test_greedy_equals_transformers_generate(path):
    rollout = make_rollout(path, calculate_log_probs=False)
    batch = prompts([7, 2, 5, 1, 3, 5, 4, 7, 6, 3] * 4)
    batch.meta_info.update(do_sample=False)
    out = rollout.generate_sequences(batch).batch
    want = rollout.model.generate(
        input_ids=batch.batch["input_ids"],
        attention_mask=batch.batch["attention_mask"],
        generation_config=GenerationConfig(max_new_tokens=R, do_sample=False, eos_token_id=EOS, pad_token_id=PAD),
    )[:, P:]
    want = torch.nn.functional.pad(want, (0, R - want.shape[1]), value=PAD)
    assert torch.equal(out["responses"], want)
    ended = (want == EOS).any(1)
    assert ended.any() and not ended.all(), "the case must hold rows that stop and rows that do not"
    assert "rollout_log_probs" not in out.keys()


def test_output_columns_fit_together(path):
    batch = prompts([7, 2, 5])
    out = make_rollout(path).generate_sequences(batch)
    tensors, mask = out.batch, out.batch["response_mask"]
    assert torch.equal(tensors["prompts"], batch.batch["input_ids"])
    assert torch.equal(tensors["input_ids"], torch.cat((tensors["prompts"], tensors["responses"]), 1))
    assert torch.equal(tensors["attention_mask"], torch.cat((batch.batch["attention_mask"], mask), 1))
    steps = torch.arange(1, R + 1)
    assert torch.equal(tensors["position_ids"][:, P:], torch.tensor([7, 2, 5])[:, None] - 1 + steps)
    assert torch.equal(tensors["position_ids"][:, :P], batch.batch["position_ids"])
    assert tensors["responses"][mask == 0].eq(PAD).all()
    assert list(out.non_tensor_batch["uid"]) == ["u0", "u1", "u2"]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 3, "top_p": 0.8, "temperature": 1.3}])
def test_log_probs_equal_a_plain_forward_pass_over_the_whole_vocabulary(path, settings):
    rollout = make_rollout(path, **settings)
    batch = prompts([7, 1, 4, 2, 6]).repeat(6, interleave=True)
    out = rollout.generate_sequences(batch).batch
    assert out["rollout_log_probs"].dtype == torch.float32
    want = plain_log_probs(rollout.model, out, settings.get("temperature", 1.0))
    assert len(out["response_mask"].sum(1).unique()) > 1, "the case must hold responses of different lengths"
    torch.testing.assert_close(out["rollout_log_probs"], want, atol=1e-5, rtol=0)


def test_greedy_log_probs_are_those_at_temperature_one(path):
    rollout = make_rollout(path)
    out = rollout.generate_sequences(prompts([7, 1, 4], validate=True)).batch
    torch.testing.assert_close(out["rollout_log_probs"], plain_log_probs(rollout.model, out), atol=1e-5, rtol=0)


def first_token_frequencies(rollout, count=4000, **meta):
    out = rollout.generate_sequences(one_prompt_many_times(count, **meta)).batch
    return torch.bincount(out["responses"][:, 0], minlength=VOCAB) / count


def first_token_probs(rollout, temperature=1.0):
    ids = one_prompt_many_times(1).batch["input_ids"][:, -4:]
    with torch.no_grad():
        return (rollout.model(input_ids=ids).logits[0, -1] / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax_and_no_setting_leaks_from_the_model_folder(path, temperature):
    """The folder's generation_config says top_k=1, top_p=0.5, temperature=0.3; none of it may be seen."""
    rollout = make_rollout(path, response_length=1, temperature=temperature, max_num_seqs=None)
    probs = first_token_probs(rollout, temperature)
    # The expected total variation distance of n draws from V outcomes is about 0.4 * sqrt(V / n) = 0.03.
    distance = (first_token_frequencies(rollout) - probs).abs().sum() / 2
    assert distance < 0.04
    assert (probs - first_token_probs(rollout, 0.3)).abs().sum() / 2 > 0.1, "the case must tell temperatures apart"


def test_top_k_and_top_p_keep_exactly_the_right_tokens(path):
    rollout = make_rollout(path, response_length=1, max_num_seqs=None)
    probs = first_token_probs(rollout)
    order = probs.argsort(descending=True)
    drawn = {name: first_token_frequencies(rollout, **{name: value}) for name, value in (("top_k", 3), ("top_p", 0.6))}
    assert set(drawn["top_k"].nonzero().flatten().tolist()) == set(order[:3].tolist())
    want = probs[order[:3]] / probs[order[:3]].sum()
    torch.testing.assert_close(drawn["top_k"][order[:3]], want, atol=0.03, rtol=0)
    num_kept = int((probs[order].cumsum(0) < 0.6).sum()) + 1
    assert set(drawn["top_p"].nonzero().flatten().tolist()) == set(order[:num_kept].tolist())
    assert len(first_token_frequencies(rollout, top_k=0).nonzero()) > num_kept


def test_request_overrides_config_and_validation_is_greedy(path):
    rollout = make_rollout(path, response_length=1, max_num_seqs=None)
    best = int(first_token_probs(rollout).argmax())
    for meta in ({"validate": True}, {"do_sample": False}, {"temperature": 0}, {"top_k": 1}):
        assert first_token_frequencies(rollout, count=50, **meta)[best] == 1, meta
    assert first_token_frequencies(rollout, count=50, validate=True, do_sample=True, temperature=1.0)[best] < 1


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_mask_ends_at_the_first_eos_also_when_it_is_the_pad_id(path, pad):
    rollout = make_rollout(path)
    batch = prompts([7, 2, 5, 3])
    batch.meta_info.update(pad_token_id=pad)
    # Row 0 ends at once, row 1 at the third token, row 2 at the last, row 3 never. Finished rows leave this small
    # batch at once, always from the front, so the last rows of the plan are those still there.
    plan = torch.tensor([[1, 9, 9, 9, 9, 9], [5, 5, 1, 9, 9, 9], [6, 6, 6, 6, 6, 1], [7, 7, 7, 7, 7, 7]])
    force_token(rollout, lambda step, num_rows: plan[-num_rows:, step].tolist())
    out = rollout.generate_sequences(batch).batch
    assert out["response_mask"].tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1] * 6, [1] * 6]
    assert out["responses"][0].tolist() == [EOS, *[pad] * 5]
    assert out["responses"][1].tolist() == [5, 5, EOS, *[pad] * 3]
    assert out["responses"][2:].tolist() == plan[2:].tolist()
    assert out["rollout_log_probs"][out["response_mask"] == 0].eq(0).all()


def test_all_rows_ending_at_once_stops_after_one_step(path):
    rollout = make_rollout(path)
    steps = force_token(rollout, lambda step, rows: [EOS] * rows)
    out = rollout.generate_sequences(prompts([7, 2, 5])).batch
    assert out["response_mask"].tolist() == [[1, 0, 0, 0, 0, 0]] * 3
    assert out["responses"].tolist() == [[EOS, 0, 0, 0, 0, 0]] * 3
    assert len(steps) == 1


def test_any_of_several_eos_ids_ends_a_response(path):
    rollout = make_rollout(path)
    force_token(rollout, lambda step, rows: [5, 8] if rows == 2 else [9])
    batch = prompts([3, 4])
    batch.meta_info.update(eos_token_id=[8, 9])
    out = rollout.generate_sequences(batch).batch
    assert out["responses"].tolist() == [[5, 9, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0]]


def test_ids_come_from_the_model_when_the_request_has_none(path):
    rollout = make_rollout(path)
    force_token(rollout, lambda step, rows: [EOS] * rows)
    batch = prompts([3, 4])
    batch.meta_info = {}
    assert rollout.generate_sequences(batch).batch["response_mask"].sum(1).tolist() == [1, 1]


def test_runs_repeat_and_ranks_steps_and_calls_differ(path, monkeypatch):
    def draw(rollout, **meta):
        return rollout.generate_sequences(one_prompt_many_times(16, **meta)).batch["responses"].tolist()

    first = make_rollout(path)
    draws = {
        "step 1": draw(first, global_steps=1),
        "step 1, second call": draw(first, global_steps=1),
        "step 1, validation": draw(first, global_steps=1, validate=True, do_sample=True, temperature=1.0),
        "step 2": draw(first, global_steps=2),
    }
    resumed = make_rollout(path)
    draw(resumed, global_steps=1, validate=True, do_sample=True, temperature=1.0)
    assert draw(resumed, global_steps=2) == draws["step 2"]
    monkeypatch.setenv("RANK", "1")
    for step in (0, 1, 2):
        draws[f"rank 1, step {step}"] = draw(make_rollout(path), global_steps=step)
    unnumbered = make_rollout(path)
    draws["no step, first"], draws["no step, second"] = draw(unnumbered), draw(unnumbered)
    del draws["no step, first"]  # counts as step 0
    assert len({str(value) for value in draws.values()}) == len(draws)


def test_global_random_state_is_left_alone(path):
    rollout = make_rollout(path)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    rollout.generate_sequences(prompts([3, 4]))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rows_do_not_depend_on_their_neighbours(path):
    """Greedy responses are the same alone, in small pieces, with wider padding and among copies of other prompts."""
    lengths = [6, 1, 4, 2, 6, 5]
    rollout = make_rollout(path)
    together = rollout.generate_sequences(prompts(lengths, do_sample=False)).batch
    pieces = make_rollout(path, max_num_seqs=4).generate_sequences(prompts(lengths, do_sample=False)).batch
    repeated = rollout.generate_sequences(prompts(lengths, do_sample=False).repeat(3, interleave=True)).batch
    for row in range(len(lengths)):
        alone = rollout.generate_sequences(prompts(lengths, do_sample=False)[[row]]).batch
        assert torch.equal(alone["responses"][0], together["responses"][row])
    assert torch.equal(pieces["responses"], together["responses"])
    assert torch.equal(repeated["responses"], together["responses"].repeat_interleave(3, 0))
    torch.testing.assert_close(pieces["rollout_log_probs"], together["rollout_log_probs"], atol=1e-5, rtol=0)


def test_copies_of_a_prompt_are_prefilled_once(path):
    rollout = make_rollout(path)
    steps = force_token(rollout, lambda step, rows: [5] * rows)
    rollout.generate_sequences(prompts([7, 2, 5]).repeat(8, interleave=True))
    assert steps == [3] + [24] * (R - 1)


@pytest.mark.parametrize("through_one_buffer", [True, False])
def test_weights_pushed_twice_equal_the_source_bit_for_bit(path, tmp_path, through_one_buffer):
    rollout = make_rollout(path)
    for seed in (5, 6):
        folder = save_model(tmp_path / str(seed), seed=seed)
        tensors = load_file(f"{folder}/model.safetensors")
        buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))

        def stream(tensors=tensors, buffer=buffer):
            for name, tensor in tensors.items():
                yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor) if through_one_buffer else tensor

        rollout.update_weights(stream())
        source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, tensor in source.state_dict().items():
            assert torch.equal(rollout.model.state_dict()[name], tensor), name
        want = HFRollout(rollout.config, HFModelConfig(path=folder)).generate_sequences(prompts([4, 2], global_steps=9))
        got = rollout.generate_sequences(prompts([4, 2], global_steps=9))
        assert torch.equal(got.batch["responses"], want.batch["responses"])
        assert torch.equal(got.batch["rollout_log_probs"], want.batch["rollout_log_probs"])
        rollout.generate_sequences(prompts([4, 2], global_steps=8))


def test_missing_weight_is_named(path):
    rollout = make_rollout(path)
    tensors = load_file(f"{path}/model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight"):
        rollout.update_weights(tensors.items())


def test_release_and_resume_keep_the_weights_and_the_loader(path):
    rollout = make_rollout(path)
    before = {name: tensor.clone() for name, tensor in rollout.model.state_dict().items()}
    rollout.release()
    rollout.resume(tags=["weights"])
    rollout.update_weights(load_file(f"{path}/model.safetensors").items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.model.state_dict().items())


def test_release_and_resume_move_the_model_on_an_accelerator_and_nothing_on_a_cpu(path, monkeypatch):
    rollout, moves = make_rollout(path), []
    monkeypatch.setattr(rollout.model, "to", moves.append)
    rollout.release()
    assert moves == []
    rollout.device = "cuda"
    rollout.release()
    rollout.resume()
    assert moves == ["cpu", "cuda"]


def test_an_empty_batch_gives_an_empty_batch(path):
    out = make_rollout(path).generate_sequences(prompts([3, 4])[:0])
    assert out.batch["responses"].shape == (0, R) and out.batch["input_ids"].shape == (0, P + R)


def test_bad_requests_are_named(path):
    rollout = make_rollout(path)
    with pytest.raises(ValueError, match=r"prompts without a single token in rows \[1\]"):
        rollout.generate_sequences(prompts([3, 0]))
    for name, value in (("temperature", -1.0), ("top_p", 0.0), ("top_k", -2)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            rollout.generate_sequences(prompts([3], **{name: value}))
    with pytest.raises(ValueError, match="rollout.response_length=60 is more than the model's 64 positions"):
        make_rollout(path, response_length=60)


def test_rollout_names():
    assert get_rollout_class("hf", "async") is HFRollout
    with pytest.raises(ValueError, match=r"rollout.name='vlm' is not known; known: hf"):
        get_rollout_class("vlm", "sync")
    with pytest.raises(ValueError, match=r"rollout.mode='later' is not known; known: sync, async"):
        get_rollout_class("hf", "later")
