# SPDX-License-Identifier: Apache-2.0
"""Worker classes of the tests in this folder; Ray's processes import them from here."""

import os
import time

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class PlainWorker(Worker):
    """A worker for every dispatch mode, on a mesh of dp = world / 2 by mp = 2."""

    def __init__(self, offset: int = 0):
        self.offset = offset
        self.calls = 0
        # The first half of the ranks has the higher data-parallel ranks, so rank order is not data-parallel order.
        dp_size = max(self.world_size // 2, 1)
        self._register_dispatch_collect_info("mesh", dp_size - 1 - self.rank // 2, is_collect=self.rank % 2 == 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, names):
        return {name: os.environ.get(name) for name in names}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x, y=0):
        return self.rank + self.offset + x + y

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def count_on_zero(self):
        self.calls += 1
        return self.rank, self.calls

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def on_zero(self, x):
        self.calls += 1
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def call_count(self):
        return self.calls

    @register()
    def all_to_all(self, x, scale=1):
        return self.rank, x, scale

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def compute(self, x, y):
        return x + y

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def mark_rows(self, data, scale=1):
        data.batch["rank"] = data.batch["x"] * 0 + self.rank * scale
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, data):
        data.batch["x"] = function(data.batch["x"])
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def sum_rows(self, data):
        return int(data.batch["x"].sum())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"))
    def mark_mesh(self, data):
        td = getattr(data, "batch", data)
        td["rank"] = td["x"] * 0 + self.rank
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"))
    def echo(self, data):
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("no such mesh"))
    def on_unknown_mesh(self, data):
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"), blocking=False)
    def slow_double(self, data):
        time.sleep(0.5)
        data.batch["x"] = data.batch["x"] * 2
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def slow_rank(self):
        time.sleep(0.5)
        return self.rank

    @register(dispatch_mode={"dispatch_fn": lambda group, x: (([x] * 4,), {}), "collect_fn": lambda group, r: sum(r)})
    def custom(self, x):
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            raise KeyError("planted fault")
        return self.rank


class GlooWorker(Worker):
    """A worker that joins a process group in its constructor, as engines do, and can die in a collective."""

    def __init__(self, timeout_s: int = 60):
        self.init_distributed(timeout_s=timeout_s)
        self.init_distributed(timeout_s=timeout_s)
        self.set_dispatch_collect("all", 0, is_collect=self.rank == 0)

    def _reduce(self, value):
        import torch

        x = torch.tensor([float(value)])
        torch.distributed.all_reduce(x)
        return x.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce(self, value):
        return self._reduce(value + self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hang_or(self, rank, how):
        if self.rank != rank:
            self._reduce(1.0)
        _fail(how)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("all"), blocking=False)
    def hang_or_data(self, data, rank, how):
        if self.rank != rank:
            self._reduce(1.0)
        _fail(how)


class SleepingWorker(Worker):
    """A worker without torch whose peers never come back when one fails."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_or(self, rank, how):
        if self.rank != rank:
            time.sleep(600)
        _fail(how)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep_or_later(self, rank, how):
        if self.rank != rank:
            time.sleep(600)
        _fail(how)


def _fail(how):
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), 9)
    raise RuntimeError("planted fault")


class Doubler(Worker):
    """One of two classes in a process."""

    def __init__(self, factor):
        self.factor = factor
        self._register_dispatch_collect_info("d", self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("d"))
    def scale(self, data):
        data.batch["x"] = data.batch["x"] * self.factor
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self):
        return os.getpid()


class Pinger(Worker):
    """The other one; a method has the same name as one of `Doubler`, the mesh too, with other ranks."""

    def __init__(self):
        self._register_dispatch_collect_info("d", 0, is_collect=self.rank == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("d"))
    def rows(self, data):
        data.batch["rows"] = data.batch["x"] * 0 + len(data.batch["x"])
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self):
        return os.getpid()


class BadStart(Worker):
    """A worker whose constructor does not come to an end, or fails, on one rank."""

    def __init__(self, how):
        if self.rank == 1:
            if how == "raise":
                raise ValueError("planted fault in __init__")
            time.sleep(600)
        if how == "rendezvous":
            self.init_distributed(timeout_s=600)
