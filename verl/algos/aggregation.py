# SPDX-License-Identifier: Apache-2.0
"""From a matrix of per-token losses to one number.

Every mode has the form ``sum_t w_t * l_t / D`` with D a count over the whole optimiser step. Because D is fixed before
the first micro-batch, the pieces of a step can be cut anywhere and simply added up.
"""

from __future__ import annotations

import torch

from verl.workers.config.names import LOSS_AGG_MODES, check_name

__all__ = ["LOSS_AGG_MODES", "agg_loss", "select"]

Count = int | float | torch.Tensor


def select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Keep `values` where `mask` is not 0 and put 0 elsewhere.

    A product with the mask would let a NaN or an infinity at a masked position through. The gradient at masked
    positions is an exact 0 too, provided that what stands *before* this call is finite there: so select the inputs of
    `exp` and its like, not only the result.

    Args:
        values: any floating shape, for instance [B, R].
        mask: same shape; bool, integer or float, read as zero / not zero.
    """
    return torch.where(mask != 0, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _at_least_one(count: Count) -> Count:
    # An empty step has a zero numerator as well: dividing by 1 leaves value 0, a graph and zero gradients. Tensors stay
    # tensors, so that the host never waits for the device.
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def _need(name: str, given: Count | None, other: Count | None, local: Count, mode: str, dp_size: int) -> Count:
    if given is not None:
        return given
    if dp_size > 1 or other is not None:
        raise ValueError(
            f"loss_agg_mode={mode!r} needs {name}, the count over the whole optimiser step, but it is None while the "
            f"batch is a piece of a larger one (dp_size={dp_size}); a count of the piece would make the loss depend on "
            "the split"
        )
    return local


def _horizon(loss_scale_factor: float | None, max_response_length: int | None) -> float:
    key, horizon = "loss_scale_factor", loss_scale_factor
    if horizon is None:
        key, horizon = "max_response_length", max_response_length
    if horizon is None:
        raise ValueError(
            "loss_agg_mode='seq-mean-token-sum-norm' divides by a constant: set actor.loss_scale_factor, or give "
            "max_response_length (data.max_response_length); the padded width is none, it changes from batch to batch"
        )
    if horizon <= 0:
        raise ValueError(f"{key}={horizon} must be positive for loss_agg_mode='seq-mean-token-sum-norm'")
    return horizon


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
    max_response_length: int | None = None,
    seq_num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce per-token losses to a scalar that is additive over micro-batches.

    With the counts of the whole step given, summing the results of all micro-batches of a rank and averaging over the
    `dp_size` data-parallel ranks yields the loss of the whole batch, wherever it was cut. Without them the tensors must
    be the whole batch.

    ======================== ================================ ==========================
    mode                     weight of a token                divisor
    ======================== ================================ ==========================
    token-mean               1                                loss tokens of the step
    token-sum                1                                1
    seq-mean-token-sum       1                                sequences of the step
    seq-mean-token-sum-norm  1 / horizon                      sequences of the step
    seq-mean-token-mean      1 / loss tokens of its sequence  sequences of the step
    ======================== ================================ ==========================

    A fully masked sequence counts as a sequence, with and without `global_batch_size`: four sequences of loss 1, one of
    them masked, have a sequence mean of 0.75. A step without any loss token gives 0 with a graph and zero gradients.

    Args:
        loss_mat: [B, R] loss of each token; what stands at masked positions is never read.
        loss_mask: [B, R], not 0 where the token counts.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        dp_size: data-parallel ranks over which gradients are averaged; the result is multiplied by it.
        batch_num_tokens: loss tokens of the whole step over all ranks and micro-batches.
        global_batch_size: sequences of the whole step, likewise.
        loss_scale_factor: horizon of seq-mean-token-sum-norm (the constant of Dr.GRPO, arXiv 2503.20783).
        max_response_length: the horizon when `loss_scale_factor` is None.
        seq_num_tokens: [B] loss tokens of each full sequence, for seq-mean-token-mean when the rows hold only a part of
            their sequence; by default the rows are full and are counted.

    Returns:
        0-d tensor of loss_mat's dtype.

    Raises:
        ValueError: unknown mode, a missing count of the step, or a missing horizon.
    """
    check_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    total = select(loss_mat, loss_mask)
    if loss_agg_mode == "token-mean":
        divisor = _need(
            "batch_num_tokens", batch_num_tokens, global_batch_size, (loss_mask != 0).sum(), loss_agg_mode, dp_size
        )
        return total.sum() / _at_least_one(divisor) * dp_size
    if loss_agg_mode == "token-sum":
        return total.sum() * dp_size
    sequences = _need(
        "global_batch_size", global_batch_size, batch_num_tokens, loss_mat.shape[0], loss_agg_mode, dp_size
    )
    per_sequence = total.sum(dim=-1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / _horizon(loss_scale_factor, max_response_length)
    elif loss_agg_mode == "seq-mean-token-mean":
        tokens = (loss_mask != 0).sum(dim=-1) if seq_num_tokens is None else seq_num_tokens
        per_sequence = per_sequence / _at_least_one(tokens)
    return per_sequence.sum() / _at_least_one(sequences) * dp_size
