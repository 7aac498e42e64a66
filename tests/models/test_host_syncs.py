# SPDX-License-Identifier: Apache-2.0
"""Where the host would wait for an accelerator: nowhere in our part of a micro-batch.

On a CPU nothing waits, but the operations that would are the same: copying a value to the host, and every result whose
shape depends on values. They are caught while Megatron's schedule runs, whose own ones (the token dispatcher's split
sizes) do not count.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import verl
from tests.models.engine_world import Case, engine, loss_function, padded_batch, save_sharp_model
from tests.utils_dist import run_world
from verl.models.mcore.packing import make_layout, roll_left_within_sequences
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten._unique2.default,
}
# An environment may lie in a folder named verl, so the name alone does not tell.
OURS = f"{Path(verl.__file__).parent}/"
# The CPU's stand-ins for what Megatron does on an accelerator.
NOT_OURS = ("cpu_backend.py",)


def owner() -> str | None:
    """File and line of the innermost frame of this repository or of Megatron; None for Megatron's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/site-packages/megatron/" in name:
            return None
        if name.startswith(OURS):
            return None if name.endswith(NOT_OURS) else f"{name.removeprefix(OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Watch(TorchDispatchMode):
    """Counts our waiting operations by place."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def note(self, what: str) -> None:
        place = owner()
        if place is not None:
            self.places[f"{what} at {place}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        by_mask = func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        unsized = func is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if func in WAITING or by_mask or unsized:
            self.note(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[Watch]:
    """Everything within, copies to Python lists and arrays included."""
    watch = Watch()

    def noting(name: str) -> Any:
        stock = getattr(torch.Tensor, name)

        def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.note(f"Tensor.{name}")
            return stock(self, *args, **kwargs)

        return mock.patch.object(torch.Tensor, name, wrapped)

    with noting("tolist"), noting("numpy"), noting("cpu"), watch:
        yield watch


def waits_of(built: Any, case: Case, forward_only: bool) -> dict[str, int]:
    """Our waits while the schedule runs four micro-batches."""
    from megatron.core import pipeline_parallel

    stock, found = pipeline_parallel.get_forward_backward_func, Counter()

    def watched_schedule() -> Any:
        schedule = stock()

        def run(**kwargs: Any) -> Any:
            with watched() as watch:
                outputs = schedule(**kwargs)
            found.update(watch.places)
            return outputs

        return run

    data = left_right_2_no_padding(padded_batch())
    tu.assign_non_tensor(data, temperature=0.8, micro_batch_size_per_gpu=2, calculate_entropy=True)
    with mock.patch.object(pipeline_parallel, "get_forward_backward_func", watched_schedule):
        if forward_only:
            with built.eval_mode():
                built.infer_batch(data)
        else:
            with built.train_mode():
                built.optimizer_zero_grad()
                built.forward_backward_batch(data, loss_function(case))
    return dict(found)


def in_world(rank: int, world: int, path: str) -> dict[str, dict[str, int]]:
    found = {}
    for dense in (False, True):
        case = Case("waits", cp=2, dense=dense, per_token_loss=True, z_loss=0.01, loss="kl")
        with engine(path, case) as built:
            for forward_only in (False, True):
                found[f"dense={dense} forward_only={forward_only}"] = waits_of(built, case, forward_only)
    return found


@pytest.mark.gloo
def test_no_micro_batch_makes_the_host_wait(tmp_path: Path) -> None:
    for found in run_world(in_world, 2, save_sharp_model(str(tmp_path / "model"))):
        assert len(found) == 4
        assert not any(found.values()), found


def test_the_watch_sees_what_it_should() -> None:
    numbers = torch.arange(4)
    with watched() as watch, mock.patch(f"{__name__}.owner", lambda: "here"):
        numbers.tolist()
        int(numbers[2])
        numbers[numbers > 1]
        numbers.repeat_interleave(numbers)
        numbers.repeat_interleave(numbers, output_size=6)
        numbers.unique()
    assert sum(watch.places.values()) == 5, watch.places


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_layout_needs_no_value_of_a_tensor(cp_size: int, dense: bool) -> None:
    numbers = [3, 0, 9]
    lengths = torch.tensor(numbers, device="meta")
    layout = make_layout(lengths, on_host=numbers, tp_size=2, cp_size=cp_size, dense=dense)
    tokens = torch.empty(12, dtype=torch.int64, device="meta")
    packed = layout.pack(roll_left_within_sequences(tokens, lengths))
    assert packed.shape == layout.padding_mask.shape == layout.position_ids.shape
    assert layout.unpack(torch.empty(layout.total_padded, 2, device="meta")).shape == (12, 2)
    assert layout.num_local_tokens.shape == ()
