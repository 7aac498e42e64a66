# SPDX-License-Identifier: Apache-2.0
"""Worker groups on Ray."""

from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.single_controller.ray.execution import WorkerGroupError
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    split_resource_pool,
)

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
