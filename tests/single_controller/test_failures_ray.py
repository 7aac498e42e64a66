# SPDX-License-Identifier: Apache-2.0
"""Starts, deaths and shortages: the driver learns what happened, within seconds."""

import re
import time

import pytest
import torch

from tests.single_controller.workers import BadStart, GlooWorker, PlainWorker, SleepingWorker
from verl.protocol import DataProto
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    WorkerGroupError,
)

pytestmark = pytest.mark.ray


def test_start_names_the_placement_group(cluster):
    first = RayResourcePool([1], num_cpus_per_worker=1.5)
    first.get_placement_groups(timeout_s=30)  # before the fixture `pair`, which holds half of the CPUs
    second = RayResourcePool([1], num_cpus_per_worker=1.5)
    init = RayClassWithInitArgs(cluster.remote(PlainWorker))
    begin = time.perf_counter()
    with pytest.raises(
        TimeoutError, match=r"placement group of node 0 \(1 x 1.5 CPU\); free in the cluster: [0-9.]+ CPU"
    ):
        RayWorkerGroup(second, init, ray_wait_register_center_timeout=1)
    assert time.perf_counter() - begin > 0.9
    first.release()
    second.release()


@pytest.fixture(scope="module")
def pair(cluster):
    """Two groups with a gloo process group each. A test may destroy its group."""
    pools = [RayResourcePool([2], num_cpus_per_worker=0.25, max_colocate_count=1) for _ in range(2)]
    groups = [RayWorkerGroup(pool, RayClassWithInitArgs(cluster.remote(GlooWorker))) for pool in pools]
    yield groups
    for pool in pools:
        pool.release()


@pytest.fixture
def short_grace(monkeypatch):
    """Wait less for the peers of a failed rank, where the test knows that they are stuck."""
    monkeypatch.setattr("verl.single_controller.ray.execution.GRACE_S", 1.5)


def test_two_groups_meet_at_their_own_stores(pair):
    for value, group in enumerate(pair, start=1):
        assert group.reduce(value) == [2 * value + 1.0] * 2


def test_death_is_seen_while_a_peer_is_stuck_in_a_collective(pair):
    begin = time.perf_counter()
    with pytest.raises(WorkerGroupError, match="rank 1 died") as caught:
        pair[0].hang_or(1, "kill")
    assert time.perf_counter() - begin < 20  # the collective would wait for 60 s
    assert next(iter(caught.value.failures)) == 1  # the dead rank comes before its peer's broken connection
    assert caught.value.summary.startswith("hang_or failed: rank 1 died: ") and "\n" not in caught.value.summary
    with pytest.raises(WorkerGroupError, match="were stopped earlier"):
        pair[0].reduce(1)


def test_failed_future_shows_the_traceback_while_a_peer_is_stuck_in_a_collective(pair, short_grace):
    begin = time.perf_counter()
    future = pair[1].hang_or_data(DataProto.from_dict({"x": torch.arange(2)}), 1, "raise")
    with pytest.raises(WorkerGroupError, match="planted fault") as caught:
        future.get()
    assert time.perf_counter() - begin < 20
    assert "workers.py" in str(caught.value) and "ranks [0] neither finished nor failed" in str(caught.value)


@pytest.mark.parametrize(("how", "text"), [("exit", "rank 1 died"), ("raise", "rank 1 raised .*planted fault")])
def test_failure_is_seen_while_a_peer_sleeps(start, short_grace, how, text):
    group = start(SleepingWorker)
    begin = time.perf_counter()
    with pytest.raises(WorkerGroupError, match=text.rpartition(".*")[2]) as caught:
        group.sleep_or(1, how)
    assert re.match(f"sleep_or failed: {text}", caught.value.summary)
    assert time.perf_counter() - begin < 20


def test_failed_references_end_while_a_peer_sleeps(start, short_grace, cluster):
    refs = start(SleepingWorker).sleep_or_later(1, "raise")
    with pytest.raises(cluster.exceptions.RayActorError):
        cluster.get(refs[0], timeout=20)
    with pytest.raises(RuntimeError, match="planted fault"):
        cluster.get(refs[1], timeout=20)


def test_exception_in_constructor_carries_the_traceback(start):
    with pytest.raises(WorkerGroupError, match="planted fault in __init__") as caught:
        start(BadStart, "raise")
    assert "workers.py" in str(caught.value)


def test_slow_start_names_ranks_and_stages(start):
    with pytest.raises(TimeoutError) as caught:
        start(BadStart, "rendezvous", group_kwargs={"ray_wait_register_center_timeout": 8})
    text = str(caught.value)
    assert "ray_wait_register_center_timeout=8 s" in text
    assert "2 of 2 workers are not ready: rank 0 (in the rendezvous), rank 1 (in __init__)" in text


def test_too_many_workers_fail_at_once_with_both_numbers(cluster):
    init = RayClassWithInitArgs(cluster.remote(PlainWorker))
    begin = time.perf_counter()
    with pytest.raises(ValueError, match="16 worker processes need 16 CPU, but the Ray cluster has 2 .no GPU or NPU"):
        RayWorkerGroup(RayResourcePool([8, 8]), init)
    with pytest.raises(ValueError, match="3 worker processes need 3 CPU, but the Ray cluster has 2"):
        ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a", "critic": "b"}).create_resource_pool()
    assert time.perf_counter() - begin < 2


def test_roles_find_their_pools(cluster):
    manager = ResourcePoolManager({"a": [1], "b": [2]}, {"actor": "a", "critic": "b"}, num_cpus_per_worker=0.5)
    manager.create_resource_pool()
    assert manager.get_resource_pool("critic").world_size == 2
    assert manager.get_resource_pool("actor") is manager.resource_pool_dict["a"]
    assert manager.get_n_gpus() == 3
    with pytest.raises(ValueError, match="role ref is mapped to the pool 'c', which does not exist; pools: a"):
        ResourcePoolManager({"a": [1]}, {"ref": "c"})
