# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and optimizer state leave the device outside their phase, and the training does not notice.

On a CPU the device's memory is the host's: what is moved is copied and freed all the same, so values and storages are
those of an accelerator.
"""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.models.engine_world import Case, actor_config, padded_batch, save_sharp_model
from tests.utils_dist import run_world
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

KINDS = {"distributed bfloat16": ("bfloat16", True), "plain float32": ("float32", False)}
MOVES = ("load_params", "load_grads", "load_optimizer", "offload_params", "free_grads", "offload_optimizer")


def build(path: str, kind: str, offloaded: bool) -> Any:
    from functools import partial

    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    dtype, distributed = KINDS[kind]
    engine = McoreEngineConfig(
        dtype=dtype, use_distributed_optimizer=distributed, param_offload=offloaded, optimizer_offload=offloaded
    )
    optimizer = McoreOptimizerConfig(lr=1e-2, weight_decay=0.1, total_training_steps=20)
    worker = TrainingWorker(
        TrainingWorkerConfig(model_config=HFModelConfig(path=path), engine_config=engine, optimizer_config=optimizer)
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(Case("offload"))))
    return worker


def held_bytes(worker: Any) -> tuple[int, int]:
    """Bytes on the device of parameters and of the gradients' buffers."""
    chunks = worker.engine.module
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().size() for m in chunks for p in m.parameters()}
    grads = sum(b.grad_data.untyped_storage().size() for m in chunks for b in (*m.buffers, *m.expert_parallel_buffers))
    return sum(storages.values()), grads


def whole_run(worker: Any, folder: str, calls: list[str]) -> dict[str, Any]:
    """Log-probs, two updates, weights for the rollout, a checkpoint written and read, one more update."""
    held, moved = {"start": held_bytes(worker)}, {}

    def phase(name: str, function: Any, *args: Any) -> Any:
        calls.clear()
        result = function(*args)
        held[name], moved[name] = held_bytes(worker), list(calls)
        return result

    data = tu.assign_non_tensor(left_right_2_no_padding(padded_batch()), temperature=0.8, micro_batch_size_per_gpu=4)
    data["old_log_probs"] = no_padding_2_padding(phase("infer", worker.infer_batch, data)["log_probs"], data).float()
    tu.assign_non_tensor(data, mini_batch_size=4)
    metrics = [tu.get_non_tensor_data(phase("train", worker.train_mini_batch, data), "metrics", {})]
    phase("save", worker.save_checkpoint, folder)
    phase("load", worker.load_checkpoint, folder)
    metrics.append(tu.get_non_tensor_data(worker.train_mini_batch(data), "metrics", {}))

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}

    for entry in metrics:
        del entry["worker_seconds"]
    return {"weights": phase("weights", weights), "metrics": metrics, "held": held, "moved": moved}


def in_world(rank: int, world: int, path: str, folder: str) -> dict[str, Any]:
    from verl.utils.megatron import offload
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    calls: list[str] = []

    def recorded(name: str) -> Any:
        stock = getattr(offload, name)
        return lambda *args: (calls.append(name), stock(*args))[1]

    results = {}
    for kind in KINDS:
        for offloaded in (False, True):
            watched = {name: recorded(name) for name in MOVES} | {"has_device_memory": lambda: True}
            with mock.patch.multiple(offload, **watched):
                worker = build(path, kind, offloaded)
                results[kind, offloaded] = whole_run(worker, os.path.join(folder, f"{kind} {offloaded}"), calls)
            reset_megatron_state()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    root = Path(tmp_path_factory.mktemp("offload"))
    return run_world(in_world, 1, save_sharp_model(str(root / "model")), str(root), timeout_s=240)[0]


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_equal_with_and_without(results: dict[tuple[str, bool], dict[str, Any]], kind: str) -> None:
    without, offloaded = results[kind, False], results[kind, True]
    assert without["metrics"] == offloaded["metrics"]
    assert without["metrics"][0]["grad_norm"] > 1e-2
    assert without["weights"].keys() == offloaded["weights"].keys()
    assert all(torch.equal(tensor, offloaded["weights"][name]) for name, tensor in without["weights"].items())


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_on_the_device_between_the_phases(
    results: dict[tuple[str, bool], dict[str, Any]], kind: str
) -> None:
    held = results[kind, True]["held"]
    assert held.keys() == {"start", "infer", "train", "save", "load", "weights"}
    assert set(held.values()) == {(0, 0)}, held
    assert all(params and grads for params, grads in results[kind, False]["held"].values())


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_brings_what_it_needs(results: dict[tuple[str, bool], dict[str, Any]], kind: str) -> None:
    moved = results[kind, True]["moved"]
    assert moved["train"] == ["load_params", "load_grads", "load_optimizer"] + [
        "offload_params",
        "free_grads",
        "offload_optimizer",
    ]
    assert "load_optimizer" not in moved["infer"] + moved["weights"]
    assert "load_grads" not in moved["infer"] + moved["weights"] + moved["save"]
    for name, calls in moved.items():
        assert calls[0] == "load_params" and {"offload_params"} <= set(calls), name
