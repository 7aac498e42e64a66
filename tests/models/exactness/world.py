# SPDX-License-Identifier: Apache-2.0
"""Runs checks inside a world of processes: references in single processes, then the engine in every layout."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests.models.engine_world import Case, engine, padded_batch
from tests.models.exactness import reference
from tests.models.exactness.checks import Check
from tests.models.gradients import Gradients, difference, replica_spread, whole_gradients
from verl.algos.aggregation import agg_loss, select
from verl.algos.policy_loss import register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.utils.jagged import make_jagged
from verl.utils.metric import Metric
from verl.workers.config import McoreActorConfig, McoreOptimizerConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl.workers.utils.padding import left_right_2_no_padding

TEMPERATURE = 0.8
TOPK = 2
LR, EPS, DECAY, MAX_NORM = 0.1, 1e-2, 0.01, 1.0
SEQUENCE_LOSS = "sequence_ratio"


@dataclass
class Reference:
    """Gradients by hub name, metrics, and what one optimiser step makes of the weights."""

    gradients: Gradients
    metrics: dict[str, float]
    norm: float
    weights: Gradients
    updated: Gradients


@dataclass
class Result:
    """Errors of one check against its reference; relative, except ``replicas``. ``size`` is the gradient's norm."""

    check: Check
    whole: float
    worst: float
    parameter: str
    metrics: float
    metric: str
    replicas: float
    size: float
    norm: float | None = None
    update: float | None = None
    seconds: float = 0.0


def sequence_ratio(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **counts: Any,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """A policy loss whose every token sees the whole sequence, as a user would register one."""
    advantages = select(advantages, response_mask)
    drift = select(log_prob, response_mask) - select(old_log_prob, response_mask)
    drift = drift.clamp(-20, 20)
    ratio = (drift.sum(1) / (response_mask != 0).sum(1).clamp(min=1)).exp()[:, None].expand_as(drift)
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))
    losses = torch.where(advantages < 0, torch.minimum(losses, -config.clip_ratio_c * advantages), losses)
    metrics = {"actor/ppo_kl": Metric.mean(-drift.sum(), (response_mask != 0).sum())}
    return agg_loss(losses, response_mask, loss_agg_mode, **counts), metrics


def loss_function(check: Check) -> Callable:
    """The engine's loss for a check."""
    if check.loss == "sft":
        return partial(sft_loss, config=None)
    register_policy_loss(SEQUENCE_LOSS)(sequence_ratio)
    settings: dict[str, Any] = {
        "loss_agg_mode": check.loss_agg_mode,
        "max_response_length": reference.HORIZON,
        "policy_loss": PolicyLossConfig(
            loss_mode={"sequence": SEQUENCE_LOSS, "gspo": "gspo"}.get(check.loss, "vanilla")
        ),
    }
    if check.loss == "entropy":
        settings |= {"entropy_coeff": reference.ENTROPY_COEF}
    if check.loss == "kl":
        settings |= {"use_kl_loss": True, "kl_loss_coef": reference.KL_COEF}
    return partial(ppo_loss, config=McoreActorConfig(**settings))


def whole_batch(check: Check) -> TensorDict:
    """The controller's batch; what stands at masked places is NaN, since nothing may read it."""
    batch = padded_batch(check.lengths, check.masked_rows, check.torch_dtype)
    for name in ("advantages", "old_log_probs", "ref_log_prob"):
        batch[name] = torch.where(batch["response_mask"] != 0, batch[name], math.nan)
    return batch


def trains_on_prompt(check: Check, row: int) -> bool:
    """Every third demonstration is trained from its first token on, unless it is masked."""
    return row % 3 == 0 and row not in check.masked_rows


def rank_batch(check: Check, dp_rank: int) -> TensorDict:
    """One data-parallel rank's share, as a worker gets it."""
    rows = check.rows_of(dp_rank)
    data = left_right_2_no_padding(tu.index_select_tensor_dict(whole_batch(check), rows))
    if check.loss == "sft":
        mask, offsets = data["loss_mask"].values().clone(), data["input_ids"].offsets()
        for place, row in enumerate(rows):
            if trains_on_prompt(check, row):
                mask[offsets[place] : offsets[place + 1]] = 1
        data["loss_mask"] = make_jagged(mask, offsets)
        for key in ("response_mask", "attention_mask"):
            tu.pop(data, key)
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "calculate_entropy": check.loss == "entropy"}
    if check.split == "dynamic":
        settings |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": check.token_budget}
    else:
        settings |= {"micro_batch_size_per_gpu": check.micro_batch_size}
    return tu.assign_non_tensor(data, **settings)


# ---------------------------------------------------------------------------------------------------- references
def reference_row(check: Check, batch: TensorDict, row: int, logits: torch.Tensor) -> reference.Row:
    """Cut the predicted tokens of one sequence out of the batch. ``logits`` is [j, vocab]."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row].bool()]
    log_p = torch.log_softmax(logits[:-1] / TEMPERATURE, -1)
    log_prob = log_p.gather(1, tokens[1:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    if check.loss == "sft" and trains_on_prompt(check, row):
        ones = torch.ones_like(log_prob)
        return reference.Row(log_prob, entropy, ones.bool(), ones, ones, ones)
    count = int(batch["attention_mask"][row, batch["prompts"].shape[1] :].sum())
    target = batch["response_mask"][row, :count].bool()
    columns = [batch[name][row, :count].nan_to_num(0.0) for name in ("advantages", "old_log_probs", "ref_log_prob")]
    return reference.Row(log_prob[-count:], entropy[-count:], target, *columns)


@contextmanager
def captured_router_logits(model: torch.nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """What every router's gate returns, by layer and call: [tokens, experts] each."""
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    captured: list[list[torch.Tensor]] = [[] for _ in routers]

    def capture(layer: int, gating: Callable) -> Callable:
        def wrapped(hidden: torch.Tensor) -> torch.Tensor:
            logits = gating(hidden)
            captured[layer].append(logits.flatten(0, -2))
            return logits

        return wrapped

    for layer, router in enumerate(routers):
        router.gating = capture(layer, router.gating)
    try:
        yield captured
    finally:
        for router in routers:
            del router.gating


def reference_gradient(check: Check, model: torch.nn.Module, vocab: int) -> dict[str, float]:
    """Fill ``.grad`` by plain autograd, one unpadded sequence after the other; returns the metrics."""
    for p in model.parameters():
        p.grad = None
    batch, rows = whole_batch(check), []
    device = next(model.parameters()).device
    with captured_router_logits(model) as router_logits:
        for row in range(len(check.lengths)):
            ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None].to(device)
            positions = torch.arange(ids.shape[1], device=device)[None]
            logits = model(input_ids=ids, position_ids=positions, attention_mask=None)[0, :, :vocab]
            rows.append(reference_row(check, batch, row, logits.cpu()))
    router_logits = [[logits.cpu() for logits in layer] for layer in router_logits]
    loss, metrics = reference.step_loss(rows, check.loss, check.loss_agg_mode)
    if check.z_loss and check.is_moe:
        loss = loss + reference.z_loss(router_logits, check.z_loss)
    if check.aux_type:
        steps = check.steps()
        loss = loss + reference.balancing_loss(router_logits, check.aux_type, check.aux_coef, TOPK, steps, check.dense)
    loss.backward()
    return metrics


def references(rank: int, world: int, paths: dict[str, str], checks: list[Check]) -> dict[tuple, Reference]:
    """The references that the checks need. Each is computed by one process alone, the others compute other ones."""
    found: dict[tuple, Reference] = {}
    for model_kind, dtype in sorted({(check.model, check.dtype) for check in checks}):
        needed = {c.reference_key: c for c in checks if (c.model, c.dtype) == (model_kind, dtype)}
        todo = list(needed.values())
        case = Case("reference", dtype=dtype, overrides=portable_overrides())
        with engine(paths[model_kind], case, optimizer=None) as built:
            (model,) = built.module
            model.train()
            weights = exported(built, lambda p: p.data)
            for start in range(0, len(todo), world):
                mine = todo[min(start + rank, len(todo) - 1)]
                metrics = reference_gradient(mine, model, built.vocab_size)
                zero = torch.zeros_like
                gradients = exported(built, lambda p, zero=zero: p.grad if p.grad is not None else zero(p))
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, (mine.reference_key, gradients, metrics))
                for key, gradient, values in everyone:
                    norm, updated = reference.first_adam_step(weights, gradient, LR, EPS, DECAY, MAX_NORM)
                    found[key] = Reference(gradient, values, norm, weights, updated)
    return found


def exported(built: Any, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> Gradients:
    """``value`` of every parameter under its hub name, in float64 on the CPU. Collective."""
    parameters = [p for module in built.module for p in module.parameters()]
    own = [p.data for p in parameters]
    try:
        for p in parameters:
            p.data = value(p).detach().clone()
        stream, _ = built.get_per_tensor_param()
        return {name: tensor.detach().double().cpu().clone() for name, tensor in stream}
    finally:
        for p, data in zip(parameters, own, strict=True):
            p.data = data


# ---------------------------------------------------------------------------------------------------- the engine
def portable_overrides() -> dict[str, Any]:
    """Settings under which an accelerator runs the same layers in the same precision as a CPU."""
    from verl.models.mcore import bridge
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu":
        return {}
    bridge.has_transformer_engine = lambda: False  # its attention knows neither float64 nor float32 packs
    return dict.fromkeys(bridge._NEED_ACCELERATOR, False)


def optimizer_config() -> McoreOptimizerConfig:
    return McoreOptimizerConfig(
        lr=LR,
        clip_grad=MAX_NORM,
        weight_decay=DECAY,
        total_training_steps=10,
        override_optimizer_config={"adam_eps": EPS},
    )


def prepared(check: Check) -> Check:
    """The check with everything that the transformer configuration must be told."""
    overrides = portable_overrides()
    if check.aux_type:
        overrides |= {"moe_router_load_balancing_type": check.aux_type, "moe_aux_loss_coeff": check.aux_coef}
    return replace(check, overrides=overrides)


def metric_error(got: dict[str, Any], loss: float, expected: dict[str, float]) -> tuple[float, str]:
    """(largest error, its name); NaN equals NaN. Metrics near zero are compared absolutely."""
    values = {name: metric.value if isinstance(metric, Metric) else float(metric) for name, metric in got.items()}
    assert values.keys() == expected.keys(), f"other metrics: {sorted(values.keys() ^ expected.keys())}"
    values["reported loss"], expected = loss, expected | {"reported loss": expected["loss"]}
    errors = {}
    for name, want in expected.items():
        same = math.isnan(want) and math.isnan(values[name])
        errors[name] = 0.0 if same else abs(values[name] - want) / max(abs(want), 1e-3)
        errors[name] = math.inf if math.isnan(errors[name]) else errors[name]
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def measure(built: Any, check: Check, expected: Reference) -> Result:
    """Run one step's forward and backward (and, for ``check.step``, the optimizer) and compare everything."""
    started = time.perf_counter()
    with built.train_mode():
        built.optimizer_zero_grad()
        data = rank_batch(check, built.get_data_parallel_rank())
        output = built.forward_backward_batch(data, loss_function(check))
        got = {name: tensor.cpu() for name, tensor in whole_gradients(built).items()}
        whole, worst, parameter = difference(got, expected.gradients)
        spread = replica_spread(built)
        metrics, metric = metric_error(output["metrics"], output["loss"], expected.metrics)
        result = Result(check, whole, worst, parameter, metrics, metric, spread, expected.norm)
        if check.step:
            norm = built.optimizer_step()
            result.norm = abs(norm - expected.norm) / max(expected.norm, 1e-12)
            after = exported(built, lambda p: p.data)
            moved = {name: after[name] - weight for name, weight in expected.weights.items()}
            wanted = {name: expected.updated[name] - weight for name, weight in expected.weights.items()}
            result.update = difference(moved, wanted)[0]
    result.seconds = time.perf_counter() - started
    return result


def engine_of(paths: dict[str, str], check: Check) -> Any:
    """Context manager: the engine that a check runs on."""
    return engine(paths[check.model], prepared(check), optimizer=optimizer_config())


def run_checks(
    rank: int, world: int, paths: dict[str, str], checks: list[Check], progress: bool = False
) -> list[Result]:
    """Every check of the list, engines built once for consecutive checks that share them. Runs on every rank."""
    known = references(rank, world, paths, checks)
    results = []
    key, stack = None, nullcontext()
    built: Any = None
    try:
        for check in checks:
            if check.engine_key != key or (results and results[-1].check.step):
                stack.__exit__(None, None, None)
                stack = engine_of(paths, check)
                built, key = stack.__enter__(), check.engine_key
            results.append(measure(built, check, known[check.reference_key]))
            if progress and rank == 0:
                print(describe(results[-1]), flush=True)
    finally:
        stack.__exit__(None, None, None)
    return results


def describe(result: Result) -> str:
    """One line for a person."""
    parts = [
        f"{result.check.name}: whole {result.whole:.1e}, worst {result.worst:.1e} ({result.parameter})",
        f"metrics {result.metrics:.1e} ({result.metric}), replicas {result.replicas:.1e}",
    ]
    if result.update is not None:
        parts.append(f"norm {result.norm:.1e}, update {result.update:.1e}")
    return ", ".join(parts)
