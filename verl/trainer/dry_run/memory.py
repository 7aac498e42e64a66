# SPDX-License-Identifier: Apache-2.0
"""What one rank needs in memory, from the configuration and the model's config.json; formulas in docs/memory.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from verl.trainer.dry_run.batches import BatchReport, MicroBatches
from verl.trainer.dry_run.layout import LayoutReport
from verl.trainer.dry_run.offline import OfflineReport
from verl.trainer.ppo.preflight_batch import get
from verl.utils.hf_config import find_hf_config
from verl.utils.memory_estimate import (
    Layout,
    MemoryEstimate,
    RolloutLoad,
    combine,
    estimate_memory,
)
from verl.utils.model_size import ModelShape, read_model_shape

_A = "actor_rollout_ref"
_ROLLOUT_PARTS = "rollout's "


@dataclass(frozen=True)
class MemoryReport:
    """``estimate`` as `MemoryEstimate.to_dict` gives it, or None with the reason in ``unknown``.

    ``host_bytes_of_a_machine`` is what the offloaded parts of all ranks of a machine take of its host memory.
    """

    estimate: dict[str, Any] | None
    unknown: str = ""
    ranks_per_machine: int = 1
    host_bytes_of_a_machine: int = 0


def describe_ppo_memory(tree: Mapping, layout: LayoutReport, batches: BatchReport, reference: bool) -> MemoryReport:
    """Actor with reference model and rollout, and the critic if there is one, in one process."""
    actor, rollout = get(tree, f"{_A}.actor"), get(tree, f"{_A}.rollout")
    rows = _rows_of_rollout(batches.steps.batch_size * batches.responses_per_prompt, layout.world_size, rollout)
    device = tree["trainer"]["device"]
    load = RolloutLoad(
        rows,
        rollout["prompt_length"] + rollout["response_length"],
        rollout["dtype"],
        gives_way=bool(rollout["free_cache_engine"]) and device != "cpu",
    )
    update, passes = batches.updates[0].micro_batches, {part.name: part for part in batches.passes}
    more: dict[str, Any] = {
        "reference": passes["reference log-probs"] if reference else None,
        "reference_offload": bool(get(tree, f"{_A}.ref.megatron.param_offload")) and device != "cpu",
        "rollout": load,
    }

    def engines() -> dict[str, MemoryEstimate]:
        model = get(tree, f"{_A}.model")
        trained, without = actor["megatron"], passes["old log-probs"]
        made = {"actor": _engine(model, trained, actor["optim"], layout, batches, update, without, device, **more)}
        if len(batches.updates) > 1:
            critic, split = tree["critic"], batches.updates[1].micro_batches
            of_critic = critic["model"], critic["megatron"], critic["optim"]
            made["critic"] = _engine(*of_critic, layout, batches, split, passes["values"], device, value_head=True)
        return made

    return _report(engines, layout)


def describe_sft_memory(tree: Mapping, layout: LayoutReport, batches: BatchReport) -> MemoryReport:
    """The one model of SFT."""
    update, device = batches.updates[0].micro_batches, tree["trainer"]["device"]
    return _report(
        lambda: {
            "model": _engine(tree["model"], tree["engine"], tree["optim"], layout, batches, update, update, device)
        },
        layout,
    )


def describe_generation_memory(tree: Mapping, work: OfflineReport) -> MemoryReport:
    """A worker's copy of the model and what generating takes; there is no engine."""

    def engines() -> dict[str, MemoryEstimate]:
        rollout, rows = tree["rollout"], work.rows_per_worker or 1
        rows = min(rows, rollout["max_num_seqs"] or rows)
        longest = rollout["prompt_length"] + rollout["response_length"]
        load = RolloutLoad(rows, longest, rollout["dtype"], gives_way=False)
        whole = estimate_memory(_shape(tree["model"]), Layout(), max_tokens_per_rank=1, forward_only=True, rollout=load)
        parts = tuple(part for part in whole.parts if part.name.startswith(_ROLLOUT_PARTS))
        return {"rollout": MemoryEstimate(parts, 0, {"generate": sum(part.bytes for part in parts)})}

    return _report(engines)


def _report(engines: Callable[[], dict[str, MemoryEstimate]], layout: LayoutReport | None = None) -> MemoryReport:
    try:
        made = engines()
        estimate = combine(made) if len(made) > 1 else next(iter(made.values()))
    except ValueError as error:
        return MemoryReport(None, str(error))
    if layout is None:
        return MemoryReport(estimate.to_dict())
    ranks = min(layout.ranks_per_node, layout.world_size)
    return MemoryReport(estimate.to_dict(), "", ranks, ranks * estimate.host_bytes)


def _shape(model: Mapping) -> ModelShape:
    config, source = find_hf_config(model)
    if config is None:
        raise ValueError(source)
    return read_model_shape(config)


def _rows_of_rollout(rows: int, world_size: int, rollout: Mapping) -> int:
    """Responses that a rank generates at a time: the rollout takes every rank as a data-parallel one."""
    share = ceil(rows / world_size)
    return min(share, rollout["max_num_seqs"] or share)


def largest_micro_batch(part: MicroBatches, context: int, multiple: int) -> int | None:
    """Tokens of the largest micro-batch on one context rank; None if the split is not known.

    By tokens: the budget, or all sequences of the rank where these are fewer tokens. By sequences: as many of the
    longest kind, padded to ``multiple``.
    """
    longest = ceil(part.longest / multiple) * multiple
    rows = part.rows if part.dynamic else part.size
    if rows is None:
        return None
    tokens = ceil(rows * longest / context)
    if part.dynamic:
        return min(part.tokens, tokens) if part.tokens else None
    return tokens


def _tokens(part: MicroBatches, layout: LayoutReport, batches: BatchReport) -> int:
    tokens = largest_micro_batch(part, layout.context, batches.padding_multiple)
    if tokens is None:
        raise ValueError("the size of the micro-batches is not known")
    return tokens


def _engine(
    model: Mapping,
    engine: Mapping,
    optim: Mapping,
    layout: LayoutReport,
    batches: BatchReport,
    update: MicroBatches,
    without_grad: MicroBatches,
    device: str | None,
    *,
    reference: MicroBatches | None = None,
    **more: Any,
) -> MemoryEstimate:
    shape = _shape(model)
    if layout.data is None or (shape.num_experts and layout.expert_data is None):
        raise ValueError("the ranks do not divide into the layout")
    overrides, mtp = dict(engine["override_transformer_config"] or {}), model["mtp"]
    tokens, without = (_tokens(part, layout, batches) for part in (update, without_grad))
    return estimate_memory(
        shape,
        Layout.of_engine(engine, layout.world_size),
        max_tokens_per_rank=tokens,
        max_tokens_without_grad=without,
        max_tokens_of_reference=None if reference is None else _tokens(reference, layout, batches),
        num_micro_batches=update.most,
        dtype=engine["dtype"],
        use_distributed_optimizer=engine["use_distributed_optimizer"],
        recompute=overrides,
        optimizer=optim,
        ddp=engine["override_ddp_config"],
        # A CPU has no other memory to move anything to.
        param_offload=engine["param_offload"] and device != "cpu",
        optimizer_offload=engine["optimizer_offload"] and device != "cpu",
        reference=reference is not None,
        saves=batches.steps.save_every is not None,
        mtp_enable=bool(mtp["enable"]),
        mtp_train=bool(mtp["enable"] and mtp["enable_train"]),
        packed=bool(model["use_remove_padding"]),
        transformer_engine=device != "cpu",
        **more,
    )
