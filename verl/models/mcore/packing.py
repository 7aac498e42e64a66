# SPDX-License-Identifier: Apache-2.0
"""Packing of jagged sequences for megatron-core, with the zigzag split of context parallelism.

No process group is needed here: context-parallel rank and size are arguments, so a single process can build and check
every rank's share. Terms used below:

* *value order*: the real tokens of all sequences one after the other, as in the ``values()`` of a jagged tensor;
* *padded order*: the same with every sequence padded to its padded length;
* *local order*: the part of the padded order that one context-parallel rank holds. Each padded sequence is cut into
  ``2 * cp`` equal chunks, and rank ``r`` holds chunks ``r`` and ``2 * cp - 1 - r``, which balances causal attention.

An accelerator runs ahead of the host until the host asks for a number. So the lengths are wanted on the host too, where
the batch comes from, and nothing here depends on the value of a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = [
    "PackLayout",
    "alignment",
    "make_layout",
    "roll_left_within_sequences",
    "shift_left_within_sequences",
    "zigzag_indices",
]


def alignment(tp_size: int, cp_size: int) -> int:
    """Multiple to which each sequence is padded: ``tp`` without, ``tp * 2 * cp`` with context parallelism."""
    return tp_size * 2 * cp_size if cp_size > 1 else tp_size


def zigzag_indices(padded_lengths: torch.Tensor, cp_size: int, cp_rank: int, total: int | None = None) -> torch.Tensor:
    """Positions, in padded order, of the tokens that one context-parallel rank holds.

    Args:
        padded_lengths: [n] int64, each a multiple of ``2 * cp_size`` (any length at ``cp_size`` 1).
        cp_size: number of context-parallel ranks.
        cp_rank: the rank whose share is asked for.
        total: sum of the lengths; without it the host waits for it.

    Returns:
        [sum(padded_lengths) / cp_size] int64.
    """
    total = int(padded_lengths.sum()) if total is None else total
    offset = torch.arange(total // cp_size, device=padded_lengths.device)
    if cp_size == 1:
        return offset
    local_lengths = padded_lengths // cp_size

    def spread(by_sequence: torch.Tensor) -> torch.Tensor:
        return by_sequence.repeat_interleave(local_lengths, output_size=total // cp_size)

    offset = offset - spread(local_lengths.cumsum(0) - local_lengths)
    chunk = spread(local_lengths // 2)
    first = cp_rank * chunk + offset
    second = (2 * cp_size - 1 - cp_rank) * chunk + (offset - chunk)
    return spread(padded_lengths.cumsum(0) - padded_lengths) + torch.where(offset >= chunk, second, first)


@dataclass(frozen=True)
class PackLayout:
    """Where every token of a micro-batch goes on one context-parallel rank.

    Attributes:
        lengths: [n] int64, real tokens of each sequence.
        padded_lengths: [n] int64, multiples of the alignment.
        cp_size, cp_rank: the context-parallel group.
        dense: True for the BSHD format: every row has the same padded length, and tensors are [n, s].
        total: real tokens of all sequences.
        padded_on_host: ``padded_lengths`` as numbers.
    """

    lengths: torch.Tensor
    padded_lengths: torch.Tensor
    cp_size: int
    cp_rank: int
    dense: bool
    total: int
    padded_on_host: tuple[int, ...]

    @property
    def max_padded_length(self) -> int:
        """Length of the longest padded sequence."""
        return max(self.padded_on_host, default=0)

    @property
    def total_padded(self) -> int:
        """Tokens of the pack over all context-parallel ranks, padding included."""
        return sum(self.padded_on_host)

    @cached_property
    def cu_seqlens_padded(self) -> torch.Tensor:
        """[n + 1] int32: starts of the sequences in padded order, then the total."""
        ends = self.padded_lengths.cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """[n + 1] int64: starts of the sequences in value order, then the total."""
        ends = self.lengths.cumsum(0)
        return torch.cat([ends.new_zeros(1), ends])

    @cached_property
    def real_slots(self) -> torch.Tensor:
        """[sum(lengths)] int64: place in padded order of each real token."""
        shift = self.cu_seqlens_padded[:-1].long() - self.offsets[:-1]
        shift = shift.repeat_interleave(self.lengths, output_size=self.total)
        return torch.arange(self.total, device=self.lengths.device) + shift

    @cached_property
    def local_index(self) -> torch.Tensor:
        """[t_local] int64: places in padded order of the tokens that this rank holds."""
        return self._held_by(self.cp_rank)

    def _held_by(self, cp_rank: int) -> torch.Tensor:
        return zigzag_indices(self.padded_lengths, self.cp_size, cp_rank, self.total_padded)

    @cached_property
    def gathered_index(self) -> torch.Tensor:
        """[t_padded] int64: where each padded position lies in the ranks' local parts laid one after the other."""
        if self.cp_size == 1:
            return self.local_index
        order = torch.cat([self._held_by(r) for r in range(self.cp_size)])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return inverse

    @cached_property
    def padding_mask(self) -> torch.Tensor:
        """Local, True on padding: [1, t_local], or [n, s_local] if dense. The router must not see these tokens."""
        mask = torch.ones(self.total_padded, dtype=torch.bool, device=self.lengths.device)
        mask[self.real_slots] = False
        return self._shape(mask[self.local_index])

    @cached_property
    def num_local_tokens(self) -> torch.Tensor:
        """0-d int64: real tokens in this rank's share. Their sum over the ranks is ``lengths.sum()``, exactly."""
        return (~self.padding_mask).sum()

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """Position of each local token within its own padded sequence, shaped like :attr:`padding_mask`."""
        starts = self.cu_seqlens_padded[:-1].long()
        starts = starts.repeat_interleave(self.padded_lengths, output_size=self.total_padded)
        return self._shape((torch.arange(starts.numel(), device=starts.device) - starts)[self.local_index])

    def pack(self, values: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Pad, split and shape one token-wise tensor.

        Args:
            values: [sum(lengths), ...] in value order.
            fill: value of the padding.

        Returns:
            [1, t_local, ...] packed (THD), or [n, s_local, ...] if dense.
        """
        padded = values.new_full((self.total_padded, *values.shape[1:]), fill)
        padded[self.real_slots] = values
        return self._shape(padded[self.local_index])

    def unpack(self, gathered: torch.Tensor) -> torch.Tensor:
        """Bring the ranks' local parts, laid one after the other ([cp * t_local, ...]), back to value order."""
        return gathered[self.gathered_index[self.real_slots]]

    def _shape(self, local: torch.Tensor) -> torch.Tensor:
        rows = self.lengths.numel() if self.dense else 1
        return local.reshape(rows, -1, *local.shape[1:])


def make_layout(
    lengths: torch.Tensor,
    *,
    on_host: Sequence[int] | None = None,
    tp_size: int = 1,
    cp_size: int = 1,
    cp_rank: int = 0,
    dense: bool = False,
) -> PackLayout:
    """Lay out sequences of the given lengths for one context-parallel rank.

    Args:
        lengths: [n] int64 real tokens of each sequence; zeros are allowed.
        on_host: ``lengths`` as numbers; without it the host waits for them, once.
        tp_size: tensor-parallel size (sequence parallelism cuts the packed tokens into ``tp`` equal parts).
        cp_size, cp_rank: the context-parallel group.
        dense: BSHD instead of packed THD: all rows are padded to the longest.
    """
    known = lengths.tolist() if on_host is None else list(on_host)
    multiple = alignment(tp_size, cp_size)
    padded = (lengths + multiple - 1) // multiple * multiple
    numbers = [-(-length // multiple) * multiple for length in known]
    if dense:
        numbers = [max(*numbers, multiple)] * len(numbers) if numbers else []
        padded = torch.full_like(padded, max(numbers, default=0))
    elif numbers and not any(numbers):
        # A model cannot run on no token at all; the one slot is padding.
        numbers[0] = multiple
        padded = padded.clone()
        padded[:1] = multiple
    return PackLayout(lengths, padded, cp_size, cp_rank, dense, sum(known), tuple(numbers))


def roll_left_within_sequences(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Next token of every token, within its own sequence: the labels of a language model.

    The last token of a sequence gets the first of the same sequence; no loss looks at it. Done before any split, so
    that the token on the seam of two context-parallel chunks gets its true successor.

    Args:
        values: [sum(lengths), ...] in value order.
        lengths: [n] int64.
    """
    ends = lengths.cumsum(0)
    end, start = (x.repeat_interleave(lengths, output_size=values.shape[0]) for x in (ends, ends - lengths))
    index = torch.arange(1, values.shape[0] + 1, device=values.device)
    return values[torch.where(index < end, index, start)]


def shift_left_within_sequences(values: torch.Tensor, lengths: torch.Tensor, by: int) -> torch.Tensor:
    """The token ``by`` places ahead of every token, within its own sequence; 0 where the sequence has ended.

    Args:
        values: [sum(lengths)] in value order.
        lengths: [n] int64.
        by: places to look ahead, not negative.
    """
    index = torch.arange(by, values.shape[0] + by, device=values.device)
    ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=values.shape[0])
    inside = index < ends
    return torch.where(inside, values[torch.where(inside, index, 0)], 0) if values.numel() else values
