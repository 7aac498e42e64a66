# SPDX-License-Identifier: Apache-2.0
"""Where workers may run: pools of CPUs, or of accelerators with CPUs beside them, reserved as Ray placement groups."""

import math
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.base import ResourcePool
from verl.utils.device import DEVICE_ENV

_ACCELERATORS = ("GPU", "NPU")
_UNIT = 1e-4  # the smallest share of a resource that Ray knows


def cluster_accelerator(device_name: str | None = None) -> str | None:
    """The accelerator resource of this Ray cluster, ``"GPU"`` or ``"NPU"``, or ``None`` if workers are to use CPUs.

    The cluster decides, not torch in this process: a driver that asked for no GPU does not see any.

    Args:
        device_name: ``"cpu"`` asks for CPUs; so does the environment variable ``VERL_DEVICE=cpu``.
    """
    if (device_name or os.environ.get(DEVICE_ENV, "")).strip().lower() == "cpu":
        return None
    total = ray.cluster_resources()
    return next((name for name in _ACCELERATORS if total.get(name, 0) > 0), None)


def share(amount: float, parts: int) -> float:
    """One of ``parts`` equal shares of a resource, rounded down to what Ray can count."""
    return max(math.floor(amount / parts / _UNIT + 1e-6) * _UNIT, _UNIT)


class RayResourcePool(ResourcePool):
    """Room for one worker process per accelerator, or per share of the CPUs where there is no accelerator.

    Args:
        process_on_nodes: Worker processes per node, one entry per node.
        use_gpu: Reserve an accelerator for each process. On a cluster without any, and under ``VERL_DEVICE=cpu``,
            each process reserves only CPUs.
        name_prefix: Prefix of the placement groups' names; random if not given.
        max_colocate_count: How many worker groups may share the pool; each worker takes that part of its place.
        detached: The reservation outlives the driver.
        accelerator_type: Ray's name of an accelerator model that the nodes must have.
        num_cpus_per_worker: CPUs reserved for each process, fractions allowed.
    """

    def __init__(
        self,
        process_on_nodes: list[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        num_cpus_per_worker: float = 1.0,
    ):
        super().__init__(process_on_nodes, max_colocate_count)
        if num_cpus_per_worker <= 0:
            raise ValueError(f"num_cpus_per_worker={num_cpus_per_worker} must be greater than 0; a fraction is allowed")
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"verl_pool_{uuid.uuid4().hex[:8]}"
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.num_cpus_per_worker = float(num_cpus_per_worker)
        self.pgs: list[PlacementGroup] | None = None

    def accelerator(self, device_name: str | None = None) -> str | None:
        """The accelerator resource that each process of this pool reserves, or ``None``."""
        return cluster_accelerator(device_name) if self.use_gpu else None

    def bundle(self, device_name: str | None = None) -> dict[str, float]:
        """What the pool reserves for one process."""
        bundle = {"CPU": self.num_cpus_per_worker}
        accelerator = self.accelerator(device_name)
        if accelerator is not None:
            bundle[accelerator] = 1
        if self.accelerator_type is not None:
            bundle[self.accelerator_type] = _UNIT
        return bundle

    def worker_options(self, device_name: str | None = None) -> dict[str, Any]:
        """Ray options of one worker: its share of the place of one process."""
        options: dict[str, Any] = {"num_cpus": share(self.num_cpus_per_worker, self.max_colocate_count)}
        accelerator = self.accelerator(device_name)
        if accelerator == "GPU":
            options["num_gpus"] = share(1, self.max_colocate_count)
        elif accelerator is not None:
            options["resources"] = {accelerator: share(1, self.max_colocate_count)}
        return options

    def check_capacity(self, bin_pack: bool = True, device_name: str | None = None) -> None:
        """Raise ValueError, with both numbers, if the cluster could not hold this pool even when empty."""
        check_capacity({self.name_prefix: self}, bin_pack, device_name)

    def get_placement_groups(
        self, bin_pack: bool = True, device_name: str | None = None, timeout_s: float = 300
    ) -> list[PlacementGroup]:
        """Reserve the resources, one placement group per node; the same ones when called again.

        Raises:
            ValueError: The cluster is too small.
            TimeoutError: The resources did not become free within ``timeout_s`` seconds.
        """
        if self.pgs is not None:
            return self.pgs
        self.check_capacity(bin_pack, device_name)
        bundle = self.bundle(device_name)
        groups = [
            placement_group(
                bundles=[dict(bundle) for _ in range(count)],
                strategy="STRICT_PACK" if bin_pack else "PACK",
                name=f"{self.name_prefix}_{index}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self.store)
        ]
        deadline = time.monotonic() + timeout_s
        for index, group in enumerate(groups):
            left_s = max(math.ceil(deadline - time.monotonic()), 1)  # Ray counts whole seconds here
            if not group.wait(timeout_seconds=left_s):
                free = ray.available_resources()
                for created in groups:
                    remove_placement_group(created)
                raise TimeoutError(
                    f"waited {timeout_s:g} s for the placement group of node {index} "
                    f"({self.store[index]} x {_describe(bundle)}); free in the cluster: "
                    f"{_describe({name: free.get(name, 0) for name in bundle})}. Something else holds the rest"
                )
        self.pgs = groups
        return groups

    def places(self) -> list[tuple[PlacementGroup, int]]:
        """Placement group and bundle index of every rank; the resources must be reserved."""
        assert self.pgs is not None, "get_placement_groups comes first"
        return [(group, index) for group, count in zip(self.pgs, self.store, strict=True) for index in range(count)]

    def release(self) -> None:
        """Give the resources back; workers that still run there are ended by Ray."""
        for group in self.pgs or []:
            remove_placement_group(group)
        self.pgs = None


class SubRayResourcePool(RayResourcePool):
    """Some consecutive places of another pool; made by :func:`split_resource_pool`.

    Args:
        parent: The pool that holds the places.
        start_bundle_index: Rank in the parent of the first place.
        subgroup_world_size: Number of places.
    """

    def __init__(self, parent: RayResourcePool, start_bundle_index: int, subgroup_world_size: int):
        self.parent = parent
        self.start_bundle_index = start_bundle_index
        node_of_rank = [node for node, count in enumerate(parent.store) for _ in range(count)]
        nodes = node_of_rank[start_bundle_index : start_bundle_index + subgroup_world_size]
        super().__init__(
            process_on_nodes=[nodes.count(node) for node in sorted(set(nodes))],
            use_gpu=parent.use_gpu,
            name_prefix=f"{parent.name_prefix}_from{start_bundle_index}",
            max_colocate_count=parent.max_colocate_count,
            detached=parent.detached,
            accelerator_type=parent.accelerator_type,
            num_cpus_per_worker=parent.num_cpus_per_worker,
        )

    def get_placement_groups(
        self, bin_pack: bool = True, device_name: str | None = None, timeout_s: float = 300
    ) -> list[PlacementGroup]:
        """Reserve the resources of the whole parent pool."""
        return self.parent.get_placement_groups(bin_pack, device_name, timeout_s)

    def places(self) -> list[tuple[PlacementGroup, int]]:
        """Placement group and bundle index of every rank of this part."""
        return self.parent.places()[self.start_bundle_index : self.start_bundle_index + self.world_size]

    def release(self) -> None:
        """Leave the resources to the parent pool, which other parts may still use."""


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | list[int]) -> list[SubRayResourcePool]:
    """Cut a pool into parts of consecutive ranks.

    Args:
        resource_pool: The pool; its resources are reserved once, at the first use of any part.
        split_size: Processes per part: one number for equal parts, or one number for each part.

    Raises:
        ValueError: The parts do not add up to the pool's world size.
    """
    world_size = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or world_size % split_size:
            raise ValueError(f"split_size={split_size} does not divide the pool's world size {world_size}")
        split_size = [split_size] * (world_size // split_size)
    if sum(split_size) != world_size or any(size < 1 for size in split_size):
        raise ValueError(
            f"split_size={split_size} must be positive numbers that add up to the pool's world size {world_size}, "
            f"not {sum(split_size)}"
        )
    starts = [sum(split_size[:index]) for index in range(len(split_size))]
    return [SubRayResourcePool(resource_pool, start, size) for start, size in zip(starts, split_size, strict=True)]


class ResourcePoolManager:
    """Named resource pools and the roles that live in them.

    Args:
        resource_pool_spec: Worker processes per node by pool name.
        mapping: Pool name by role.
        pool_kwargs: Further arguments of every :class:`RayResourcePool`, such as ``num_cpus_per_worker``.
    """

    def __init__(self, resource_pool_spec: dict[str, list[int]], mapping: dict[Hashable, str], **pool_kwargs: Any):
        for role, name in mapping.items():
            if name not in resource_pool_spec:
                known = ", ".join(resource_pool_spec)
                raise ValueError(f"role {role} is mapped to the pool {name!r}, which does not exist; pools: {known}")
        self.resource_pool_spec = resource_pool_spec
        self.mapping = mapping
        self.pool_kwargs = pool_kwargs
        self.resource_pool_dict: dict[str, RayResourcePool] = {}

    def create_resource_pool(self) -> None:
        """Make the pools. ValueError, with both numbers, if the cluster cannot hold all of them at once."""
        pools = {
            name: RayResourcePool(process_on_nodes, name_prefix=name, **self.pool_kwargs)
            for name, process_on_nodes in self.resource_pool_spec.items()
        }
        check_capacity(pools)
        self.resource_pool_dict = pools

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        """The pool in which a role lives."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Worker processes of all pools: the number of accelerators, where there are any."""
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())


def _describe(resources: dict[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items())


def check_capacity(pools: dict[str, RayResourcePool], bin_pack: bool = True, device_name: str | None = None) -> None:
    """Raise ValueError, with both numbers, if the cluster could not hold the pools together even when empty."""
    total = ray.cluster_resources()
    wanted: dict[str, float] = defaultdict(float)
    for pool in pools.values():
        for name, amount in pool.bundle(device_name).items():
            wanted[name] += amount * pool.world_size
    workers = sum(pool.world_size for pool in pools.values())
    for name, amount in wanted.items():
        if amount > total.get(name, 0) + _UNIT:
            raise ValueError(
                f"{workers} worker processes need {amount:g} {name}, but the Ray cluster has {total.get(name, 0):g}"
                f"{_advice(name)}"
            )
    if bin_pack:
        for pool in pools.values():
            _check_nodes(pool, device_name)


def _advice(resource: str) -> str:
    if resource in _ACCELERATORS:
        return "; lower trainer.n_gpus_per_node or trainer.nnodes"
    has_accelerator = cluster_accelerator() is not None
    why = "" if has_accelerator else " (no GPU or NPU here, so every worker process takes CPUs)"
    return f"{why}; lower the number of workers or num_cpus_per_worker, which may be a fraction"


def _check_nodes(pool: RayResourcePool, device_name: str | None) -> None:
    """The processes of one entry of process_on_nodes must fit on one node, so the largest must fit on the largest."""
    count = max(pool.store)
    for name, amount in pool.bundle(device_name).items():
        largest = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
        if amount * count > largest + _UNIT:
            raise ValueError(
                f"process_on_nodes={pool.store} puts {count} worker processes on one node, which need "
                f"{amount * count:g} {name}; the largest node of the Ray cluster has {largest:g}"
            )
