# SPDX-License-Identifier: Apache-2.0
"""Checkpoints read in other layouts, by another kind of optimizer, and in part, in a world of two."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.engine_world import Case, actor_config, save_sharp_model
from tests.utils_dist import run_world
from tests.workers.test_training_worker import largest_difference, own_rows, weights_of
from verl.workers.config import (
    HFModelConfig,
    McoreCheckpointConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.utils.losses import ppo_loss

LAYOUTS: dict[str, dict[str, Any]] = {
    "distributed": {},
    "plain": {"use_distributed_optimizer": False},
    "experts": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "experts, plain": {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "use_distributed_optimizer": False,
    },
}
WHOLE = ["model", "optimizer", "extra"]
LR = 1e-3


def build(path: str, layout: str, contents: list[str] = WHOLE, dtype: str = "float32") -> Any:
    from verl.workers.engine_workers import TrainingWorker

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_config=HFModelConfig(path=path),
            engine_config=McoreEngineConfig(dtype=dtype, **LAYOUTS[layout]),
            optimizer_config=McoreOptimizerConfig(lr=LR, lr_decay_style="constant", total_training_steps=20),
            checkpoint_config=McoreCheckpointConfig(save_contents=contents, load_contents=contents),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(Case("resume"))))
    return worker


def update(worker: Any) -> dict[str, torch.Tensor]:
    """The weights after one more update."""
    worker.train_batch(own_rows(worker, micro_batch_size_per_gpu=2))
    return weights_of(worker)


def in_world(rank: int, world: int, path: str, root: str) -> dict[str, Any]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    results: dict[str, Any] = {}
    saved, going_on = {}, {}
    for name in LAYOUTS:
        worker = build(path, name)
        for _ in range(3):
            saved[name] = update(worker)
        worker.save_checkpoint(f"{root}/{name}")
        if name == "distributed":
            worker.export_hf(f"{root}/hf")
        going_on[name] = update(worker)
        reset_megatron_state()

    names = list(LAYOUTS)
    for source, target in zip(names, names[1:] + names[:1], strict=True):
        worker = build(path, target)
        worker.load_checkpoint(f"{root}/{source}")
        loaded = largest_difference(weights_of(worker), saved[source])
        results["whole", source, target] = loaded, largest_difference(update(worker), going_on[source])
        reset_megatron_state()

    # In bfloat16 both kinds of optimizer keep float32 weights, under names of their own.
    worker = build(path, "plain", dtype="bfloat16")
    update(worker)
    worker.save_checkpoint(f"{root}/bfloat16")
    uninterrupted = update(worker)
    reset_megatron_state()
    for fault in (None, "float32 weights are lost"):
        worker = build(path, "distributed", dtype="bfloat16")
        worker.load_checkpoint(f"{root}/bfloat16")
        if fault:
            worker.engine.optimizer.reload_model_params()  # made again from those in bfloat16
        results["bfloat16", fault] = largest_difference(update(worker), uninterrupted)
        reset_megatron_state()

    fresh = update(build(f"{root}/hf", "distributed"))
    results["a fresh optimizer differs"] = largest_difference(fresh, going_on["distributed"])
    reset_megatron_state()
    for contents, target in (
        (["model"], "distributed"),
        (["model", "extra"], "distributed"),
        (["model"], "plain"),
        (["model", "extra"], "experts"),
    ):
        worker = build(path, target, contents)
        worker.load_checkpoint(f"{root}/distributed")
        results["part", tuple(contents), target] = largest_difference(update(worker), fresh)
        if target == "experts":
            worker.save_checkpoint(f"{root}/without")
        reset_megatron_state()

    results["error"] = error_of(build(path, "experts"), f"{root}/without")
    reset_megatron_state()
    return results


def error_of(worker: Any, folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        worker.load_checkpoint(folder)
    return str(caught.value)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    root = Path(tmp_path_factory.mktemp("layouts"))
    return run_world(in_world, 2, save_sharp_model(str(root / "model")), str(root), timeout_s=300)


@pytest.mark.gloo
def test_the_optimizer_state_fits_every_layout_and_kind_of_optimizer(by_rank: list[dict[Any, Any]]) -> None:
    pairs = {key: value for key, value in by_rank[0].items() if key[0] == "whole"}
    assert len(pairs) == len(LAYOUTS)
    assert by_rank[0]["a fresh optimizer differs"] > 0.1 * LR  # what a lost state would look like
    for pair, (loaded, updated) in pairs.items():
        assert loaded == 0, pair
        assert updated < 1e-3 * LR, (pair, updated)


@pytest.mark.gloo
def test_float32_weights_of_a_bfloat16_model_are_found_under_either_name(by_rank: list[dict[Any, Any]]) -> None:
    assert by_rank[0]["bfloat16", None] == 0
    assert by_rank[0]["bfloat16", "float32 weights are lost"] > 0  # what this test is there to see


@pytest.mark.gloo
def test_weights_alone_start_a_fresh_optimizer(by_rank: list[dict[Any, Any]]) -> None:
    parts = {key: value for key, value in by_rank[0].items() if key[0] == "part"}
    assert len(parts) == 4
    for part, difference in parts.items():
        assert difference < 1e-3 * LR, (part, difference)


@pytest.mark.gloo
def test_an_optimizer_that_was_not_saved_is_named_with_the_way_out_on_every_rank(by_rank: list[dict[Any, Any]]) -> None:
    for results in by_rank:
        assert "saved without the optimizer's state" in results["error"]
        assert "checkpoint.load_contents=[model,extra]" in results["error"]
        assert "\n" not in results["error"]
