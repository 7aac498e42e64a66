# SPDX-License-Identifier: Apache-2.0
"""Whole gradients of an engine, by Hugging Face name, and how far apart two sets of them are."""

from typing import Any

import torch
import torch.distributed as dist

Gradients = dict[str, torch.Tensor]


def whole_gradients(engine: Any) -> Gradients:
    """Every parameter's gradient, shards gathered, under its hub name; the same on every rank. Collective.

    The bridge's conversion only splits, joins and reorders, so it maps gradients as it maps weights.
    """
    _gather_distributed_optimizer_shards(engine)
    parameters = [p for module in engine.module for p in module.parameters()]
    weights = [p.data for p in parameters]
    try:
        for p in parameters:
            p.data = p.main_grad.clone()
        stream, _ = engine.get_per_tensor_param()
        return {name: tensor.detach().clone().double() for name, tensor in stream}
    finally:
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight


def _gather_distributed_optimizer_shards(engine: Any) -> None:
    """After a reduce-scatter only a rank's own shard of each bucket is right."""
    for module in engine.module:
        if not module.ddp_config.use_distributed_optimizer:
            continue
        for buffer in module.buffers + module.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def replica_spread(engine: Any) -> float:
    """Largest difference between ranks that hold the same parameter's gradient (after :func:`whole_gradients`)."""
    from megatron.core import parallel_state as mpu

    kinds: dict[int, tuple[Any, list[torch.Tensor]]] = {}
    for module in engine.module:
        for p in module.parameters():
            is_expert = not getattr(p, "allreduce", True)
            over_data = (
                mpu.get_expert_data_parallel_group()
                if is_expert
                else mpu.get_data_parallel_group(with_context_parallel=True)
            )
            groups = [over_data]
            if not is_expert and not getattr(p, "tensor_model_parallel", False):
                groups.append(mpu.get_tensor_model_parallel_group())
            for group in groups:
                kinds.setdefault(id(group), (group, []))[1].append(p.main_grad.flatten().double())
    spread = torch.zeros((), dtype=torch.float64)
    for group, flat in kinds.values():
        if group.size() > 1:
            low = torch.cat(flat)
            high = low.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
            spread = torch.maximum(spread, (high - low).abs().max())
    dist.all_reduce(spread, op=dist.ReduceOp.MAX)
    return float(spread)


def difference(got: Gradients, expected: Gradients) -> tuple[float, float, str]:
    """(relative L2 of the whole gradient, relative L2 of the worst parameter, its name).

    Raises:
        AssertionError: the two do not name the same parameters, or a number is not finite.
    """
    assert got.keys() == expected.keys(), f"other parameters: {sorted(got.keys() ^ expected.keys())[:4]}"
    squares = {name: (got[name] - expected[name]).square().sum() for name in expected}
    sizes = {name: expected[name].square().sum() for name in expected}
    whole = float((sum(squares.values()) / sum(sizes.values()).clamp(min=1e-300)).sqrt())
    # A parameter without gradient (an expert that no token chose) is measured against the whole gradient.
    floor = 1e-20 * float(sum(sizes.values()))
    worst = max(expected, key=lambda name: float(squares[name] / sizes[name].clamp(min=max(floor, 1e-300))))
    size = float(sizes[worst].clamp(min=max(floor, 1e-300)))
    relative = (float(squares[worst]) / size) ** 0.5
    assert whole == whole and relative == relative, "a gradient is not a number"
    return whole, relative, worst
