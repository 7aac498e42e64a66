# SPDX-License-Identifier: Apache-2.0
"""What megatron-core needs to run on a machine without an accelerator, over gloo.

:func:`install` is called once per process, before anything of Megatron is imported. It does nothing on a machine that
has an accelerator, and refuses a megatron-core version that these replacements were not checked with. Faults of
megatron-core that show on any device are mended in ``verl.models.mcore.patch`` instead.

The replacements fall into four groups:

* ``torch.cuda`` calls made without asking whether a GPU is there: streams, events, RNG state, the current device;
* ``device="cuda"`` arguments of tensor factories: mapped to the CPU;
* the token dispatcher hands split sizes to ``all_to_all_single`` as tensors, which gloo does not take;
* one gloo group per set of ranks instead of one per purpose, since each costs threads and sockets.
"""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

__all__ = ["CHECKED_MEGATRON_CORE", "install", "is_installed", "reset_megatron_state"]

CHECKED_MEGATRON_CORE = ("0.19.2",)

_installed = False
_groups: dict[tuple[int, ...] | None, Any] = {}

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint "
    "randn randn_like scalar_tensor tensor zeros zeros_like"
).split()
_NEW_METHODS = "new_empty new_full new_ones new_tensor new_zeros".split()


class _NullStream:
    """Stands for a CUDA stream or event: there is one queue on a CPU, so every wait is already over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_NullStream":
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any) -> "_NullStream":
        return _NullStream()

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def _done(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = wait_event = wait_stream = synchronize = _done


def is_installed() -> bool:
    """Whether :func:`install` replaced anything in this process."""
    return _installed


def install() -> bool:
    """Make megatron-core run on the CPU of this process.

    Returns:
        True if the process now runs Megatron on the CPU, False where an accelerator makes that unnecessary.

    Raises:
        RuntimeError: for a megatron-core version that was not checked, or when Megatron was imported before the call.
    """
    global _installed
    from verl.utils.device import get_device_name

    if get_device_name() != "cpu":
        return False
    if _installed:
        return True
    found = version("megatron-core")
    if found not in CHECKED_MEGATRON_CORE:
        raise RuntimeError(
            f"megatron-core {found} was not checked on a CPU; install one of {', '.join(CHECKED_MEGATRON_CORE)} "
            "(scripts/setup_env.sh does)"
        )
    if "megatron.core.parallel_state" in sys.modules:
        raise RuntimeError("megatron.core was imported before verl.utils.megatron.cpu_backend.install()")
    # megatron-core compiles many small functions through torch.compile: seconds each on a CPU, and no gain.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _installed = True
    _replace_cuda_calls()
    _map_cuda_devices_to_cpu()
    _accept_tensor_split_sizes()
    _adapt_megatron()
    _share_process_groups()
    return True


def _replace_cuda_calls() -> None:
    import torch

    cpu = torch.device("cpu")
    cuda = torch.cuda

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    cuda.current_device = lambda: cpu  # used as device=torch.cuda.current_device() all over Megatron
    cuda.Stream = cuda.Event = _NullStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NullStream()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.set_device = cuda.synchronize = cuda.empty_cache = nothing
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = zero
    torch.Tensor.record_stream = nothing
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _is_cuda(device: Any) -> bool:
    import torch

    # A bare integer is a CUDA ordinal in every torch factory.
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _map_cuda_devices_to_cpu() -> None:
    import torch
    import torch.utils._device

    # `with torch.device("meta")` knows factory functions by identity, from a set built at first use. Build it before
    # the functions are wrapped: otherwise from_pretrained leaves rotary frequencies uninitialised, without an error.
    torch.utils._device._device_constructors()
    cpu = torch.device("cpu")

    def on_cpu(factory: Callable) -> Callable:
        @functools.wraps(factory)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = cpu
            if "pin_memory" in kwargs:  # pinning needs a driver
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return wrapped

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    tensor_to = torch.Tensor.to

    @functools.wraps(tensor_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device, int)) and _is_cuda(args[0]):
            args = (cpu, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = cpu
        return tensor_to(self, *args, **kwargs)

    torch.Tensor.to = to

    # Megatron's optimizers sort parameters by the string `param.type()`. Float64 passes as float32: a label, no cast.
    tensor_type = torch.Tensor.type
    labels = {
        "torch.FloatTensor": "torch.cuda.FloatTensor",
        "torch.DoubleTensor": "torch.cuda.FloatTensor",
        "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
        "torch.HalfTensor": "torch.cuda.HalfTensor",
    }

    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            label = tensor_type(self)
            return labels.get(label, label)
        return tensor_type(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_


def _accept_tensor_split_sizes() -> None:
    import torch.distributed as dist

    all_to_all_single = dist.all_to_all_single

    def as_list(sizes: Any) -> list[int] | None:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    @functools.wraps(all_to_all_single)
    def wrapped(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        return all_to_all_single(output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs)

    dist.all_to_all_single = wrapped


def _adapt_megatron() -> None:
    import queue

    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import moe_utils

    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    if not hasattr(moe_utils, "te_general_gemm"):  # only bound when TransformerEngine imports, but read always
        moe_utils.te_general_gemm = None
    # A synchronous save writes in this process: no need for a queue served by a spawned manager process, which would
    # import the main script again and outlive a killed run.
    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": queue.Queue()


def _share_process_groups() -> None:
    from megatron.core import parallel_state

    create_group = parallel_state.create_group

    def shared(ranks: Any = None, **kwargs: Any) -> Any:
        key = tuple(ranks) if ranks is not None else None
        if key not in _groups:  # every rank asks in the same order, so the caches agree
            _groups[key] = create_group(ranks=ranks, **kwargs)
        return _groups[key]

    parallel_state.create_group = shared


def reset_megatron_state() -> None:
    """Forget the model-parallel layout and all class-level state, so that another layout can be set up in this process.

    Every rank of the world must call it. Process groups stay: on a CPU they are shared between layouts.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    if _installed:  # destroy_model_parallel would close the *_GLOO groups, which the next layout uses again
        for name, value in list(vars(parallel_state).items()):
            if name.endswith("_GLOO") and isinstance(value, dist.ProcessGroup):
                setattr(parallel_state, name, None)
    parallel_state.destroy_model_parallel()
    parallel_state._global_process_group_list = None
    mcore_random._CUDA_RNG_STATE_TRACKER = None
    mcore_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    destroy_moe_metrics_tracker()  # sized by the number of layers of the first model that logged
    MTPLossLoggingHelper.tracker = {}  # likewise, and keeps a group of the old layout
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    unset_num_microbatches_calculator()
    gc.collect()
