# SPDX-License-Identifier: Apache-2.0
"""Gathering per-token outputs over the context-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_with_own_gradient"]


class _GatherWithOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.part = slice(group.rank() * local.shape[0], (group.rank() + 1) * local.shape[0])
        whole = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.part], None


def gather_with_own_gradient(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[t, ...] to [size * t, ...]; the other ranks' parts are constants for the gradient."""
    return local if group.size() == 1 else _GatherWithOwnGradient.apply(local, group)
