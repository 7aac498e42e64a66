# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction whose gradient does not depend on the layout (docs/objective.md, sections 2 to 4).

Megatron-core 0.19.2 divides the loss of each depth by the valid targets that one rank's share of one micro-batch
happens to hold, and shifts tokens, mask and padding mask after the split over context parallelism, one message per
sequence. Here everything is shifted before the split, inside each sequence, and the engine hands in each depth's weight
with the count of the whole step. The loss mask says of every token whether it is itself a trained target, so prompt and
padding never are.

The output head is a constant for this loss: multi-token prediction trains its own layers and, unless detached, what
feeds them.

:func:`apply` puts three functions in place of Megatron's, :func:`remove` puts Megatron's back. What a micro-batch needs
travels on its ``input_ids`` tensor (:func:`prepare`). Without it, in evaluation for instance, the layers do not run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl.models.mcore.packing import PackLayout, shift_left_within_sequences
from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs
from verl.utils.metric import Metric

__all__ = [
    "MtpDepth",
    "apply",
    "count_targets",
    "legacy_mtp_loss",
    "loss_metrics",
    "prepare",
    "remove",
    "trained_targets",
]

_NEXT = "_mtp_next"  # attribute of input_ids: what the first, then each further depth works on


@dataclass(eq=False)
class MtpDepth:
    """One depth of one micro-batch, as one context-parallel rank holds it: [1, t_local], or [n, s_local] if dense.

    Attributes:
        input_ids: the token ``k`` places ahead, for depth ``k`` (1, 2, ...); 0 where the sequence has ended.
        position_ids: its position.
        padding_mask: True where there is no such token: the depth's router must not count these slots.
        targets: the token ``k + 1`` places ahead.
        valid: whether that token is a trained target.
        weight: factor of each valid target's cross entropy.
        detach_encoder: keep the gradient out of the main model: its hidden states and the embedding.
        vocab_size: true size of the vocabulary, without padding.
        loss_sum: written by the forward: the cross entropies' sum over this rank's valid targets, without gradient.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor
    weight: float
    detach_encoder: bool
    vocab_size: int | None
    loss_sum: torch.Tensor | None = None


def trained_targets(loss_mask: torch.Tensor, lengths: torch.Tensor, depth: int) -> torch.Tensor:
    """Bool [sum(lengths)]: where depth ``depth`` (from 1) predicts a trained target, in value order.

    Args:
        loss_mask: [sum(lengths)], not 0 where the token itself is a target, aligned with the tokens.
        lengths: [n] int64.
        depth: 1 for the first; it predicts the token ``depth + 1`` places ahead.
    """
    return shift_left_within_sequences(loss_mask != 0, lengths, depth + 1).bool()


def count_targets(loss_mask: torch.Tensor, lengths: torch.Tensor, depths: int) -> torch.Tensor:
    """[depths] int64: trained targets at each depth; arguments as :func:`trained_targets`."""
    counts = [trained_targets(loss_mask, lengths, depth).sum() for depth in range(1, depths + 1)]
    return torch.stack(counts) if counts else lengths.new_zeros(0)


def prepare(
    input_ids: torch.Tensor,
    *,
    tokens: torch.Tensor,
    loss_mask: torch.Tensor,
    layout: PackLayout,
    weights: Sequence[float],
    detach_encoder: bool = False,
    vocab_size: int | None = None,
) -> list[MtpDepth]:
    """Let the model that is called with this very ``input_ids`` tensor run and train its depths.

    Args:
        input_ids: the packed tokens of the micro-batch.
        tokens, loss_mask: [sum(lengths)] in value order.
        layout: where the tokens go on this rank.
        weights: factor of a target's cross entropy at each depth.
        detach_encoder, vocab_size: see :class:`MtpDepth`.

    Returns:
        The depths; the forward writes their ``loss_sum``.
    """
    lengths, made = layout.lengths, []
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=tokens.shape[0])
    positions = torch.arange(tokens.shape[0], device=tokens.device) - starts
    for number, weight in enumerate(weights, 1):
        exists = shift_left_within_sequences(torch.ones_like(tokens), lengths, number)
        depth = MtpDepth(
            input_ids=layout.pack(shift_left_within_sequences(tokens, lengths, number)),
            position_ids=layout.pack(shift_left_within_sequences(positions, lengths, number)),
            padding_mask=layout.pack(exists) == 0,
            targets=layout.pack(shift_left_within_sequences(tokens, lengths, number + 1)),
            valid=layout.pack(trained_targets(loss_mask, lengths, number)),
            weight=weight,
            detach_encoder=detach_encoder,
            vocab_size=vocab_size,
        )
        setattr(input_ids, _NEXT, depth)
        input_ids = depth.input_ids
        made.append(depth)
    return made


def loss_metrics(depths: list[MtpDepth], targets: Sequence[int]) -> dict[str, Metric]:
    """This rank's share of the mean cross entropy of each depth over the step's targets, and of the depths' mean.

    To be summed over micro-batches, data- and context-parallel ranks. 0 where the step has no target.
    """
    means = [depth.loss_sum / max(count, 1) for depth, count in zip(depths, targets, strict=True)]
    by_depth = {f"mtp/loss_{number}": Metric.sum(mean) for number, mean in enumerate(means, 1)}
    return {"mtp/loss": Metric.sum(sum(means) / len(means)), **by_depth}


def _depths_of(input_ids: torch.Tensor | None) -> list[MtpDepth]:
    found = []
    while (depth := getattr(input_ids, _NEXT, None)) is not None:
        found.append(depth)
        input_ids = depth.input_ids
    return found


# ------------------------------------------------------------------ Megatron's three functions
def _block_forward(self: Any, input_ids: torch.Tensor, position_ids: Any, hidden_states: torch.Tensor, *args, **kwargs):
    """``MultiTokenPredictionBlock.forward``: main and depths' hidden states, one after the other in dimension 0."""
    depths = _depths_of(input_ids)
    if not depths:
        return hidden_states
    entering = hidden_states.detach() if depths[0].detach_encoder else hidden_states
    stacked = _stock["forward"](self, input_ids, position_ids, entering, *args, **kwargs)
    if entering is hidden_states:
        return stacked
    return torch.cat([hidden_states, stacked[hidden_states.shape[0] :]])


def _get_embeddings(
    self: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    embedding: Any,
    hidden_states: torch.Tensor,
    packed_seq_params: Any = None,
    padding_mask: torch.Tensor | None = None,
) -> tuple:
    """``MultiTokenPredictionLayer._get_embeddings``: the tokens ahead come ready, nothing is sent or rolled."""
    from megatron.core.utils import make_viewless_tensor

    depth: MtpDepth = getattr(input_ids, _NEXT)
    if padding_mask is not None:
        padding_mask = depth.padding_mask
        if self.config.sequence_parallel:  # the hidden states are cut along the sequence
            padding_mask = padding_mask.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()].contiguous()
    decoder_input = embedding(input_ids=depth.input_ids, position_ids=depth.position_ids)
    if depth.detach_encoder:
        decoder_input = decoder_input.detach()
    hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
    if not hidden_states.requires_grad:
        hidden_states.requires_grad_(True)  # recomputation keeps a graph only for inputs with gradient
    return depth.input_ids, depth.position_ids, padding_mask, decoder_input, hidden_states


def _head_weight(output_layer: Any, output_weight: torch.Tensor | None) -> torch.Tensor:
    return (output_layer.weight if output_weight is None else output_weight).detach()


def _process_mtp_loss(
    hidden_states: torch.Tensor,
    labels: Any,
    loss_mask: Any,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Any,
    config: Any,
    cp_group: Any = None,
    tp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Any = None,
    scale_logits_fn: Any = None,
    input_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """``process_mtp_loss``: attaches the depths' losses to the main hidden states, which it returns."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    depths = _depths_of(input_ids)
    if not depths:
        return hidden_states
    main, *hidden = torch.chunk(hidden_states, 1 + len(depths), dim=0)
    head = _head_weight(output_layer, output_weight)
    for depth, states in zip(depths, hidden, strict=True):
        logits, _ = output_layer(states, weight=head, runtime_gather_output=runtime_gather_output)
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        cross_entropy = -vocab_parallel_log_probs(
            logits.flatten(0, 1),
            depth.targets.transpose(0, 1).flatten(),
            group=tp_group,
            vocab_size=depth.vocab_size,
            overwrite_logits=scale_logits_fn is None,
        )
        token_losses = torch.where(depth.valid.transpose(0, 1).flatten(), cross_entropy, 0)
        depth.loss_sum = token_losses.detach().sum()
        main = MTPLossAutoScaler.apply(main, token_losses * depth.weight)
    return main


# ------------------------------------------------------------------ in and out
_stock: dict[str, Any] = {}


def _places() -> dict[str, tuple[Any, str, Any]]:
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction as mtp

    return {
        "loss": (gpt_model, "process_mtp_loss", _process_mtp_loss),
        "embeddings": (mtp.MultiTokenPredictionLayer, "_get_embeddings", _get_embeddings),
        "forward": (mtp.MultiTokenPredictionBlock, "forward", _block_forward),
    }


def apply() -> None:
    """Put the functions above in Megatron's place, for the whole process (idempotent).

    Raises:
        RuntimeError: this megatron-core has no ``process_mtp_loss``; see :func:`legacy_mtp_loss`.
    """
    if _stock:
        return
    places = _places()
    missing = [name for owner, name, _ in places.values() if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(f"this megatron-core has no {missing[0]}; multi-token prediction needs 0.19.2")
    for key, (owner, name, ours) in places.items():
        _stock[key] = getattr(owner, name)
        setattr(owner, name, ours)


def remove() -> None:
    """Put Megatron's own functions back (idempotent)."""
    for key, (owner, name, _) in _places().items():
        if key in _stock:
            setattr(owner, name, _stock.pop(key))


def legacy_mtp_loss(
    token_losses: torch.Tensor,
    loss_mask: torch.Tensor,
    original_num_tokens: torch.Tensor,
    *,
    scale: float,
    per_token: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One depth's loss as a megatron-core without ``process_mtp_loss`` wants it from its own ``GPTModel``.

    It knows the counts of one rank's share of one micro-batch only, so its gradient depends on the split. It is finite
    on a share without a target, and under ``calculate_per_token_loss`` a depth weighs as much as the main loss, whose
    tokens Megatron divides by at the end.

    Args:
        token_losses: cross entropy of each token at this depth.
        loss_mask: the mask after this depth's roll, 1 on its targets.
        original_num_tokens: 0-d, the mask's sum before the first roll.
        scale: ``mtp_loss_scaling_factor / depths``.
        per_token: ``calculate_per_token_loss``.

    Returns:
        (the losses to attach, shaped as ``token_losses``; the mean to log, 0 where there is no target). No value is
        copied to the host.
    """
    masked = torch.where(loss_mask != 0, token_losses * loss_mask, 0)
    num_tokens = loss_mask.sum().clamp(min=1)
    weight = original_num_tokens / num_tokens if per_token else 1 / num_tokens
    return scale * masked * weight, masked.detach().sum() / num_tokens
