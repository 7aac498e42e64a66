# SPDX-License-Identifier: Apache-2.0
"""What needs no Ray cluster: worlds without Ray, registration, arithmetic of pools and meshes."""

import os
import socket
import subprocess
import sys

import pytest

from verl.single_controller.base import ResourcePool, Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    register,
    register_dispatch_mode,
    registered_methods,
    update_dispatch_mode,
)
from verl.single_controller.base.worker_group import DispatchInfo

_JOIN = """
import sys, torch.distributed as dist, torch
from verl.single_controller.base import Worker
w = Worker()
w.init_distributed(timeout_s=60)
w.init_distributed(timeout_s=60)
x = torch.tensor([w.rank + 1.0])
dist.all_reduce(x)
print(w.rank, w.world_size, dist.get_world_size(), x.item())
"""


def run_worker(**env):
    base = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "MASTER_ADDR"}}
    return subprocess.Popen(
        [sys.executable, "-c", _JOIN], env={**base, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_import_needs_neither_torch_nor_ray():
    code = "import sys, verl.single_controller.base; assert not {'torch', 'ray', 'tensordict'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_single_process_is_a_world_of_one():
    out, err = run_worker().communicate(timeout=120)
    assert out.split() == ["0", "1", "1", "1.0"], err


@pytest.mark.gloo
def test_torchrun_environment_is_honoured():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [run_worker(RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out.split() for out, _ in outputs] == [["0", "2", "2", "3.0"], ["1", "2", "2", "3.0"]], outputs


def test_world_without_an_address_is_refused():
    _, err = run_worker(WORLD_SIZE="2").communicate(timeout=120)
    assert "WORLD_SIZE=2 without MASTER_ADDR and RANK" in err


def test_register_keeps_the_function_and_inherits():
    class Parent(Worker):
        @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)
        def method(self, x):
            return x + 1

    class Child(Parent):
        def unregistered(self):
            pass

    found = registered_methods(Child)
    assert list(found) == ["method"]
    assert found["method"].execute_mode is Execute.RANK_ZERO and not found["method"].blocking
    assert Child().method(1) == 2


def test_register_refuses_what_it_cannot_run():
    async def coroutine(self):
        pass

    with pytest.raises(ValueError, match="is a coroutine"):
        register()(coroutine)
    with pytest.raises(ValueError, match="is not a mode: use Dispatch.*ONE_TO_ALL"):
        register(dispatch_mode="ONE_TO_ALL")
    with pytest.raises(ValueError, match="is not one of"):
        register(execute_mode="all")


def test_dispatch_modes_can_be_added_and_replaced_by_name():
    try:
        mode = register_dispatch_mode("TEST_ONLY", lambda g: ((), {}), lambda g, r: 1)
        assert Dispatch.TEST_ONLY is mode
        with pytest.raises(ValueError, match="exists already"):
            register_dispatch_mode("TEST_ONLY", None, None)
        update_dispatch_mode("TEST_ONLY", lambda g: ((), {}), lambda g, r: 2)
        assert Dispatch.TEST_ONLY.collect_fn(None, []) == 2
    finally:
        del Dispatch.TEST_ONLY
    with pytest.raises(ValueError, match="does not exist; known modes: ALL_TO_ALL, "):
        update_dispatch_mode("TEST_ONLY", None, None)


def test_mesh_collects_in_data_parallel_order():
    info = DispatchInfo.from_answers("m", [(1, False), (1, True), (0, True), (0, False)])
    assert info.dp_ranks == [1, 1, 0, 0] and info.collect_ranks == [2, 1]


@pytest.mark.parametrize("answers", [[(0, True), (0, True)], [(0, True), (1, False)], [(0, True), (2, True)]])
def test_mesh_refuses_missing_or_double_collectors(answers):
    with pytest.raises(ValueError, match="exactly one rank of every data-parallel rank must collect"):
        DispatchInfo.from_answers("m", answers)


def test_resource_pool_counts():
    pool = ResourcePool([2, 1])
    assert pool.world_size == 3 and pool.local_ranks() == [(0, 2), (1, 2), (0, 1)]
    with pytest.raises(ValueError, match="one positive number for each node"):
        ResourcePool([2, 0])


def test_split_pool_keeps_nodes_apart():
    from verl.single_controller.ray import RayResourcePool, split_resource_pool

    parts = split_resource_pool(RayResourcePool([4, 4]), [2, 4, 2])
    assert [part.store for part in parts] == [[2], [2, 2], [2]]
    assert [part.start_bundle_index for part in parts] == [0, 2, 6]
    assert [part.world_size for part in split_resource_pool(RayResourcePool([4, 4]), 2)] == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="split_size=3 does not divide the pool's world size 8"):
        split_resource_pool(RayResourcePool([8]), 3)
    with pytest.raises(ValueError, match="add up to the pool's world size 8, not 7"):
        split_resource_pool(RayResourcePool([8]), [4, 3])
