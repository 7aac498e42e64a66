# SPDX-License-Identifier: Apache-2.0
"""One small Ray cluster for all tests of this folder."""

import pytest


@pytest.fixture(scope="session")
def cluster():
    """A Ray cluster of 2 CPUs; workers of the tests take fractions."""
    import ray

    import verl.single_controller.ray  # noqa: F401  (sets Ray's message size before Ray starts)

    with pytest.MonkeyPatch.context() as environment:
        # Workers inherit these from the process that starts Ray, and a test of this process that had Megatron set up
        # left them.
        for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCHDYNAMO_DISABLE"):
            environment.delenv(name, raising=False)
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def start(cluster):
    """Start a worker group on a pool of its own; both end with the test."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    opened = []

    def run(cls, *args, workers=2, group_kwargs=None, **kwargs):
        pool = RayResourcePool([workers], num_cpus_per_worker=0.25, max_colocate_count=1)
        opened.append(pool)
        init = RayClassWithInitArgs(cluster.remote(cls), *args, **kwargs)
        return RayWorkerGroup(pool, init, **(group_kwargs or {}))

    yield run
    for pool in opened:
        pool.release()
