# SPDX-License-Identifier: Apache-2.0
"""TrainingWorker on the Megatron engine in a world of two: on-policy updates, checkpoints, export, bad gradients."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.engine_world import Case, actor_config, padded_batch, save_sharp_model
from tests.utils_dist import run_world
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


def build_worker(path: str, lr: float = 1e-3, **layout: Any) -> Any:
    from verl.workers.engine_workers import TrainingWorker

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_config=HFModelConfig(path=path),
            # A router loss has a gradient wherever a token is routed, trained or not.
            engine_config=McoreEngineConfig(
                dtype="float32", override_transformer_config={"moe_z_loss_coeff": 0.01}, **layout
            ),
            optimizer_config=McoreOptimizerConfig(
                lr=lr, min_lr=0.0, lr_warmup_steps=1, lr_decay_style="linear", total_training_steps=20, betas=(0.8, 0.9)
            ),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(Case("worker"))))
    return worker


def own_rows(worker: Any, masked_rows: tuple[int, ...] = (), **settings: Any) -> Any:
    batch = padded_batch(masked_rows=masked_rows)
    share = tu.chunk_tensordict(batch, worker.engine.get_data_parallel_size())[worker.engine.get_data_parallel_rank()]
    return tu.assign_non_tensor(left_right_2_no_padding(share), temperature=0.8, **settings)


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}


@contextmanager
def counted_norms() -> Iterator[list[float]]:
    """The gradient norms that Megatron computes within the context."""
    from megatron.core.optimizer import optimizer

    stock, found = optimizer.get_grad_norm_fp32, []

    def counted(*args: Any, **kwargs: Any) -> float:
        found.append(stock(*args, **kwargs))
        return found[-1]

    optimizer.get_grad_norm_fp32 = counted
    try:
        yield found
    finally:
        optimizer.get_grad_norm_fp32 = stock


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def in_world(rank: int, world: int, path: str, folder: str) -> dict[str, Any]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    results: dict[str, Any] = {}
    worker = build_worker(path, context_parallel_size=2)

    # Log-probs computed with one split, the update with another.
    data = own_rows(worker, micro_batch_size_per_gpu=3)
    data["old_log_probs"] = no_padding_2_padding(worker.infer_batch(data)["log_probs"], data)
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=16)
    before = weights_of(worker)
    results["on_policy"] = tu.get_non_tensor_data(worker.train_mini_batch(data), "metrics", {})
    results["moved_at_zero_lr"] = largest_difference(weights_of(worker), before)

    # Two optimiser steps a call, in an order that both ranks share.
    tu.assign_non_tensor(data, mini_batch_size=4, epochs=2, seed=3, dataloader_kwargs={"shuffle": True})
    results["several_steps"] = tu.get_non_tensor_data(worker.train_mini_batch(data), "metrics", {})
    results["moved"] = largest_difference(weights_of(worker), before)

    # A gradient that is not finite changes nothing.
    broken = own_rows(worker)
    broken["advantages"][0, 0] = math.inf
    with counted_norms() as norms:
        worker.train_batch(own_rows(worker, update_lr_scheduler=False))
    results["norms in a step"] = len(norms)
    before = weights_of(worker)
    results["infinite"] = tu.get_non_tensor_data(worker.train_batch(broken), "metrics", {})
    results["moved_by_infinity"] = largest_difference(weights_of(worker), before)

    worker.save_checkpoint(folder)
    worker.export_hf(os.path.join(folder, "hf"))
    saved = weights_of(worker)
    # A step without a loss token leaves no trace: the resumed run below does not make it.
    results["masked"] = tu.get_non_tensor_data(worker.train_batch(own_rows(worker, tuple(range(8)))), "metrics", {})
    results["moved_by_masked"] = largest_difference(weights_of(worker), saved)
    for _ in range(2):
        worker.train_mini_batch(data)
    uninterrupted = weights_of(worker)
    partly = own_rows(worker, (0, 1, 2, 3), mini_batch_size=4)
    results["partly_masked"] = tu.get_non_tensor_data(worker.train_mini_batch(partly), "metrics", {})
    after_partly = weights_of(worker)
    reset_megatron_state()

    for name, layout in {"cp2": {"context_parallel_size": 2}, "dp2": {}}.items():
        resumed = build_worker(path, **layout)
        resumed.load_checkpoint(folder)
        results[f"loaded {name}"] = largest_difference(weights_of(resumed), saved)
        if name == "cp2":
            for _ in range(2):
                resumed.train_mini_batch(data)
            results["resumed"] = largest_difference(weights_of(resumed), uninterrupted)
            trained = tu.index_select_tensor_dict(own_rows(resumed, (0, 1, 2, 3)), [4, 5, 6, 7])
            results["trained_rows"] = tu.get_non_tensor_data(resumed.train_mini_batch(trained), "metrics", {})
            results["with and without masked rows"] = largest_difference(weights_of(resumed), after_partly)
        reset_megatron_state()

    # Another rate than the saved run's: the configuration's counts.
    for distributed in (True, False):
        name = os.path.join(folder, f"rates {distributed}")
        first = build_worker(path, context_parallel_size=2, use_distributed_optimizer=distributed)
        first.train_mini_batch(data)
        first.save_checkpoint(name)
        reset_megatron_state()
        slower = build_worker(path, lr=1e-5, context_parallel_size=2, use_distributed_optimizer=distributed)
        slower.load_checkpoint(name)
        results[f"rate {distributed}"] = tu.get_non_tensor_data(slower.train_mini_batch(data), "metrics", {})["lr"]
        reset_megatron_state()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    root = Path(tmp_path_factory.mktemp("worker"))
    path = save_sharp_model(str(root / "model"))
    by_rank = run_world(in_world, 2, path, str(root / "checkpoint"), timeout_s=300)
    assert by_rank[0].keys() == by_rank[1].keys()
    return by_rank[0], root


@pytest.mark.gloo
def test_first_update_is_on_policy_whatever_the_split(results: tuple[dict[str, Any], Path]) -> None:
    metrics = results[0]["on_policy"]
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["grad_norm"] > 0.01
    assert metrics["lr"] == 0 and results[0]["moved_at_zero_lr"] == 0  # the warm-up starts at zero


@pytest.mark.gloo
def test_several_mini_batches_make_several_steps(results: tuple[dict[str, Any], Path]) -> None:
    metrics = results[0]["several_steps"]
    assert metrics["lr"] == 1e-3  # one step of the schedule per call
    assert metrics["actor/pg_clipfrac"] > 0  # later steps are off-policy
    assert results[0]["moved"] > 1e-4


@pytest.mark.gloo
def test_a_gradient_that_is_not_finite_changes_nothing(results: tuple[dict[str, Any], Path]) -> None:
    assert not math.isfinite(results[0]["infinite"]["grad_norm"])
    assert results[0]["moved_by_infinity"] == 0


@pytest.mark.gloo
def test_the_gradient_norm_is_computed_once_a_step(results: tuple[dict[str, Any], Path]) -> None:
    assert results[0]["norms in a step"] == 1


@pytest.mark.gloo
def test_a_step_without_a_loss_token_changes_nothing(results: tuple[dict[str, Any], Path]) -> None:
    metrics = results[0]["masked"]
    assert metrics.keys() == {"skipped_steps", "lr", "worker_seconds"} and metrics["skipped_steps"] == 1
    assert results[0]["moved_by_masked"] == 0
    assert results[0]["resumed"] == 0  # nor does it move Adam's state or the learning rate


@pytest.mark.gloo
def test_a_masked_mini_batch_is_no_step_and_dilutes_no_metric(results: tuple[dict[str, Any], Path]) -> None:
    partly, trained = (dict(results[0][name]) for name in ("partly_masked", "trained_rows"))
    assert partly.pop("skipped_steps") == 1
    for metrics in (partly, trained):
        del metrics["worker_seconds"]
    assert partly == trained
    assert results[0]["with and without masked rows"] == 0


@pytest.mark.gloo
def test_a_resumed_run_goes_on_as_if_never_stopped(results: tuple[dict[str, Any], Path]) -> None:
    assert results[0]["loaded cp2"] == 0 and results[0]["loaded dp2"] == 0
    assert results[0]["resumed"] == 0


@pytest.mark.gloo
def test_a_resumed_run_may_have_another_learning_rate(results: tuple[dict[str, Any], Path]) -> None:
    assert results[0]["rate True"] == results[0]["rate False"] == 1e-5  # its warm-up of one step is behind it


@pytest.mark.gloo
def test_the_exported_folder_loads_in_transformers(results: tuple[dict[str, Any], Path]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = results[1] / "checkpoint" / "hf"
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    source, written = load_file(results[1] / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert source.keys() == written.keys()
    assert largest_difference(source, written) > 1e-4  # the trained weights, not the first ones
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id
    assert GenerationConfig.from_pretrained(folder).eos_token_id == model.config.eos_token_id
