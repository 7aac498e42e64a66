# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of registered methods travel as their dispatch mode says."""

import time

import pytest
import torch
from tensordict import TensorDict

from tests.single_controller.workers import Doubler, Pinger, PlainWorker
from verl.protocol import DataProto
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    split_resource_pool,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def group(cluster):
    """Four light workers: a mesh of dp = 2 by mp = 2."""
    pool = RayResourcePool([4], num_cpus_per_worker=0.25)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cluster.remote(PlainWorker), offset=100), name_prefix="plain")
    yield group
    group.shutdown()
    pool.release()


def rows(n):
    return DataProto.from_dict({"x": torch.arange(n)}, meta_info={"k": 1})


def test_environment_of_workers(group):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"]
    for rank, env in enumerate(group.environment(names)):
        assert [env[name] for name in names] == [str(rank), "4", str(rank), "4", "1", "1"]
    assert group.environment(["CUDA_DEVICE_MAX_CONNECTIONS"]) == [{"CUDA_DEVICE_MAX_CONNECTIONS": None}] * 4


def test_one_to_all(group):
    assert group.add(1, y=20) == [121, 122, 123, 124]
    assert group.nothing() == [None] * 4


def test_started_calls_run_in_their_order_and_are_waited_for_in_any(group):
    first, count, last = group.count_on_zero.start(), group.call_count.start(), group.count_on_zero.start()
    rank, calls = last()
    assert rank == 0 and count()[0] == calls - 1 and first() == (0, calls - 1)


def test_rank_zero_runs_nowhere_else(group):
    before = group.call_count()
    assert group.on_zero("a") == (0, "a")
    assert group.count_on_zero() == (0, before[0] + 2)
    assert group.call_count() == [before[0] + 2, *before[1:]]


def test_all_to_all_spreads_lists_of_world_size_only(group):
    assert group.all_to_all([5, 6, 7, 8]) == [(0, 5, 1), (1, 6, 1), (2, 7, 1), (3, 8, 1)]
    assert group.all_to_all([5, 6]) == [(rank, [5, 6], 1) for rank in range(4)]
    assert group.all_to_all([5, 6, 7, 8], scale=2) == [(rank, [5, 6, 7, 8], 2) for rank in range(4)]


def test_dp_compute(group):
    assert group.compute([1, 2, 3, 4], y=(10, 20, 30, 40)) == [11, 22, 33, 44]
    with pytest.raises(ValueError, match="one entry for each of the 4 workers, got 3 entries"):
        group.compute([1, 2, 3], y=[1, 2, 3])


def test_dp_compute_proto(group):
    out = group.mark_rows(rows(8), scale=10)
    assert isinstance(out, DataProto) and out.meta_info["k"] == 1
    assert out.batch["x"].tolist() == list(range(8))
    assert out.batch["rank"].tolist() == [0, 0, 10, 10, 20, 20, 30, 30]


def test_dp_compute_proto_refuses_rows_that_do_not_divide(group):
    with pytest.raises((ValueError, AssertionError), match="6.*4|4.*6"):
        group.mark_rows(rows(6))


def test_dp_compute_proto_with_func(group):
    assert group.apply(lambda x: x + 100, rows(4)).batch["x"].tolist() == [100, 101, 102, 103]
    with pytest.raises(ValueError, match="takes a function as first argument, got DataProto"):
        group.apply(rows(4), rows(4))


def test_dp_compute_metric(group):
    assert group.sum_rows(rows(8)) == [1, 5, 9, 13]


def test_custom_dispatch(group):
    assert group.custom(10) == 46


@pytest.mark.parametrize("kind", ["DataProto", "TensorDict"])
def test_nd_dispatch_gives_the_piece_of_the_dp_rank(group, kind):
    data = rows(6) if kind == "DataProto" else TensorDict({"x": torch.arange(6)}, batch_size=[6])
    out = group.mark_mesh(data)
    td = out.batch if kind == "DataProto" else out
    assert isinstance(out, DataProto if kind == "DataProto" else TensorDict)
    # dp rank 0 is ranks 2 and 3, dp rank 1 is ranks 0 and 1; the odd rank of each answers.
    assert td["x"].tolist() == list(range(6))
    assert td["rank"].tolist() == [3, 3, 3, 1, 1, 1]


def test_nd_dispatch_carries_jagged_tensors_of_any_size(group):
    lengths = [3, 1, 200_000, 2]  # one piece travels in a message, the other through the object store
    values = [torch.arange(n, dtype=torch.float64) for n in lengths]
    nested = torch.nested.nested_tensor(values, layout=torch.jagged)
    out = group.echo(TensorDict({"x": nested, "y": torch.ones(4, 300_000)}, batch_size=[4]))
    assert [torch.equal(a, b) for a, b in zip(out["x"].unbind(), values, strict=True)] == [True] * 4
    assert torch.equal(out["y"], torch.ones(4, 300_000))


def test_each_piece_is_serialized_once(group):
    class Counting:
        count = 0

        def __reduce__(self):
            Counting.count += 1
            return int, ()

    data = rows(4)
    group.mark_mesh(data)
    data.meta_info = {"probe": Counting()}
    group.echo(data)
    assert Counting.count == 2  # dp = 2, although four ranks get a piece


def test_unknown_mesh_names_the_known_ones(group):
    with pytest.raises(RuntimeError, match=r"registered no mesh 'no such mesh'; its meshes: \['mesh'\]"):
        group.on_unknown_mesh(rows(4))


def test_data_methods_refuse_other_types(group):
    with pytest.raises((TypeError, ValueError), match="got dict"):
        group.echo({"x": 1})


def test_non_blocking_data_is_a_future_that_others_take(group):
    begin = time.perf_counter()
    future = group.slow_double(rows(4))
    assert time.perf_counter() - begin < 0.4
    assert group.mark_mesh(future).batch["x"].tolist() == [0, 2, 4, 6]  # handed on without coming here
    assert future.get().batch["x"].tolist() == [0, 2, 4, 6]


def test_non_blocking_values_are_references(group, cluster):
    begin = time.perf_counter()
    refs = group.slow_rank()
    assert time.perf_counter() - begin < 0.4
    assert cluster.get(refs) == [0, 1, 2, 3]


def test_execute_by_name(group):
    assert group.execute_all_sync("add", 1) == [101, 102, 103, 104]
    assert group.execute_rank_zero_sync("add", 1, y=2) == 103
    assert [ref is not None for ref in group.execute_all_async("add", 1)] == [True] * 4


def test_exception_carries_the_traceback_and_spares_the_group(group):
    with pytest.raises(RuntimeError, match="fail_on failed on rank 2") as caught:
        group.fail_on(2)
    assert 'raise KeyError("planted fault")' in str(caught.value)
    assert "workers.py" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert list(caught.value.failures) == [2]
    assert group.add(0) == [100, 101, 102, 103]  # nobody was stuck, so nobody was stopped


def test_colocated_classes_share_processes_and_keep_their_meshes(cluster):
    pool = RayResourcePool([2], num_cpus_per_worker=0.2)
    classes = {
        "a": RayClassWithInitArgs(cluster.remote(Doubler), factor=3),
        "b": RayClassWithInitArgs(cluster.remote(Pinger)),
    }
    group = RayWorkerGroup(pool, create_colocated_worker_cls(classes))
    a, b = (group.spawn({"a", "b"})[name] for name in "ab")
    assert a.process_id() == b.process_id() and len(set(a.process_id())) == 2
    assert a.scale(rows(4)).batch["x"].tolist() == [0, 3, 6, 9]
    assert b.rows(rows(4)).batch["rows"].tolist() == [4, 4, 4, 4]  # its mesh "d" has dp = 1
    assert group.a_scale(rows(2)).batch["x"].tolist() == [0, 3]
    with pytest.raises(ValueError, match=r"\['c'\]; names: \['a', 'b'\]"):
        group.spawn({"c"})
    group.shutdown()
    pool.release()


def test_split_pool_holds_two_groups_and_attach_by_name(cluster):
    pool = RayResourcePool([2], num_cpus_per_worker=0.2, max_colocate_count=1)
    parts = split_resource_pool(pool, [1, 1])
    groups = [
        RayWorkerGroup(part, RayClassWithInitArgs(cluster.remote(PlainWorker), offset=10 * i))
        for i, part in enumerate(parts)
    ]
    assert [g.add(0) for g in groups] == [[0], [10]]
    again = RayWorkerGroup.from_detached(groups[1].worker_names, RayClassWithInitArgs(cluster.remote(PlainWorker)))
    assert again.add(1) == [11]
    pool.release()
