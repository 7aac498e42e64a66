# SPDX-License-Identifier: Apache-2.0
"""Causal core attention without TransformerEngine: packed (THD) or dense (BSHD), grouped queries, context parallelism.

Keys and values are all-gathered over the context-parallel group in one collective per layer; in backward their
gradients are summed and scattered the same way. Packed sequences are attended in groups of equal padded length, so the
cost is that of the sequences, not of the square of the pack, and a group is one call of
``scaled_dot_product_attention``.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from verl.models.mcore.packing import PackLayout, make_layout

__all__ = ["AttentionPlan", "LocalCoreAttention", "gather_first_dim", "make_plan"]


class _GatherFirstDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        local = local.contiguous()
        whole = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(whole, local, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        local = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(local, grad, group=ctx.group)
        return local, None


def gather_first_dim(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[t, ...] of each rank to [size * t, ...] on every rank; backward sums over the ranks and keeps this rank's
    part.
    """
    return local if group.size() == 1 else _GatherFirstDim.apply(local, group)


@dataclass(frozen=True)
class _Group:
    """Sequences of one padded length. Indices are [n, l]; ``mask`` is [l_q, l_kv], None for plain causal."""

    query_index: torch.Tensor
    key_index: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Index tensors that every layer of a forward pass shares.

    Attributes:
        groups: the groups of equally long sequences.
        restore: [t_local] int64, place of each local token in the groups' outputs laid one after the other.
    """

    groups: tuple[_Group, ...]
    restore: torch.Tensor


def make_plan(layout: PackLayout) -> AttentionPlan:
    """Group the sequences of a packed layout by padded length, once per micro-batch."""
    cp_size, cp_rank = layout.cp_size, layout.cp_rank
    local_lengths = layout.padded_lengths // cp_size
    local_starts = local_lengths.cumsum(0) - local_lengths
    starts = layout.cu_seqlens_padded[:-1].long()
    groups, places, done = [], [], 0
    by_length = layout.padded_lengths.argsort(stable=True)
    for padded, count in sorted(Counter(layout.padded_on_host).items()):
        rows = by_length[done : done + count]
        done += count
        if padded == 0:
            continue
        device = rows.device
        query_index = local_starts[rows, None] + torch.arange(padded // cp_size, device=device)
        key_index = layout.gathered_index[starts[rows, None] + torch.arange(padded, device=device)]
        mask = None
        if cp_size > 1:
            chunk = padded // (2 * cp_size)
            within = torch.arange(chunk, device=device)
            position = torch.cat([cp_rank * chunk + within, (2 * cp_size - 1 - cp_rank) * chunk + within])
            mask = position[:, None] >= torch.arange(padded, device=device)
        groups.append(_Group(query_index, key_index, mask))
        places.append(query_index.flatten())
    order = torch.cat(places)
    restore = torch.empty_like(order)
    restore[order] = torch.arange(order.numel(), device=order.device)
    return AttentionPlan(tuple(groups), restore)


class LocalCoreAttention(MegatronModule):
    """The core attention of a layer specification, for machines without TransformerEngine.

    Raises:
        ValueError: at construction, for attention features that it does not compute (dropout, sliding windows,
            softcap).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int | None = None,
        attn_mask_type: Any = None,
        attention_type: Any = None,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, value in (
            ("attention_dropout", dropout),
            ("window_size", getattr(config, "window_size", None)),
            ("attn_logit_softcapping", getattr(config, "attn_logit_softcapping", None)),
        ):
            if value:
                raise ValueError(f"{name}={value} needs TransformerEngine; without it use {name}=0 or leave it unset")
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5
        self.cp_group = pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend causally within each sequence.

        Args:
            query: [t, heads, d] packed, or [s, b, heads, d] dense; the context-parallel local part.
            key, value: likewise, with the number of key-value groups in place of heads.
            packed_seq_params: Megatron's description of the pack; its attribute ``plan`` is used where present.

        Returns:
            [t, heads * d] packed, or [s, b, heads * d] dense.
        """
        if packed_seq_params is None:
            rows = query.shape[1]
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            out = self._packed(q, k, v, self._dense_plan(query))
            return out.reshape(rows, -1, out.shape[-1]).transpose(0, 1)
        plan = getattr(packed_seq_params, "plan", None) or self._plan_of(packed_seq_params)
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        return self._packed(q, k, v, plan).reshape(query.shape[0], -1)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        heads, width = query.shape[1:]
        key_value = gather_first_dim(torch.cat([key, value], dim=-1), self.cp_group)
        outputs = []
        for group in plan.groups:
            q = query[group.query_index].transpose(1, 2)
            k, v = key_value[group.key_index].transpose(1, 2).split([width, value.shape[-1]], dim=-1)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=self.softmax_scale,
                enable_gqa=heads != k.shape[1],
            )
            outputs.append(out.transpose(1, 2).reshape(-1, heads * value.shape[-1]))
        return torch.cat(outputs)[plan.restore]

    def _plan_of(self, packed_seq_params: Any) -> AttentionPlan:
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        lengths = cu_seqlens.long().diff()
        return make_plan(make_layout(lengths, cp_size=self.cp_group.size(), cp_rank=self.cp_group.rank()))

    def _dense_plan(self, query: torch.Tensor) -> AttentionPlan:
        cp_size = self.cp_group.size()
        numbers = [query.shape[0] * cp_size] * query.shape[1]
        lengths = torch.full((len(numbers),), query.shape[0] * cp_size, device=query.device)
        cp_rank = self.cp_group.rank()
        return make_plan(make_layout(lengths, on_host=numbers, cp_size=cp_size, cp_rank=cp_rank, dense=True))
