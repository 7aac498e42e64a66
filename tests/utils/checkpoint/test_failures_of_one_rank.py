# SPDX-License-Identifier: Apache-2.0
"""What fails on one rank of two is raised on both, in words, and nothing stays on the device behind it."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.models.engine_world import save_sharp_model
from tests.utils_dist import run_world
from tests.workers.test_offloading import build, held_bytes
from tests.workers.test_training_worker import own_rows
from verl.utils.checkpoint.agreement import raise_everywhere
from verl.utils.checkpoint.hf_export import save_hf_folder

KIND = "distributed bfloat16"


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def said_by(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Kind and text of the error; all ranks are in step after it."""
    try:
        call(*args, **kwargs)
    except (ValueError, OSError) as error:
        found = "ValueError" if isinstance(error, ValueError) else "OSError", str(error)
    else:
        found = "none", ""
    dist.barrier()
    return found


def collective_stream(seen: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(6):
        tensor = torch.full((1000,), float(index))
        dist.broadcast(tensor, src=0)
        seen.append(f"weight {index}")
        yield seen[-1], tensor


def exports(rank: int, path: str, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, limit in {"at once": 100, "in the middle": 5000}.items():
        seen: list[str] = []
        settings = {"is_writer": rank == 0, "max_shard_bytes": 4000 if limit == 100 else 8000}
        with small_disk(limit) if rank == 0 else contextlib.nullcontext():
            error = said_by(save_hf_folder, collective_stream(seen), path, f"{root}/{name}", **settings)
        found[f"export, {name}"] = error
        assert len(seen) == 6, (name, seen)
    seen = []
    under_a_file = os.path.join(path, "config.json", "out")
    found["export, no folder"] = said_by(
        save_hf_folder, collective_stream(seen), path, under_a_file, is_writer=rank == 0
    )
    assert len(seen) == 6
    return found


def checkpoints(rank: int, path: str, root: str) -> dict[str, Any]:
    from verl.utils.megatron import offload

    found: dict[str, Any] = {}
    with mock.patch.object(offload, "has_device_memory", lambda: True):
        worker = build(path, KIND, offloaded=True)
        worker.train_batch(own_rows(worker, micro_batch_size_per_gpu=4))  # there is no optimizer state before a step
        whole = f"{root}/whole"
        from megatron.core import dist_checkpointing

        def attempt(name: str, call: Callable[..., Any], folder: str) -> None:
            found[name] = said_by(call, folder)
            found[f"held after {name}"] = held_bytes(worker)

        attempt("a save", worker.save_checkpoint, whole)
        others = {kind: f"{root}/{kind}" for kind in ("without extra", "cut off")}
        if rank == 0:
            for folder in others.values():
                os.makedirs(folder)
                os.symlink(f"{whole}/dist_ckpt", f"{folder}/dist_ckpt")
            for index in range(2):
                Path(others["cut off"], f"extra_rank_{index}.pt").write_bytes(b"PK\x03\x04 and no more")
        dist.barrier()
        for kind, folder in others.items():
            attempt(f"a load {kind}", worker.load_checkpoint, folder if rank == 1 else whole)
        attempt("a load of nothing", worker.load_checkpoint, f"{root}/nothing" if rank == 1 else whole)
        with mock.patch.object(dist_checkpointing, "load", side_effect=OSError("no such disk")):
            attempt("a load that breaks off", worker.load_checkpoint, whole)
        with mock.patch.object(dist_checkpointing, "save", side_effect=OSError("no such disk")):
            attempt("a save that breaks off", worker.save_checkpoint, f"{root}/broken")
        if rank == 1:
            os.makedirs(f"{root}/taken/extra_rank_1.pt")
        attempt("a save to a taken name", worker.save_checkpoint, f"{root}/taken")
        attempt("a save under a file", worker.save_checkpoint, f"{path}/config.json/out")
        attempt("a load after all", worker.load_checkpoint, whole)
    return found


def in_world(rank: int, world: int, path: str, root: str) -> dict[str, Any]:
    return exports(rank, path, root) | checkpoints(rank, path, root)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = Path(tmp_path_factory.mktemp("failures"))
    return run_world(in_world, 2, save_sharp_model(str(root / "model")), str(root), timeout_s=90)


@pytest.mark.gloo
def test_an_export_that_cannot_be_written_fails_on_every_rank(by_rank: list[dict[str, Any]]) -> None:
    for name in ("at once", "in the middle", "no folder"):
        first, second = (results[f"export, {name}"] for results in by_rank)
        assert first == second and first[0] == "OSError" and "cannot be written" in first[1], (first, second)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name, kind, part",
    [
        ("a load without extra", "ValueError", "no schedule and random state"),
        ("a load cut off", "ValueError", "extra_rank_1.pt cannot be read"),
        ("a load of nothing", "ValueError", "holds no checkpoint"),
        ("a save to a taken name", "OSError", "extra_rank_1.pt cannot be written"),
        ("a save under a file", "OSError", "config.json/out"),
    ],
)
def test_a_checkpoint_fails_on_every_rank(by_rank: list[dict[str, Any]], name: str, kind: str, part: str) -> None:
    first, second = (results[name] for results in by_rank)
    assert first == second and first[0] == kind and part in first[1], (first, second)
    assert "\n" not in first[1]


@pytest.mark.gloo
def test_nothing_stays_on_the_device_after_a_failure(by_rank: list[dict[str, Any]]) -> None:
    for results in by_rank:
        assert results["a load that breaks off"] == results["a save that breaks off"] == ("OSError", "no such disk")
        assert results["a save"] == results["a load after all"] == ("none", "")
        held = {name: value for name, value in results.items() if name.startswith("held")}
        assert len(held) == 9 and set(held.values()) == {(0, 0)}, held


def test_without_a_process_group_the_error_is_raised_here() -> None:
    raise_everywhere(None)
    with pytest.raises(ValueError, match="a reason"):
        raise_everywhere(ValueError("a reason"))
    with pytest.raises(OSError, match="a disk"):
        raise_everywhere(OSError("a disk"))
