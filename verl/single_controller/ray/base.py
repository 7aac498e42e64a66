# SPDX-License-Identifier: Apache-2.0
"""Worker groups whose workers are Ray actors."""

import os
import time
import uuid
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.single_controller.base.rendezvous import GROUP_ENV, forget_group, read_stage
from verl.single_controller.ray.colocated import ColocatedWorker
from verl.single_controller.ray.execution import RunningCall, RunningData, WorkerGroupError, WorkerSet
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    split_resource_pool,
)
from verl.utils.device import DEVICE_ENV

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "WorkerGroupError",
    "create_colocated_worker_cls",
    "split_resource_pool",
]


def python_class(cls: Any) -> type:
    """The Python class behind ``ray.remote(cls)``, or the class itself."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else getattr(metadata.modified_class, "__ray_actor_class__", metadata.modified_class)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, as ``ray.remote(cls)``, and the arguments to construct it with on every rank.

    Attributes:
        worker_class: The Python class.
        members: The classes that share the worker, by name, if :func:`create_colocated_worker_cls` made this.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any):
        if not hasattr(cls, "__ray_metadata__"):
            raise ValueError(f"RayClassWithInitArgs takes ray.remote(cls), got {cls!r}")
        super().__init__(cls, *args, **kwargs)
        self.worker_class = python_class(cls)
        self.members: dict[str, type] = {}
        self._options: dict[str, Any] = {}

    def update_options(self, options: dict[str, Any]) -> None:
        """Set further Ray actor options, which win over the group's own."""
        self._options.update(options)

    def __call__(self, placement_group: PlacementGroup, bundle_index: int, options: dict[str, Any]) -> Any:
        """Start the actor at its place and return its handle; Ray constructs it in the background."""
        strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle_index)
        options = {"scheduling_strategy": strategy, **options, **self._options}
        return self.cls.options(**options).remote(*self.args, **self.kwargs)


class RayWorkerGroup(WorkerGroup):
    """One worker per place of a resource pool; every registered method of their class is a method of the group.

    Args:
        resource_pool: Where the workers run.
        ray_cls_with_init: What they are.
        bin_pack: Keep the processes of one entry of ``process_on_nodes`` on one node.
        name_prefix: Prefix of the actors' names, shown in errors; the class's name if not given.
        detached: The workers outlive the driver.
        worker_names: Attach to workers that run already, by actor name in rank order, instead of starting some.
        worker_handles: The same by actor handle.
        ray_wait_register_center_timeout: Seconds for the whole start: resources, processes, construction.
        device_name: Kind of device the workers compute on; ``None`` lets each decide.
        worker_env: Further environment variables of the workers, which win over the group's own.

    Raises:
        ValueError: The cluster is too small for the pool.
        TimeoutError: The group did not start in time; the message says what it waits for.
        WorkerGroupError: A worker failed in its constructor, or a method call failed.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: list[str] | None = None,
        worker_handles: list | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str | None = None,
        worker_env: dict[str, str] | None = None,
    ):
        if ray_cls_with_init is None:
            raise ValueError("RayWorkerGroup needs ray_cls_with_init, the class of its workers")
        self._group_id = uuid.uuid4().hex
        self._ray_cls = ray_cls_with_init
        self._member: str | None = None
        self._timeout_s = ray_wait_register_center_timeout
        self._device_name = device_name
        self._worker_env = dict(worker_env or {})
        self.name_prefix = name_prefix or f"{ray_cls_with_init.worker_class.__name__}_{self._group_id[:6]}"
        if worker_names is not None or worker_handles is not None:
            handles = worker_handles or [ray.get_actor(name) for name in worker_names]
            self.worker_names = list(worker_names or [])
            super().__init__(len(handles))
            self._set = WorkerSet(f"worker group {self.name_prefix}", handles)
        else:
            if resource_pool is None:
                raise ValueError("RayWorkerGroup needs a resource_pool, worker_names or worker_handles")
            super().__init__(resource_pool.world_size)
            self._start(resource_pool, bin_pack, detached)
        self._bind_worker_methods(ray_cls_with_init.worker_class)
        self._bind_members()

    @classmethod
    def from_detached(
        cls, worker_names: list[str], ray_cls_with_init: RayClassWithInitArgs, **kwargs: Any
    ) -> "RayWorkerGroup":
        """Attach to workers that another driver left running."""
        return cls(ray_cls_with_init=ray_cls_with_init, worker_names=worker_names, **kwargs)

    @property
    def workers(self) -> list:
        """The Ray actor handles in rank order."""
        return self._set.handles

    def _start(self, pool: RayResourcePool, bin_pack: bool, detached: bool) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            pool.get_placement_groups(bin_pack, self._device_name, self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{self._start_failed()} {error}") from None
        places, local_ranks = pool.places(), pool.local_ranks()
        # Each worker process binds its math threads when it imports torch, so they must be in its first environment.
        common = self._common_env(pool, max(pool.store))
        self.worker_names = [f"{self.name_prefix}_{rank}" for rank in range(self.world_size)]
        handles = []
        for rank, ((group, bundle_index), (local_rank, local_world_size)) in enumerate(
            zip(places, local_ranks, strict=True)
        ):
            env = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(local_world_size),
                **self._worker_env,
            }
            options = {
                **pool.worker_options(self._device_name),
                "name": self.worker_names[rank],
                "runtime_env": {"env_vars": env},
                "lifetime": "detached" if detached else None,
            }
            handles.append(self._ray_cls(group, bundle_index, options))
        self._set = WorkerSet(f"worker group {self.name_prefix}", handles)
        self._wait_for_start(deadline)

    def _common_env(self, pool: RayResourcePool, processes_per_node: int) -> dict[str, str]:
        env = {GROUP_ENV: self._group_id, "WORLD_SIZE": str(self.world_size)}
        device_name = self._device_name or os.environ.get(DEVICE_ENV)
        if pool.accelerator(self._device_name) is not None:
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron needs its kernels in the order of their launch
        else:
            device_name = "cpu"
            cores = max(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"])
            env["OMP_NUM_THREADS"] = str(max(int(cores // processes_per_node), 1))
            env["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes longer than the steps it would speed up
        if device_name:
            env[DEVICE_ENV] = device_name
        return env

    def _wait_for_start(self, deadline: float) -> None:
        ready = {rank: handle._ready.remote() for rank, handle in enumerate(self.workers)}
        missing = self._set.wait_until(ready, deadline, "__init__")
        if missing:
            stages = ", ".join(f"rank {rank} ({read_stage(self._group_id, rank)})" for rank in missing)
            message = f"{self._start_failed()} {len(missing)} of {self.world_size} workers are not ready: {stages}"
            self.shutdown("the start timed out")
            raise TimeoutError(message)

    def _start_failed(self) -> str:
        return (
            f"worker group {self.name_prefix} did not start within "
            f"ray_wait_register_center_timeout={self._timeout_s:g} s:"
        )

    def shutdown(self, reason: str = "shutdown was called") -> None:
        """End the workers; the pool keeps its resources for the next group."""
        self._set.kill(reason)
        forget_group(self._group_id)

    def spawn(self, prefix_set: set[str] | list[str]) -> dict[str, "RayWorkerGroup"]:
        """One group for each colocated class, on the same workers, with that class's methods under their own names.

        Args:
            prefix_set: Names given to :func:`create_colocated_worker_cls`.
        """
        unknown = sorted(set(prefix_set) - self._ray_cls.members.keys())
        if unknown:
            raise ValueError(f"no colocated class is named {unknown}; names: {sorted(self._ray_cls.members)}")
        return {prefix: self._spawn_one(prefix) for prefix in prefix_set}

    def _spawn_one(self, prefix: str) -> "RayWorkerGroup":
        group = object.__new__(RayWorkerGroup)
        WorkerGroup.__init__(group, self.world_size)
        group._group_id, group._set, group._ray_cls = self._group_id, self._set, self._ray_cls
        group._member, group.name_prefix, group.worker_names = prefix, self.name_prefix, self.worker_names
        group._bind_worker_methods(self._ray_cls.members[prefix])
        return group

    def _bind_members(self) -> None:
        for prefix, group in self.spawn(list(self._ray_cls.members)).items():
            for name, value in vars(group).items():
                if getattr(value, "is_worker_method", False):
                    setattr(self, f"{prefix}_{name}", value)

    def _submit(self, method: str, args: tuple, kwargs: dict, ranks: list[int], wanted: list[int]) -> RunningCall:
        return self._set.submit(self._member, method, args, kwargs, ranks, wanted)

    def _gather(self, call: RunningCall) -> list:
        return self._set.gather(call)

    def _defer(self, call: RunningCall) -> list:
        return self._set.watch(call)

    def _defer_data(self, call: RunningCall) -> RunningData:
        return RunningData(self._set, call)


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Put several worker classes into one process per rank.

    Args:
        class_dict: Class and arguments by name; ``RayWorkerGroup.spawn`` takes the names.

    Returns:
        What a RayWorkerGroup takes; its methods are ``<name>_<method>``.
    """
    members = {name: (item.worker_class, item.args, item.kwargs) for name, item in class_dict.items()}
    colocated = RayClassWithInitArgs(ray.remote(ColocatedWorker), members)
    colocated.members = {name: item.worker_class for name, item in class_dict.items()}
    for item in class_dict.values():
        colocated.update_options(item._options)
    return colocated
