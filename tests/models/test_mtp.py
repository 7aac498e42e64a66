# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: whole gradients over the layouts against plain autograd of the unsharded model.

Also planted faults, each of which must move the gradient, and what is built, loaded and trained when.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.engine_world import Case, engine, loss_function, rank_batch
from tests.models.gradients import Gradients, difference, replica_spread, whole_gradients
from tests.models.mtp_world import LAYERS, reference, save_tiny_hy_v3, save_tiny_qwen3
from tests.utils_dist import run_world
from verl.models.mcore import mtp_patch
from verl.models.mcore.packing import PackLayout
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import (
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    MtpConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine.megatron.loss_scale import LossScale

MTP = MtpConfig(enable=True, enable_train=True, mtp_loss_scaling_factor=0.7)
# The bias of the expert choice is a buffer without gradient.
BASE = Case(
    "base", loss="sft", dtype="float64", z_loss=0.1, mtp=MTP, overrides={"moe_router_enable_expert_bias": False}
)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FIRST_ROWS, ODD_ROWS, ALL_ROWS = (0, 1, 2, 3), (1, 3, 5, 7), tuple(range(8))
# Sequences per micro-batch, rows without a target: in turn a whole first micro-batch, whole ranks, the whole batch.
SPLITS = ((2, ()), (2, FIRST_ROWS), (1, ODD_ROWS), (8, ()), (4, ALL_ROWS))
EVERY_SPLIT = ("dp4", "cp2 dp2", "cp2 dp2 flag", "tp2 pp2 flag")  # the other layouts get the first three
# name -> (which model: its depths, 0 for the dense one with one depth and tied embeddings; the layout)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp4": (2, {}),
    "dp4 flag": (2, {"per_token_loss": True}),
    "cp2 dp2": (2, {"cp": 2}),
    "cp2 dp2 flag": (2, {"cp": 2, "per_token_loss": True}),
    "cp2 dp2 dense flag": (2, {"cp": 2, "per_token_loss": True, "dense": True}),
    "cp2 dp2 one depth": (1, {"cp": 2}),
    "cp4 one depth flag": (1, {"cp": 4, "per_token_loss": True}),
    "cp4 dense": (2, {"cp": 4, "dense": True}),
    "tp2 cp2 flag": (2, {"tp": 2, "cp": 2, "per_token_loss": True}),
    "tp2 dp2 dense": (2, {"tp": 2, "dense": True}),
    "pp2 cp2": (2, {"pp": 2, "cp": 2}),
    "tp2 pp2 flag": (2, {"tp": 2, "pp": 2, "per_token_loss": True}),
    "ep2 cp2 recomputed": (2, {"ep": 2, "cp": 2, "overrides": BASE.overrides | RECOMPUTE}),
    "tied cp2 dp2 flag": (0, {"cp": 2, "per_token_loss": True}),
    "tied tp2 pp2": (0, {"tp": 2, "pp": 2}),
}


def step_gradients(built: Any, case: Case, loss: Any = None) -> tuple[Gradients, dict[str, float]]:
    """Gradients and metrics of one step."""
    built.optimizer_zero_grad()
    output = built.forward_backward_batch(rank_batch(case, built), loss or loss_function(case))
    return whole_gradients(built), {name: metric.value for name, metric in output["metrics"].items()}


def loss_errors(metrics: dict[str, float], losses: list[float]) -> float:
    depths = {f"mtp/loss_{k}": value for k, value in enumerate(losses[1:], 1)}
    expected = {"loss": losses[0], "mtp/loss": sum(losses[1:]) / len(losses[1:])} | depths
    errors = [abs(metrics[name] - value) for name, value in expected.items()]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def splits_of(name: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return SPLITS if name in EVERY_SPLIT else SPLITS[:3]


def layouts(rank: int, world: int, folders: dict[int, str]) -> dict[str, tuple]:
    expected = {}
    for depths, folder in folders.items():
        with engine(folder, BASE) as built:
            for _, rows in SPLITS:
                expected[depths, rows] = reference(built, replace(BASE, masked_rows=rows))
    results = {}
    for name, (depths, layout) in LAYOUTS.items():
        case = replace(BASE, name=name, **layout)
        with engine(folders[depths], case) as built, built.train_mode():
            for size, rows in splits_of(name):
                gradients, metrics = step_gradients(built, replace(case, micro_batch_size=size, masked_rows=rows))
                error = difference(gradients, expected[depths, rows][0])
                loss_error = loss_errors(metrics, expected[depths, rows][1])
                results[f"{name}, {size} a micro-batch, {len(rows)} masked"] = (
                    *error,
                    loss_error,
                    replica_spread(built),
                    len(gradients),
                )
    case = replace(BASE, cp=2, dtype="float32", per_token_loss=True)
    with engine(folders[2], case) as built, built.train_mode():
        gradients, metrics = step_gradients(built, case)
        error = difference(gradients, expected[2, ()][0])
        results["float32"] = (*error, loss_errors(metrics, expected[2, ()][1]), replica_spread(built), len(gradients))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    root = tmp_path_factory.mktemp("mtp")
    models = {depths: save_tiny_hy_v3(str(root / f"depths{depths}"), depths) for depths in (1, 2)}
    return models | {0: save_tiny_qwen3(str(root / "tied"))}


@pytest.mark.gloo
def test_gradients_equal_plain_autograd_in_every_layout(folders: dict[int, str]) -> None:
    by_rank = run_world(layouts, 4, folders, timeout_s=400)
    assert len(by_rank[0]) == sum(len(splits_of(name)) for name in LAYOUTS) + 1
    print("gradients compared:", sum(count for *_, count in by_rank[0].values()))
    for results in by_rank:
        for name, (whole, worst, parameter, loss_error, spread, count) in results.items():
            line = f"{name}: {whole:.1e}, worst {worst:.1e} ({parameter}) of {count}, losses {loss_error:.1e}"
            if results is by_rank[0]:
                print(line)
            limit = 1e-5 if name == "float32" else 1e-13
            assert whole <= limit and loss_error <= 10 * limit and spread == 0, line
            assert worst <= 10 * limit, line


# ------------------------------------------------------------------ planted faults
@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def patched_prepare(change: Callable[[mtp_patch.MtpDepth, PackLayout], None]) -> Any:
    prepare = mtp_patch.prepare

    def wrapped(input_ids: torch.Tensor, *, layout: PackLayout, **kwargs: Any) -> list[mtp_patch.MtpDepth]:
        depths = prepare(input_ids, layout=layout, **kwargs)
        for depth in depths:
            change(depth, layout)
        return depths

    return replaced(mtp_patch, "prepare", wrapped)


def local_count(depth: mtp_patch.MtpDepth, layout: PackLayout) -> None:
    depth.weight = (
        0.7 / 2 / max(int(depth.valid.sum()), 1) / 8
    )  # the mean over 4 micro-batches x 2 ranks of their means


def unrolled_padding(depth: mtp_patch.MtpDepth, layout: PackLayout) -> None:
    depth.padding_mask = layout.padding_mask


def across_sequences(mask: torch.Tensor, lengths: torch.Tensor, depth: int) -> torch.Tensor:
    return torch.roll(mask != 0, -(depth + 1))


def prediction_aligned(mask: torch.Tensor, lengths: torch.Tensor, depth: int) -> torch.Tensor:
    return mtp_patch.shift_left_within_sequences(mask != 0, lengths, depth).bool()


def untouched_head(output_layer: Any, output_weight: torch.Tensor | None) -> torch.Tensor:
    return output_layer.weight if output_weight is None else output_weight


def constant(value: Callable[[LossScale], Any]) -> property:
    return property(value)


@contextmanager
def megatrons_own() -> Iterator[None]:
    mtp_patch.remove()
    try:
        with replaced(mtp_patch, "loss_metrics", lambda depths, targets: {}):
            yield
    finally:
        mtp_patch.apply()


def unclamped_metrics(depths: list[mtp_patch.MtpDepth], targets: tuple[int, ...]) -> dict[str, Metric]:
    means = [depth.loss_sum / torch.tensor(count) for depth, count in zip(depths, targets, strict=True)]
    return {"mtp/loss": Metric.sum(sum(means))} | {f"mtp/loss_{k}": Metric.sum(m) for k, m in enumerate(means, 1)}


def first_depth_count(scale: LossScale) -> tuple[float, ...]:
    return tuple(scale.mtp_factor / 2 / max(scale.mtp_targets[0], 1) for _ in scale.mtp_targets)


SMALL = 1e-7  # a fault must move the gradient, or a logged loss, by more than this
# name -> (which regime shows it, masked rows, how to plant it)
FAULTS: dict[str, tuple[bool, tuple[int, ...], Callable[[], Any]]] = {
    "counts of the own share": (True, (), lambda: patched_prepare(local_count)),
    "all depths divided by the first one's count": (
        True,
        (),
        lambda: replaced(LossScale, "mtp_weights", constant(first_depth_count)),
    ),
    # Weights that are infinite change nothing where no target is selected, but the log would.
    "count not clamped": (True, ALL_ROWS, lambda: replaced(mtp_patch, "loss_metrics", unclamped_metrics)),
    "mask rolled across sequences": (True, (), lambda: replaced(mtp_patch, "trained_targets", across_sequences)),
    "mask taken as the predictions'": (True, (), lambda: replaced(mtp_patch, "trained_targets", prediction_aligned)),
    "router's padding mask not rolled": (True, (), lambda: patched_prepare(unrolled_padding)),
    "output head trained": (True, (), lambda: replaced(mtp_patch, "_head_weight", untouched_head)),
    "routed tokens instead of what Megatron divides by": (
        True,
        (),
        lambda: replaced(LossScale, "mtp", constant(lambda s: float(sum(s.mtp_targets)))),
    ),
    "no context-parallel factor": (
        False,
        (),
        lambda: replaced(LossScale, "mtp", constant(lambda s: float(s.num_micro_batches * s.dp_size))),
    ),
    "divided by the micro-batches twice": (
        False,
        (),
        lambda: replaced(LossScale, "mtp", constant(lambda s: float(s.dp_size * s.cp_size))),
    ),
    "Megatron's own, flag on": (True, (), megatrons_own),
    "Megatron's own, flag off": (False, (), megatrons_own),
}


def faults(rank: int, world: int, folder: str) -> dict[str, tuple]:
    expected, results = {}, {}
    with engine(folder, BASE) as built:
        for rows in {rows for _, rows, _ in FAULTS.values()}:
            expected[rows] = reference(built, replace(BASE, masked_rows=rows))
    for flag in (False, True):
        case = replace(BASE, cp=2, per_token_loss=flag)
        with engine(folder, case) as built, built.train_mode():
            for name, (shown_by, rows, plant) in FAULTS.items():
                if shown_by != flag:
                    continue
                with plant():
                    gradients, metrics = step_gradients(built, replace(case, masked_rows=rows))
                losses = loss_errors(metrics, expected[rows][1]) if "mtp/loss" in metrics else math.nan
                results[name] = (*difference(gradients, expected[rows][0]), losses)
            gradients, metrics = step_gradients(built, case)
            losses = loss_errors(metrics, expected[()][1])
            results[f"no fault, flag {flag}"] = (*difference(gradients, expected[()][0]), losses)
    return results


@pytest.mark.gloo
def test_every_planted_fault_moves_the_gradient(folders: dict[int, str]) -> None:
    results = run_world(faults, 2, folders[2], timeout_s=400)[0]
    for name, (whole, worst, parameter, losses) in results.items():
        print(f"| {name} | {whole:.1e} | {worst:.1e} ({parameter}) | losses {losses:.1e} |")
    for name in FAULTS:
        whole, _, _, losses = results[name]
        # A fault of the log leaves the gradients alone, so either check may catch it.
        assert whole > SMALL or not losses <= SMALL, name
        assert whole > SMALL or name == "count not clamped", name
    for flag in (False, True):
        whole, worst, _, losses = results[f"no fault, flag {flag}"]
        assert whole <= 1e-13 and worst <= 1e-12 and losses <= 1e-12


# ------------------------------------------------------------------ what is trained, built and loaded
def times_zero(inner: Any, **kwargs: Any) -> tuple[torch.Tensor, dict]:
    loss, metrics = inner(**kwargs)
    return loss * 0, metrics


def mtp_layers(built: Any) -> list[str]:
    return [name for module in built.module for name, _ in module.named_parameters() if "mtp." in name]


def switches(rank: int, world: int, folder: str, incomplete: str) -> dict[str, Any]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    results: dict[str, Any] = {}
    alone = replace(BASE, cp=2, z_loss=0.0, loss="policy")
    detached = replace(alone, mtp=replace(MTP, detach_encoder=True))
    for name, case in (("alone", alone), ("detached", detached)):
        with engine(folder, replace(case, cp=1)) as built:
            expected, _ = reference(built, case, main_factor=0.0)
        with engine(folder, case) as built, built.train_mode():
            gradients, _ = step_gradients(built, case, partial(times_zero, loss_function(case)))
            results[name] = (difference(gradients, expected), {n: float(g.abs().max()) for n, g in gradients.items()})

    off = replace(alone, mtp=MtpConfig(), dtype="float32")
    with engine(folder, off) as built:
        results["off"] = mtp_layers(built)
        data = rank_batch(off, built)
        with built.eval_mode():
            log_probs = built.infer_batch(data)["model_output"]["log_probs"].values()
    frozen = replace(off, mtp=MtpConfig(enable=True))
    with engine(folder, frozen) as built:
        results["built"] = mtp_layers(built)
        with built.eval_mode():
            same = built.infer_batch(data)["model_output"]["log_probs"].values()
        results["log_probs"] = (log_probs - same).abs().max().item()
        with built.train_mode():
            output = built.train_batch(data, loss_function(frozen))
        results["frozen metrics"] = [name for name in output["metrics"] if name.startswith("mtp/")]
        results["frozen"] = {name: tensor.clone() for name, tensor in built.get_per_tensor_param()[0]}
        results["rollout names"] = [name for name, _ in built.get_per_tensor_param(with_mtp=False)[0]]

    model = HFModelConfig(path=folder, mtp=MTP)
    ref = MegatronEngineWithLMHead(model, McoreEngineConfig(dtype="float32", forward_only=True))
    ref.initialize()
    results["reference model"] = mtp_layers(ref)
    reset_megatron_state()
    try:
        with engine(incomplete, alone):
            pass
    except ValueError as error:
        results["incomplete"] = str(error)
    reset_megatron_state()
    return results


@pytest.mark.gloo
def test_what_is_trained_built_and_loaded(folders: dict[int, str], tmp_path: Path) -> None:
    incomplete = save_tiny_hy_v3(str(tmp_path / "incomplete"), 2)
    weights = load_file(f"{incomplete}/model.safetensors")
    # One depth's experts packed into one tensor, as some checkpoints have them.
    packed = [name for name in weights if name.startswith(f"model.layers.{LAYERS}.mlp.experts")]
    kept = {name: tensor for name, tensor in weights.items() if name not in packed}
    save_file(kept, f"{incomplete}/model.safetensors", metadata={"format": "pt"})
    results = run_world(switches, 2, folders[2], incomplete, timeout_s=400)[0]

    (whole, worst, parameter), sizes = results["alone"]
    assert whole <= 1e-13, (whole, worst, parameter)
    assert sizes["lm_head.weight"] == 0.0
    assert sizes["model.embed_tokens.weight"] > 0 and sizes["model.layers.0.self_attn.q_proj.weight"] > 0
    (whole, worst, parameter), sizes = results["detached"]
    assert whole <= 1e-13, (whole, worst, parameter)
    trained = {name.split(".")[2] for name, size in sizes.items() if size > 0}
    assert trained == {str(LAYERS), str(LAYERS + 1)}, trained

    assert results["off"] == [] and results["reference model"] == []
    assert results["built"] and results["log_probs"] == 0.0 and results["frozen metrics"] == []
    original = load_file(f"{folders[2]}/model.safetensors")
    assert results["frozen"].keys() == original.keys()
    for name, tensor in original.items():
        is_mtp = name.startswith((f"model.layers.{LAYERS}.", f"model.layers.{LAYERS + 1}."))
        assert torch.equal(results["frozen"][name], tensor) == is_mtp, name
        assert (name in results["rollout names"]) != is_mtp
    assert "no weights for" in results["incomplete"] and "mtp.layers.0." in results["incomplete"]
    assert "experts" in results["incomplete"]


# ------------------------------------------------------------------ a run
def run_and_resume(rank: int, world: int, path: str, folder: str) -> dict[str, Any]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    case = replace(BASE, dtype="float32")

    def worker() -> Any:
        from verl.workers.engine_workers import TrainingWorker

        built = TrainingWorker(
            TrainingWorkerConfig(
                model_config=HFModelConfig(path=path, mtp=MTP),
                engine_config=McoreEngineConfig(
                    dtype="float32", context_parallel_size=2, override_transformer_config=dict(BASE.overrides)
                ),
                optimizer_config=McoreOptimizerConfig(lr=1e-2, total_training_steps=20),
            )
        )
        built.reset()
        built.set_loss_fn(loss_function(case))
        return built

    def update(built: Any) -> dict[str, float]:
        return tu.get_non_tensor_data(built.train_batch(rank_batch(case, built.engine)), "metrics", {})

    first = worker()
    results: dict[str, Any] = {"metrics": [update(first) for _ in range(3)]}
    first.save_checkpoint(folder)
    results["next"] = update(first)
    reset_megatron_state()
    second = worker()
    update(second)
    second.load_checkpoint(folder)
    results["resumed"] = update(second)
    reset_megatron_state()
    return results


@pytest.mark.gloo
def test_training_lowers_the_loss_of_each_depth_and_resumes(folders: dict[int, str], tmp_path: Path) -> None:
    for results in run_world(run_and_resume, 2, folders[2], str(tmp_path / "checkpoint"), timeout_s=400):
        for name in ("mtp/loss", "mtp/loss_1", "mtp/loss_2", "loss"):
            values = [metrics[name] for metrics in results["metrics"]]
            assert values[2] < values[1] < values[0], (name, values)
        for name in ("loss", "mtp/loss", "grad_norm", "lr"):
            assert results["resumed"][name] == results["next"][name], name
