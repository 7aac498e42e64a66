# SPDX-License-Identifier: Apache-2.0
"""What a worker group is, apart from Ray: the worker, the decorator that spreads its methods, the rendezvous."""

from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
