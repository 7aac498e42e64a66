# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of a split vocabulary against torch's own distribution."""

import pytest
import torch
import torch.distributed as dist

from tests.utils_dist import run_world
from verl.utils.megatron import tensor_parallel
from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_and_entropy, vocab_parallel_sum_pi_squared

VOCAB, PADDED = 11, 14


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, PADDED, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, VOCAB, (9,), generator=generator)
    weights = torch.randn(2, 9, generator=generator, dtype=torch.float64).to(dtype)
    return logits, labels, weights[0], weights[1]


def reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits[:, :VOCAB] / temperature)
    return distribution.log_prob(labels), distribution.entropy()


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 100])
@pytest.mark.parametrize("overwrite", [False, True])
def test_values_and_gradient_match_torch(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, overwrite: bool) -> None:
    monkeypatch.setattr(tensor_parallel, "_CHUNK_ELEMENTS", rows_per_chunk * PADDED)
    logits, labels, w_log_prob, w_entropy = example(torch.float64)
    expected_input = logits.clone().requires_grad_()
    expected = reference(expected_input, labels, 0.7)
    (expected[0] * w_log_prob + expected[1] * w_entropy).sum().backward()
    leaf = logits.clone().requires_grad_()
    got = vocab_parallel_log_probs_and_entropy(
        leaf * 1.0,
        labels,
        temperature=0.7,
        vocab_size=VOCAB,
        calculate_entropy=True,
        overwrite_logits=overwrite,
    )
    (got[0] * w_log_prob + got[1] * w_entropy).sum().backward()
    assert max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) < 1e-14
    assert (leaf.grad - expected_input.grad).abs().max() < 1e-14
    assert (leaf.grad[:, VOCAB:] == 0).all()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, labels, _, _ = example(torch.bfloat16)
    got = vocab_parallel_log_probs_and_entropy(logits, labels, vocab_size=VOCAB)[0]
    assert got.dtype == torch.float32
    assert torch.allclose(got, reference(logits.float(), labels, 1.0)[0], atol=1e-6)


def test_float32_sums_match_float64_to_rounding() -> None:
    logits, labels, _, _ = example(torch.float32)
    got = vocab_parallel_log_probs_and_entropy(logits, labels, vocab_size=VOCAB, calculate_entropy=True)
    expected = reference(logits.double(), labels, 1.0)
    assert max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) < 2e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sum_of_squared_probabilities(temperature: float) -> None:
    logits, labels, _, _ = example(torch.float64)
    logits[0, :VOCAB] = torch.arange(VOCAB) * 40.0  # one token holds all, and the label is another
    log_probs = reference(logits, labels, temperature)[0]
    got = vocab_parallel_sum_pi_squared(
        logits.requires_grad_(), labels, log_probs, temperature=temperature, vocab_size=VOCAB
    )
    expected = (logits[:, :VOCAB] / temperature).softmax(-1).square().sum(-1)
    assert not got.requires_grad
    torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=0)


def split_vocabulary(rank: int, world_size: int) -> tuple[float, float]:
    logits, labels, w_log_prob, w_entropy = example(torch.float64)
    whole = logits.clone().requires_grad_()
    expected = reference(whole, labels, 1.3)
    (expected[0] * w_log_prob + expected[1] * w_entropy).sum().backward()
    width = PADDED // world_size
    own = slice(rank * width, (rank + 1) * width)
    leaf = logits[:, own].clone().requires_grad_()
    got = vocab_parallel_log_probs_and_entropy(
        leaf, labels, temperature=1.3, group=dist.group.WORLD, vocab_size=VOCAB, calculate_entropy=True
    )
    (got[0] * w_log_prob + got[1] * w_entropy).sum().backward()
    settings = {"temperature": 1.3, "group": dist.group.WORLD, "vocab_size": VOCAB}
    squares = vocab_parallel_sum_pi_squared(leaf.detach(), labels, got[0].detach(), **settings)
    right = (logits[:, :VOCAB] / 1.3).softmax(-1).square().sum(-1)
    got, expected = (*got, squares), (*expected, right)
    value_error = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    return value_error, (leaf.grad - whole.grad[:, own]).abs().max().item()


@pytest.mark.gloo
def test_two_ranks_with_half_a_vocabulary_each() -> None:
    errors = run_world(split_vocabulary, 2)
    assert max(error for pair in errors for error in pair) < 1e-14


def test_the_entropy_alone_matches_torch() -> None:
    logits, labels, *_ = example(torch.float64)
    got = tensor_parallel.vocab_parallel_entropy(logits, temperature=0.7, vocab_size=VOCAB)
    assert torch.allclose(got, reference(logits, labels, 0.7)[1], atol=1e-14)
