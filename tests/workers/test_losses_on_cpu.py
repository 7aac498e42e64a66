# SPDX-License-Identifier: Apache-2.0
"""ppo_loss and sft_loss on jagged batches: against plain loops over tokens, and independent of how the batch is cut."""

import functools
import math

import pytest
import torch

from verl.algos.aggregation import LOSS_AGG_MODES
from verl.utils import tensordict_utils as tu
from verl.utils.jagged import make_jagged, nested_tensor_from_tensor_list
from verl.utils.metric import merge_metrics
from verl.workers.config import McoreActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl.workers.config.names import POLICY_LOSSES
from verl.workers.utils.losses import loss_token_count, ppo_loss, sft_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

NAN = float("nan")
VOCAB, PROMPT, RESPONSE = 11, 4, 6
PROMPT_LENS = [4, 1, 2, 3, 4, 1, 3, 2]
RESPONSE_LENS = [6, 1, 3, 2, 5, 6, 4, 1]
FULLY_MASKED_ROW, ROWS = 5, 8
TOLERANCE = {"rtol": 1e-14, "atol": 1e-15}


def actor(**changes):
    settings = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.3,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "max_response_length": RESPONSE,
        "policy_loss": PolicyLossConfig(loss_mode="vanilla"),
        "entropy_coeff": 0.01,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
    }
    return McoreActorConfig(**(settings | changes))


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rl_batch(**columns):
    """Jagged RL batch without metadata. Row 5 is fully masked, row 0 has an untrained token in the middle."""
    prompt_mask = torch.arange(PROMPT) >= PROMPT - torch.tensor(PROMPT_LENS)[:, None]
    answer_mask = torch.arange(RESPONSE) < torch.tensor(RESPONSE_LENS)[:, None]
    attention_mask = torch.cat([prompt_mask, answer_mask], 1).long()
    response_mask = answer_mask.long()
    response_mask[FULLY_MASKED_ROW] = 0
    response_mask[0, 2] = 0
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, VOCAB, (ROWS, PROMPT + RESPONSE), generator=generator)
    padded = {
        "prompts": input_ids[:, :PROMPT],
        "responses": input_ids[:, PROMPT:],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "old_log_probs": 0.5 * random(ROWS, RESPONSE, seed=4) - 1.0,
        "ref_log_prob": 0.5 * random(ROWS, RESPONSE, seed=5) - 1.0,
        "advantages": random(ROWS, RESPONSE, seed=6),
    }
    return left_right_2_no_padding(tu.get_tensordict(padded | columns))


def sft_batch():
    generator = torch.Generator().manual_seed(7)
    lengths = [5, 1, 7, 2, 3, 6, 4, 9]
    input_ids = nested_tensor_from_tensor_list([torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths])
    masks = torch.rand(sum(lengths), generator=generator) > 0.4
    masks[0] = True  # a first token: predicted by nobody, so it must not count
    masks[5] = True
    return tu.get_tensordict({"input_ids": input_ids, "loss_mask": make_jagged(masks.long(), input_ids.offsets())})


def parameters():
    return (0.3 * random(VOCAB, VOCAB, seed=1)).requires_grad_()


def model(weights, data):
    """A bigram model: the log-probability of the next token and the entropy at each position, jagged."""
    ids, offsets = data["input_ids"].values(), data["input_ids"].offsets()
    log_probs = weights.log_softmax(-1)[ids]
    target = torch.cat([ids[1:], ids[:1]])  # the last position of a sequence looks into the next one: meaningless
    picked = log_probs.gather(1, target[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return {"log_probs": make_jagged(picked, offsets), "entropy": make_jagged(entropy, offsets)}


def step(loss_fn, batch, dp_size=1, num_micro_batches=1):
    """One optimiser step the way an engine does it: (loss, gradient, metrics)."""
    weights = parameters()
    tu.assign_non_tensor(
        batch, dp_size=dp_size, batch_num_tokens=loss_token_count(batch).item(), global_batch_size=len(batch)
    )
    losses, parts = [], []
    for micro_batch in tu.chunk_tensordict(batch, dp_size * num_micro_batches):
        loss, metrics = loss_fn(model_output=model(weights, micro_batch), data=micro_batch, dp_group=None)
        (loss / dp_size).backward()  # gradients are averaged over the ranks
        assert not any(isinstance(m.total, torch.Tensor) and m.total.requires_grad for m in metrics.values())
        losses.append(loss.detach() / dp_size)
        parts.append(metrics)
    assert all(part.keys() == parts[0].keys() for part in parts)
    return torch.stack(losses).sum(), weights.grad, {k: m.value for k, m in merge_metrics(parts).items()}


def assert_same_step(result, expected):
    for one, other in zip(result[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    assert result[2] == pytest.approx(expected[2], rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("dp_size, num_micro_batches", [(1, 2), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_ppo_loss_does_not_depend_on_the_split(mode, dp_size, num_micro_batches):
    loss_fn = functools.partial(ppo_loss, config=actor(loss_agg_mode=mode))
    whole = step(loss_fn, rl_batch())
    assert whole[1].abs().sum() > 0 and set(whole[2]) == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/kl_loss",
        "actor/kl_coef",
    }
    assert_same_step(step(loss_fn, rl_batch(), dp_size, num_micro_batches), whole)


# clip_cov and kl_cov choose their tokens inside a micro-batch: tests/algos/test_policy_losses_on_cpu.py.
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name not in ("clip_cov", "kl_cov")])
@pytest.mark.parametrize("dp_size, num_micro_batches", [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_every_policy_loss_is_cut_without_a_trace(name, dp_size, num_micro_batches):
    rules = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.5, bypass_mode=True)
    policy_loss = PolicyLossConfig(loss_mode=name, dro_beta=0.2, rollout_correction=rules)
    loss_fn = functools.partial(ppo_loss, config=actor(policy_loss=policy_loss))
    weights = random(ROWS, RESPONSE, seed=8).sigmoid()
    whole = step(loss_fn, rl_batch(rollout_is_weights=weights))
    assert whole[1].abs().sum() > 0
    assert_same_step(step(loss_fn, rl_batch(rollout_is_weights=weights), dp_size, num_micro_batches), whole)


@pytest.mark.parametrize("dp_size, num_micro_batches", [(1, 2), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_sft_loss_does_not_depend_on_the_split(dp_size, num_micro_batches):
    loss_fn = functools.partial(sft_loss, config=None)
    whole = step(loss_fn, sft_batch())
    assert whole[2] == {"sft/loss": pytest.approx(whole[0].item(), rel=1e-15)}
    assert_same_step(step(loss_fn, sft_batch(), dp_size, num_micro_batches), whole)


def plain_ppo(weights, batch, config):
    """Loss, policy part, entropy and KL (token means) by a loop over the trained tokens of each sequence."""
    policy, entropy, kl, count = 0.0, 0.0, 0.0, 0
    for row in range(ROWS):
        ids = batch["input_ids"][row]
        for t in range(RESPONSE):
            if not batch["response_mask"][row, t]:
                continue
            here = PROMPT_LENS[row] + t - 1
            all_log_probs = weights[ids[here]].log_softmax(-1)
            log_prob, advantage = all_log_probs[ids[here + 1]], batch["advantages"][row, t]
            ratio = (log_prob - batch["old_log_probs"][row, t]).exp()
            loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
            policy = policy + (torch.min(loss, -3.0 * advantage) if advantage < 0 else loss)
            entropy = entropy - (all_log_probs.exp() * all_log_probs).sum()
            back = batch["ref_log_prob"][row, t] - log_prob
            kl = kl + back.exp() - 1 - back
            count += 1
    policy, entropy, kl = policy / count, entropy / count, kl / count
    return policy - config.entropy_coeff * entropy + config.kl_loss_coef * kl, policy, entropy, kl


def test_ppo_loss_equals_a_loop_over_the_tokens():
    config, batch, weights = actor(), rl_batch(), parameters()
    expected, policy, entropy, kl = plain_ppo(weights, batch, config)
    expected.backward()
    loss, gradient, metrics = step(functools.partial(ppo_loss, config=config), batch)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, weights.grad, rtol=1e-12, atol=1e-15)
    assert metrics["actor/pg_loss"] == pytest.approx(policy.item(), rel=1e-13)
    assert metrics["actor/entropy"] == pytest.approx(entropy.item(), rel=1e-13)
    assert metrics["actor/kl_loss"] == pytest.approx(kl.item(), rel=1e-12)
    assert metrics["actor/kl_coef"] == 0.1


def test_sft_loss_equals_a_loop_over_the_tokens():
    batch, weights = sft_batch(), parameters()
    losses = []
    for ids, mask in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True):
        losses += [-weights[ids[t]].log_softmax(-1)[ids[t + 1]] for t in range(len(ids) - 1) if mask[t + 1]]
    expected = torch.stack(losses).mean()
    expected.backward()
    assert loss_token_count(batch).item() == len(losses) < batch["loss_mask"].values().sum()
    loss, gradient, _ = step(functools.partial(sft_loss, config=None), batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, weights.grad, rtol=1e-12, atol=1e-15)


def test_sft_and_ppo_count_the_same_tokens_of_one_batch():
    batch = rl_batch()
    counted = loss_token_count(batch)
    assert counted.dtype == torch.int64 and counted.item() == sum(RESPONSE_LENS) - RESPONSE_LENS[FULLY_MASKED_ROW] - 1
    del batch["response_mask"]
    assert loss_token_count(batch).item() == counted.item()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kl_type", ["low_var_kl", "k2+"])
def test_nan_at_untrained_positions_changes_nothing(mode, kl_type):
    def run(filler):
        batch, weights = rl_batch(), parameters()
        hidden = batch["response_mask"] == 0
        weighted = torch.ones(ROWS, RESPONSE, dtype=torch.float64)
        for column in (batch["old_log_probs"], batch["ref_log_prob"], batch["advantages"], weighted):
            column[hidden] = filler
        batch["rollout_is_weights"] = weighted
        output = model(weights, batch)
        # What the network says at positions whose prediction is not trained: prompts, masked rows, last positions.
        trained = torch.cat([batch["loss_mask"].values()[1:], torch.zeros(1)]).bool()
        trained[batch["loss_mask"].offsets()[1:] - 1] = False
        leaves = {}
        for key, value in output.items():
            leaf = torch.where(trained, value.values().detach(), filler).requires_grad_()
            leaves[key] = leaf
            output[key] = make_jagged(leaf, batch["input_ids"].offsets())
        loss, metrics = ppo_loss(actor(loss_agg_mode=mode, kl_loss_type=kl_type), output, batch)
        loss.backward()
        gradients = [leaf.grad for leaf in leaves.values()]
        return loss.item(), {key: metric.value for key, metric in metrics.items()}, gradients

    loss, metrics, gradients = run(0.0)
    dirty_loss, dirty_metrics, dirty_gradients = run(NAN)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert dirty_loss == loss and dirty_metrics == metrics
    assert all(torch.equal(dirty, clean) for dirty, clean in zip(dirty_gradients, gradients, strict=True))


def test_a_micro_batch_without_a_trained_token_does_nothing_and_keeps_the_keys():
    whole = rl_batch()
    empty = tu.index_select_tensor_dict(whole, [FULLY_MASKED_ROW])
    tu.assign_non_tensor(empty, dp_size=2, batch_num_tokens=21, global_batch_size=8)
    weights = parameters()
    loss, metrics = ppo_loss(actor(), model(weights, empty), empty)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(weights.grad, torch.zeros_like(weights))
    assert metrics["actor/pg_loss"].value == 0.0 and math.isnan(metrics["actor/ppo_kl"].value)
    assert metrics.keys() == ppo_loss(actor(), model(weights, whole), whole)[1].keys()


def test_sft_batch_without_a_target_does_nothing():
    batch = sft_batch()
    batch["loss_mask"] = make_jagged(torch.zeros_like(batch["loss_mask"].values()), batch["input_ids"].offsets())
    loss, gradient, _ = step(functools.partial(sft_loss, config=None), batch, num_micro_batches=2)
    assert loss.item() == 0.0 and not gradient.any()


def test_on_policy_ppo_kl_and_clip_fraction_are_zero():
    batch, weights = rl_batch(), parameters()
    output = model(weights, batch)
    batch["old_log_probs"] = no_padding_2_padding(output["log_probs"], batch).detach()
    _, metrics = ppo_loss(actor(), output, batch)
    assert metrics["actor/ppo_kl"].value == metrics["actor/pg_clipfrac"].value == 0.0


def test_parts_that_are_off_leave_no_trace():
    batch, weights = rl_batch(), parameters()
    output = model(weights, batch)
    _, policy_only = ppo_loss(actor(entropy_coeff=0, use_kl_loss=False), {"log_probs": output["log_probs"]}, batch)
    assert not {"actor/entropy", "actor/kl_loss", "actor/kl_coef"} & policy_only.keys()
    loss, watched = ppo_loss(actor(entropy_coeff=0, use_kl_loss=False), output, batch)
    assert watched["actor/entropy"].value > 0
    assert loss.item() == watched["actor/pg_loss"].value


def test_rollout_weights_scale_the_policy_part_only():
    batch, weights = rl_batch(), parameters()
    output = model(weights, batch)
    _, plain = ppo_loss(actor(), output, batch)
    batch["rollout_is_weights"] = torch.full((ROWS, RESPONSE), 0.25, dtype=torch.float64)
    _, scaled = ppo_loss(actor(), output, batch)
    assert scaled["actor/pg_loss"].value == pytest.approx(0.25 * plain["actor/pg_loss"].value, rel=1e-14)
    assert scaled["actor/kl_loss"].value == plain["actor/kl_loss"].value


def test_missing_inputs_are_named():
    batch, weights = rl_batch(), parameters()
    output = model(weights, batch)
    with pytest.raises(ValueError, match="actor.entropy_coeff=0.01"):
        ppo_loss(actor(), {"log_probs": output["log_probs"]}, batch)
    del batch["ref_log_prob"]
    with pytest.raises(ValueError, match="use_kl_loss=True needs ref_log_prob"):
        ppo_loss(actor(), output, batch)
    tu.assign_non_tensor(batch, dp_size=2)
    with pytest.raises(ValueError, match="batch_num_tokens"):
        ppo_loss(actor(use_kl_loss=False), output, batch)
