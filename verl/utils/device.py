# SPDX-License-Identifier: Apache-2.0
"""The one place that knows which kind of device this process computes on, and what that implies.

Everything else asks here for the device's name, its torch module, the collective backend and the resource name Ray
uses, so that the same code runs on NVIDIA GPUs, on Ascend NPUs and on plain CPUs. The kind is decided once, at the
first question. Importing this module does not import torch.
"""

import functools
import os
import sys
from typing import Any

DEVICE_ENV = "VERL_DEVICE"

_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "cpu": ""}
DEVICE_NAMES = tuple(_VISIBLE_DEVICES)

_BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
_RAY_RESOURCES = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}


class CPUDevice:
    """The part of ``torch.cuda``'s interface that verl uses, for a process without an accelerator.

    There is one device with index 0. Memory figures are those of the whole process, in bytes, because torch keeps no
    account of CPU memory.
    """

    @staticmethod
    def is_available() -> bool:
        """Always true: a CPU is there."""
        return True

    @staticmethod
    def device_count() -> int:
        """One: all cores together are the device."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Index of the device, always 0."""
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        """Accept any device and change nothing; there is only one."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Return at once; operations on a CPU are finished when they return."""

    @staticmethod
    def empty_cache() -> None:
        """Change nothing; freed CPU memory is not held back by torch."""

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Resident memory of this process in bytes (where the system does not tell, its peak)."""
        try:
            with open("/proc/self/statm", encoding="ascii") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return CPUDevice.max_memory_allocated()

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """Peak resident memory of this process in bytes."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed torch's generator of the CPU."""
        import torch

        torch.manual_seed(seed)


@functools.cache
def get_device_name() -> str:
    """Kind of device this process computes on: ``"cuda"``, ``"npu"`` or ``"cpu"``.

    Decided once, from what torch can use. The environment variable ``VERL_DEVICE`` names the kind instead:
    ``VERL_DEVICE=cpu`` keeps a process off the GPUs.

    Raises:
        ValueError: ``VERL_DEVICE`` is not a known kind, or names one that torch cannot use here.
    """
    import torch

    usable = {
        "cuda": torch.cuda.is_available(),
        "npu": hasattr(torch, "npu") and torch.npu.is_available(),
        "cpu": True,
    }
    wanted = os.environ.get(DEVICE_ENV, "").strip().lower()
    if not wanted:
        return next(name for name, is_usable in usable.items() if is_usable)
    if not usable.get(wanted, False):
        choices = [name for name, is_usable in usable.items() if is_usable]
        raise ValueError(f"{DEVICE_ENV}={wanted} cannot be used on this machine; usable here: {', '.join(choices)}")
    return wanted


def get_torch_device() -> Any:
    """Torch's module for the device (``torch.cuda``, ``torch.npu``), or `CPUDevice` where there is no accelerator."""
    name = get_device_name()
    if name == "cpu":
        return CPUDevice
    import torch

    return getattr(torch, name)


def get_device_id() -> int:
    """Index of the device this process has chosen, as ``torch.device(get_device_name(), index)`` takes it."""
    index: int = get_torch_device().current_device()
    return index


def get_visible_devices_keyword() -> str:
    """Environment variable that limits the devices a process sees; empty on a CPU, where there is none."""
    return _VISIBLE_DEVICES[get_device_name()]


def get_nccl_backend() -> str:
    """Backend name for ``torch.distributed.init_process_group``: ``"nccl"``, ``"hccl"`` or, on a CPU, ``"gloo"``."""
    return _BACKENDS[get_device_name()]


def ray_resource_name() -> str:
    """Resource that a Ray worker asks for: ``"GPU"``, ``"NPU"`` or ``"CPU"``."""
    return _RAY_RESOURCES[get_device_name()]


def __getattr__(name: str) -> bool:
    """``is_cuda_available`` and ``is_npu_available``: whether this process computes on that kind of device.

    They are computed on access, because the answer needs torch. With ``VERL_DEVICE=cpu`` both are false everywhere.
    """
    if name == "is_cuda_available":
        return get_device_name() == "cuda"
    if name == "is_npu_available":
        return get_device_name() == "npu"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
