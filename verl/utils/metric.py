# SPDX-License-Identifier: Apache-2.0
"""Metrics that do not depend on how a batch was cut.

A mean of means weighs a micro-batch of one token like one of a thousand. So a mean travels as a pair (total, count)
from the loss through micro-batches and ranks, and is divided once, at the very end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from verl.utils.device import get_device_id, get_device_name

__all__ = ["Metric", "all_reduce_metrics", "merge_metrics", "reduce_metrics"]

Number = float | int | torch.Tensor


def _plain(value: Number) -> Number:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _larger(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor):
        return torch.maximum(a, b if isinstance(b, torch.Tensor) else a.new_tensor(b))
    if isinstance(b, torch.Tensor):
        return torch.maximum(b.new_tensor(a), b)
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)  # max() alone would drop a NaN on one side


@dataclass(frozen=True)
class Metric:
    """A number on its way to the log.

    Use the constructors `mean`, `sum`, `max` and `min`. Tensors are kept detached, on their device, until `value` is
    read: a loss that makes metrics never waits for the device.

    Attributes:
        total: the sum of the items, or the extreme of them.
        count: the number of items behind a mean; 1 for the other kinds.
        how: how two metrics become one: "mean", "sum", "max" or "min".
    """

    total: Number
    count: Number
    how: Literal["mean", "sum", "max", "min"]

    @classmethod
    def mean(cls, total: Number, count: Number) -> Metric:
        """A mean of `count` items that add up to `total`."""
        return cls(_plain(total), _plain(count), "mean")

    @classmethod
    def sum(cls, total: Number) -> Metric:
        """A part of a sum."""
        return cls(_plain(total), 1, "sum")

    @classmethod
    def max(cls, total: Number) -> Metric:
        """The largest item of a part; -inf for a part without items."""
        return cls(_plain(total), 1, "max")

    @classmethod
    def min(cls, total: Number) -> Metric:
        """The smallest item of a part; inf for a part without items."""
        return cls(_plain(total), 1, "min")

    def merge(self, other: Metric) -> Metric:
        """The metric of both parts together.

        Raises:
            ValueError: the two are of different kinds.
        """
        if self.how != other.how:
            raise ValueError(f"cannot merge a {self.how!r} metric with a {other.how!r} metric")
        if self.how == "mean":
            return Metric.mean(self.total + other.total, self.count + other.count)
        if self.how == "sum":
            return Metric.sum(self.total + other.total)
        if self.how == "max":
            return Metric.max(_larger(self.total, other.total))
        return Metric.min(-_larger(-self.total, -other.total))

    @property
    def value(self) -> float:
        """The number itself; NaN for a mean of nothing. Waits for the device if the metric holds tensors."""
        if self.how != "mean":
            return float(self.total)
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Join the metrics of several parts of one batch, key by key; a key may be missing in some parts.

    Raises:
        ValueError: a key is of one kind in one part and of another kind in the next.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            try:
                merged[key] = merged[key].merge(metric) if key in merged else metric
            except ValueError as error:
                raise ValueError(f"metric {key!r}: {error}") from None
    return merged


def _collective_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device(get_device_name(), get_device_id())


def _all_reduce(numbers: Sequence[Number], op: Any, group: dist.ProcessGroup | None) -> list[float]:
    if not numbers:
        return []
    device = _collective_device(group)
    packed = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in numbers])
    dist.all_reduce(packed, op=op, group=group)
    return packed.tolist()


def all_reduce_metrics(metrics: Mapping[str, Metric], group: dist.ProcessGroup | None = None) -> dict[str, Metric]:
    """Join the metrics of all ranks of a process group, in float64.

    One SUM collective carries all totals and counts, one MAX collective all extremes; a kind that does not occur costs
    no call. Every rank must bring the same keys of the same kinds.

    Args:
        metrics: this rank's metrics.
        group: the ranks that hold different parts; None is all ranks.

    Returns:
        The joint metrics with float values, the same on every rank, keys sorted.
    """
    keys = sorted(metrics)
    added = [key for key in keys if metrics[key].how in ("mean", "sum")]
    extreme = [key for key in keys if metrics[key].how in ("max", "min")]
    sums = _all_reduce([x for key in added for x in (metrics[key].total, metrics[key].count)], dist.ReduceOp.SUM, group)
    signs = [1.0 if metrics[key].how == "max" else -1.0 for key in extreme]
    peaks = _all_reduce(
        [sign * metrics[key].total for sign, key in zip(signs, extreme, strict=True)], dist.ReduceOp.MAX, group
    )

    joint: dict[str, Metric] = {}
    for position, key in enumerate(added):
        total, count = sums[2 * position], sums[2 * position + 1]
        joint[key] = Metric.mean(total, count) if metrics[key].how == "mean" else Metric.sum(total)
    for sign, key, peak in zip(signs, extreme, peaks, strict=True):
        joint[key] = Metric.max(peak) if sign > 0 else Metric.min(-peak)
    return {key: joint[key] for key in keys}


def _reduce(value: Any) -> float:
    if isinstance(value, Metric):
        return value.value
    if isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(isinstance(item, Metric) for item in value):
            return merge_metrics({"": item} for item in value)[""].value
        numbers = [float(item) for item in value]
        return sum(numbers) / len(numbers) if numbers else float("nan")
    return float(value)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Turn metrics into plain numbers for the log.

    A `Metric` gives its value, a list of them the value of their union, a list of numbers its average (NaN when empty),
    a number itself.
    """
    return {key: _reduce(value) for key, value in metrics.items()}
