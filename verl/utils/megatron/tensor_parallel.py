# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy over a vocabulary that is split across tensor-parallel ranks.

Both come out of one pass over the logits, in float32 (float64 logits stay float64), a chunk of tokens at a time, so
that no second tensor of the logits' size is held; two collectives of the size of the token count, however many chunks.
The gradient is written over the logits where the caller allows it.
"""

from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "vocab_parallel_entropy",
    "vocab_parallel_log_probs",
    "vocab_parallel_log_probs_and_entropy",
    "vocab_parallel_sum_pi_squared",
    "vocab_parallel_token_columns",
]

_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32 per temporary


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        overwrite: bool,
        need_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = group.size() if group is not None else 1
        num_tokens, width = logits.shape
        first = group.rank() * width if group is not None else 0
        valid = width if vocab_size is None else min(max(vocab_size - first, 0), width)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        local = labels - first
        owned = (local >= 0) & (local < valid)
        local = torch.where(owned, local, 0)
        # rows: maximum, sum of exp(x - maximum), sum of exp(x - maximum) * (x - maximum), the label's own logit
        stats = torch.zeros((4, num_tokens), dtype=dtype, device=logits.device)
        stats[0] = torch.finfo(dtype).min
        rows = max(1, _CHUNK_ELEMENTS // width)
        for start in range(0, num_tokens if valid else 0, rows):
            part = slice(start, start + rows)
            scaled = logits[part, :valid].to(dtype) / temperature
            stats[3, part] = scaled.gather(1, local[part, None])[:, 0]
            stats[0, part] = scaled.amax(dim=1)
            scaled -= stats[0, part, None]
            weight = scaled.exp()
            stats[1, part] = weight.sum(dim=1)
            if need_entropy:
                stats[2, part] = weight.mul_(scaled).sum(dim=1)
        stats[3].masked_fill_(~owned, 0.0)
        if size > 1:
            own_max = stats[0].clone()
            dist.all_reduce(stats[0], op=dist.ReduceOp.MAX, group=group)
            shift = own_max - stats[0]
            factor = shift.exp()
            stats[2] = factor * torch.where(factor > 0, stats[2] + shift * stats[1], 0.0)
            stats[1] *= factor
            dist.all_reduce(stats[1:], group=group)
        log_norm = stats[1].log()
        log_probs = stats[3] - stats[0] - log_norm
        entropy = log_norm - stats[2] / stats[1] if need_entropy else log_norm.new_zeros(0)
        ctx.save_for_backward(stats[0] + log_norm, entropy, local, owned, *([] if overwrite else [logits]))
        # Kept aside on purpose: the gradient goes into this storage, which autograd's version check would refuse.
        ctx.logits = logits if overwrite else None
        ctx.settings = (temperature, valid, overwrite, need_entropy, rows, dtype)
        if not need_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple:
        normaliser, entropy, local, owned, *kept = ctx.saved_tensors
        temperature, valid, overwrite, need_entropy, rows, dtype = ctx.settings
        logits = ctx.logits if overwrite else kept[0]
        ctx.logits = None
        assert logits is not None, "the logits were overwritten by an earlier backward"
        grad = logits if overwrite else torch.empty_like(logits)
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            log_p = logits[part, :valid].to(dtype) / temperature - normaliser[part, None]
            p = log_p.exp()
            out = p * -grad_log_probs[part, None]
            if need_entropy:
                out -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            if valid:
                out.scatter_add_(1, local[part, None], (grad_log_probs[part] * owned[part])[:, None])
            grad[part, :valid] = out / temperature
            grad[part, valid:] = 0
        return grad, None, None, None, None, None, None


def vocab_parallel_log_probs_and_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    calculate_entropy: bool = False,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each label, and the entropy of each distribution, at the given temperature.

    Args:
        logits: [t, vocab / tp], this rank's slice of the vocabulary.
        labels: [t] int64 token ids of the whole vocabulary.
        temperature: the logits are divided by it.
        group: tensor-parallel group; None for an unsplit vocabulary.
        vocab_size: true size; columns beyond it pad the vocabulary and carry no probability.
        calculate_entropy: whether the second value is wanted.
        overwrite_logits: write the gradient over ``logits`` in backward; they must not be used by anything else.

    Returns:
        log-probs [t] in nats and entropy [t] in nats or None; float32, or float64 for float64 logits.
    """
    log_probs, entropy = _LogProbsAndEntropy.apply(
        logits, labels, temperature, group, vocab_size, overwrite_logits, calculate_entropy
    )
    return log_probs, entropy if calculate_entropy else None


def vocab_parallel_log_probs(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The first value of :func:`vocab_parallel_log_probs_and_entropy`."""
    return vocab_parallel_log_probs_and_entropy(logits, labels, **kwargs)[0]


def vocab_parallel_sum_pi_squared(
    logits: torch.Tensor, labels: torch.Tensor, log_probs: torch.Tensor, *, temperature: float = 1.0, **kwargs: Any
) -> torch.Tensor:
    """Sum over the vocabulary of the squared probabilities, [t], without a graph.

    For any token, squaring its probability is what halving the temperature does, up to the norm: the norm is
    pi^2 / (the probability at half the temperature). So this is one more pass for log-probs.

    Args:
        logits: [t, vocab / tp].
        labels: [t], any tokens, whose ``log_probs`` [t] at ``temperature`` are known.
        temperature: of the distribution whose probabilities are squared.
        **kwargs: ``group`` and ``vocab_size`` as in the combined function.
    """
    with torch.no_grad():
        squared = vocab_parallel_log_probs(logits, labels, temperature=temperature / 2, **kwargs)
        return (2 * log_probs - squared).exp()


def vocab_parallel_token_columns(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    calculate_entropy: bool = False,
    calculate_sum_pi_squared: bool = False,
    overwrite_logits: bool = False,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """``log_probs`` and, if asked for, ``entropy`` and ``sum_pi_squared`` (without a graph), [t] each.

    The other arguments are those of `vocab_parallel_log_probs_and_entropy`.
    """
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        logits, labels, calculate_entropy=calculate_entropy, overwrite_logits=overwrite_logits, **settings
    )
    columns = {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
    if calculate_sum_pi_squared:
        columns["sum_pi_squared"] = vocab_parallel_sum_pi_squared(logits, labels, log_probs.detach(), **settings)
    return columns


def vocab_parallel_entropy(logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Entropy [t] in nats of each row of ``logits`` [t, vocab / tp]; keywords as the combined function's."""
    labels = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    entropy = vocab_parallel_log_probs_and_entropy(logits, labels, calculate_entropy=True, **kwargs)[1]
    assert entropy is not None  # it was asked for
    return entropy
