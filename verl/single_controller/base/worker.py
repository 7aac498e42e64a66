# SPDX-License-Identifier: Apache-2.0
"""The process-side half of a worker group: who am I, and join the others."""

import os
from typing import Any

from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.single_controller.base.rendezvous import GROUP_ENV, open_store, report_stage


class Worker:
    """Base of everything that runs as one rank of a group.

    Where it stands comes from the environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``), so the
    same class runs in a Ray worker group, under ``torchrun`` and, without any of these, as a world of one. A subclass
    need not call ``super().__init__()``.
    """

    _dispatch_info: dict[str, tuple[int, bool]]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Worker":
        """Report that the process is up, before the subclass's ``__init__`` may start to wait for its peers."""
        report_stage("in __init__")
        worker = super().__new__(cls)
        worker._dispatch_info = {}
        return worker

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return int(os.environ.get("RANK", 0))

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return int(os.environ.get("WORLD_SIZE", 1))

    @property
    def local_rank(self) -> int:
        """Rank among the workers of this group on this node."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def local_world_size(self) -> int:
        """Number of workers of this group on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def init_distributed(self, backend: str | None = None, timeout_s: int = 600) -> None:
        """Choose this rank's device and join the default torch.distributed process group; a second call does nothing.

        In a Ray worker group the ranks meet at a store that rank 0 opens on a free port and keeps; under ``torchrun``
        at ``MASTER_ADDR`` and ``MASTER_PORT``; without either the world is this process.

        Args:
            backend: Backend of ``torch.distributed``; ``None`` takes the device's, with gloo beside it for CPU tensors.
            timeout_s: Seconds to wait for the other ranks, also the limit of every later collective.

        Raises:
            TimeoutError: Ranks did not come in time; the message names them.
        """
        report_stage("in the rendezvous")  # before the slow import
        import torch.distributed as dist

        from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device

        if dist.is_initialized():
            return
        get_torch_device().set_device(self._device_index())
        device = get_device_name()
        if backend is None:
            backend = get_nccl_backend() if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}"
        self._join(backend, timeout_s)

    def _join(self, backend: str, timeout_s: int) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        limit = timedelta(seconds=timeout_s)
        group_id = os.environ.get(GROUP_ENV)
        if group_id is None and "MASTER_ADDR" in os.environ and "RANK" in os.environ:
            dist.init_process_group(backend, init_method="env://", timeout=limit)
            return
        if group_id is None:
            if self.world_size != 1:
                raise ValueError(
                    f"WORLD_SIZE={self.world_size} without MASTER_ADDR and RANK: start with torchrun or Ray"
                )
            store: dist.Store = dist.HashStore()
        else:
            store = dist.PrefixStore("default_group", open_store(group_id, self.rank, self.world_size, timeout_s))
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)

    def _device_index(self) -> int:
        """Index of this rank's device among those its process sees. Ray normally shows a worker only its own."""
        from verl.utils.device import get_torch_device, ray_resource_name

        visible: int = get_torch_device().device_count()
        if GROUP_ENV in os.environ and visible > 1:
            import ray

            assigned = ray.get_runtime_context().get_accelerator_ids().get(ray_resource_name(), [])
            if assigned:
                return int(assigned[0]) % visible
        return self.local_rank % visible

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say where this rank stands in a mesh: which piece of the data it takes, and whether it returns the result.

        Exactly one rank of every ``dp_rank`` must have ``is_collect``.
        """
        self._dispatch_info[mesh_name] = (int(dp_rank), bool(is_collect))

    def set_dispatch_collect(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Public name of :meth:`_register_dispatch_collect_info`, for engines that are held by a worker."""
        self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)

    def _query_dispatch_info(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._dispatch_info:
            known = sorted(self._dispatch_info) or "none"
            raise ValueError(f"{type(self).__name__} registered no mesh {mesh_name!r}; its meshes: {known}")
        return self._dispatch_info[mesh_name]

    def _member(self, member: str | None) -> "Worker":
        assert member is None, f"{type(self).__name__} holds no worker {member!r}"
        return self

    def _call(self, member: str | None, method: str, is_wanted: bool, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """Run a method for the driver. The result is sent back only if wanted.

        The second, tiny return value lets the driver see the end, or the failure, without fetching the data.
        """
        function = getattr(self._member(member), method)
        registration = getattr(function, MAGIC_ATTR, None)
        if registration is None or registration.materialize_futures:
            args = tuple(_materialize(arg) for arg in args)
            kwargs = {key: _materialize(value) for key, value in kwargs.items()}
        result = function(*args, **kwargs)
        return (for_sending(result) if is_wanted else None), True

    def _ready(self) -> int:
        """Answer as soon as the worker is constructed, with its process id."""
        return os.getpid()


def _materialize(value: Any) -> Any:
    if type(value).__name__ != "DataProtoFuture":  # by name: a worker without data need not import torch
        return value
    return value.get()


def for_sending(value: Any) -> Any:
    """Wrap a TensorDict, which pickles slowly, so that it travels as plain arrays; leave anything else."""
    if type(value).__module__.startswith("tensordict"):
        from verl.utils.tensordict_wire import to_wire

        return to_wire(value)
    return value
