# SPDX-License-Identifier: Apache-2.0
"""Metrics as (total, count): merging, reduction over processes, plain numbers for the log."""

import dataclasses
import math
import pickle

import pytest
import torch

from tests.utils_dist import run_world
from verl.utils.metric import Metric, all_reduce_metrics, merge_metrics, reduce_metrics

NAN = float("nan")


def as_number(x):
    return x


def as_tensor(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("wrap", [as_number, as_tensor])
def test_a_mean_weighs_tokens_not_micro_batches(wrap):
    small, large = Metric.mean(wrap(0.0), wrap(1)), Metric.mean(wrap(3.0), wrap(3))
    assert small.merge(large).value == large.merge(small).value == 0.75


@pytest.mark.parametrize("wrap_a", [as_number, as_tensor])
@pytest.mark.parametrize("wrap_b", [as_number, as_tensor])
@pytest.mark.parametrize("how, expected", [("sum", 1.1), ("max", 3.1), ("min", -2.0)])
@pytest.mark.parametrize("a, b", [(3.1, -2.0), (-2.0, 3.1)])
def test_sums_and_extremes_merge(wrap_a, wrap_b, how, expected, a, b):
    make = getattr(Metric, how)
    merged = make(wrap_a(a)).merge(make(wrap_b(b)))
    assert merged.how == how
    assert merged.value == pytest.approx(expected, rel=1e-15)
    assert isinstance(merged.value, float)


@pytest.mark.parametrize("how", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("wrap", [as_number, as_tensor])
@pytest.mark.parametrize("a, b", [(NAN, 1.0), (1.0, NAN)])
def test_a_nan_is_never_lost(how, wrap, a, b):
    make = (lambda x: Metric.mean(x, 1)) if how == "mean" else getattr(Metric, how)
    assert math.isnan(make(wrap(a)).merge(make(wrap(b))).value)


def test_a_mean_of_nothing_is_nan_and_does_not_disturb():
    nothing = Metric.mean(0.0, 0)
    assert math.isnan(nothing.value)
    assert math.isnan(Metric.mean(torch.tensor(0.0), torch.tensor(0)).value)
    assert nothing.merge(Metric.mean(4.0, 2)).value == 2.0


def test_metrics_keep_no_graph_and_are_frozen():
    x = torch.ones((), requires_grad=True)
    for metric in (Metric.mean(2 * x, x), Metric.sum(2 * x), Metric.max(2 * x), Metric.min(2 * x)):
        assert not metric.total.requires_grad
        assert not (isinstance(metric.count, torch.Tensor) and metric.count.requires_grad)
        assert pickle.loads(pickle.dumps(metric)).value == metric.value
        with pytest.raises(dataclasses.FrozenInstanceError):
            metric.total = 0.0


def test_different_kinds_do_not_merge():
    with pytest.raises(ValueError, match="'mean' metric with a 'sum'"):
        Metric.mean(1.0, 1).merge(Metric.sum(1.0))
    with pytest.raises(ValueError, match="'actor/x'.*'max' metric with a 'min'"):
        merge_metrics([{"actor/x": Metric.max(1.0)}, {"actor/x": Metric.min(1.0)}])


def test_merge_metrics_joins_by_key():
    parts = [
        {"kl": Metric.mean(0.0, 1), "loss": Metric.sum(0.25)},
        {"kl": Metric.mean(3.0, 3), "loss": Metric.sum(0.5), "late": Metric.max(7.0)},
    ]
    merged = merge_metrics(parts)
    assert {key: metric.value for key, metric in merged.items()} == {"kl": 0.75, "loss": 0.75, "late": 7.0}
    assert merge_metrics([]) == {}
    assert parts[0]["loss"].value == 0.25, "the parts stay as they are"


def test_reduce_metrics():
    reduced = reduce_metrics(
        {
            "metric": Metric.mean(torch.tensor(3.0), 4),
            "metrics": [Metric.mean(0.0, 1), Metric.mean(3.0, 3)],
            "numbers": [1, 2.0, 6],
            "tensor": torch.tensor(2.0),
            "number": 5,
            "nothing": [],
        }
    )
    assert math.isnan(reduced.pop("nothing"))
    assert reduced == {"metric": 0.75, "metrics": 0.75, "numbers": 3.0, "tensor": 2.0, "number": 5.0}
    assert all(type(value) is float for value in reduced.values())


def _reduce_on_rank(rank, world_size):
    """What every rank reports, and how many collectives it took."""
    import torch.distributed as dist

    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(kwargs["op"]), original(*args, **kwargs))[1]
    metrics = [
        ("z/kl", Metric.mean(torch.tensor([0.0, 3.0][rank]), torch.tensor([1, 3][rank]))),
        ("a/loss", Metric.sum([0.1, 0.2][rank])),
        ("m/max", Metric.max([-5, -2][rank])),
        ("m/min", Metric.min(torch.tensor([4.0, 6.0][rank], dtype=torch.float64))),
        ("tokens", Metric.sum(torch.tensor([2**53 - 2, 1][rank]))),
    ]
    joint = all_reduce_metrics(dict(metrics if rank == 0 else reversed(metrics)))
    num_all = len(calls)
    sums_only = all_reduce_metrics({"x": Metric.mean(1.0, 2)})
    num_sums = len(calls) - num_all
    assert all_reduce_metrics({}) == {} and len(calls) == num_all + num_sums
    types = {type(metric.total) for metric in joint.values()}
    return list(joint), {k: m.value for k, m in joint.items()}, num_all, num_sums, sums_only["x"].value, types


@pytest.mark.gloo
def test_all_reduce_metrics():
    first, second = run_world(_reduce_on_rank, 2)
    assert first == second
    keys, values, num_all, num_sums, x, types = first
    assert keys == ["a/loss", "m/max", "m/min", "tokens", "z/kl"]
    assert values == {"a/loss": 0.1 + 0.2, "m/max": -2.0, "m/min": 4.0, "tokens": float(2**53 - 1), "z/kl": 0.75}
    assert (num_all, num_sums, x) == (2, 1, 0.5)
    assert types == {float}
