# SPDX-License-Identifier: Apache-2.0
"""How much memory one rank needs, before anything is built: each part in bytes, with its formula.

Only what this project's engine holds for certain is counted, in the sizes in which it holds it (docs/memory.md). No
constant is invented for what cannot be known (``NOT_COUNTED``). Neither torch nor transformers is imported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from verl.utils.activation_memory import kept_by_layer, stage_activations
from verl.utils.model_size import (
    Layout,
    ModelShape,
    as_built,
    num_parameters,
    padded_numel,
    parameter_groups,
    parameters_on_rank,
)

__all__ = [
    "NOT_COUNTED",
    "Layout",
    "MemoryEstimate",
    "MemoryPart",
    "MemorySettings",
    "RolloutLoad",
    "combine",
    "estimate_memory",
    "estimate_stages",
]

_SIZES = {"bfloat16": 2, "bf16": 2, "float16": 2, "float32": 4, "fp32": 4, "float64": 8, "fp64": 8}
_FLOAT32 = 4
_CHUNK_ELEMENTS = 1 << 22  # of verl.utils.megatron.tensor_parallel: what one temporary over the logits may hold
_LOSS_TEMPORARIES, _LOG_PROB_TEMPORARIES, _SAMPLING_COPIES = 6, 3, 3
_NOT_MODELLED = ("use_precision_aware_optimizer", "optimizer_cpu_offload")

# Phases of a step, in their order; docs/memory.md says what is on the device in each.
GENERATE, LOG_PROB, REF_LOG_PROB, UPDATE = "generate", "log_prob", "ref_log_prob", "update"
UPDATE_WEIGHTS, SAVE = "update_weights", "save_checkpoint"

NOT_COUNTED = (
    "the allocator's fragmentation and caches, and the CUDA context",
    "buffers of NCCL, one set for each process group",
    "workspaces of TransformerEngine, cuBLAS and the attention kernels",
    "gradients of activations in the layer that the backward works on, and all-gathered inputs of its matrices",
    "experts that get more than their even share of tokens",
    "images: activations of the vision tower",
    "the rollout's own forward pass: attention masks and hidden states of a prefill",
    "building the engines, when weights lie both in their buffers and outside them for a moment",
    "tensors in transit while weights are copied to the rollout or saved",
    "host memory but for what is offloaded: processes, data, Ray's object store, and while a checkpoint is written 12 "
    "bytes and more for each parameter of a rank",
)


@dataclass(frozen=True)
class MemoryPart:
    """One part. ``phases`` names when it is on the device; empty: always. ``host``: it is in host memory otherwise,
    and not made anew."""

    name: str
    bytes: int
    formula: str
    phases: tuple[str, ...] = ()
    host: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """Parts of the rank that needs most.

    Attributes:
        parts: in the order in which they are built.
        pipeline_stage: the stage they are of.
        phases: bytes on the device in each phase of a step: what is always there and what the phase adds.
        host_bytes: host memory that a rank's offloaded parts take between their phases; of the stage that needs most of
            it, which may be another one.
        assumptions: what the figures rest on in this very case.
        not_counted: what is left out always.
    """

    parts: tuple[MemoryPart, ...]
    pipeline_stage: int
    phases: dict[str, int]
    host_bytes: int = 0
    assumptions: tuple[str, ...] = ()
    not_counted: tuple[str, ...] = NOT_COUNTED

    @property
    def worst_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def total(self) -> int:
        """Bytes in the worst phase."""
        return self.phases[self.worst_phase]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        parts = [
            {"name": p.name, "bytes": p.bytes, "formula": p.formula, "phases": list(p.phases), "host": p.host}
            for p in self.parts
        ]
        return {
            "total": self.total,
            "worst_phase": self.worst_phase,
            "phases": dict(self.phases),
            "pipeline_stage": self.pipeline_stage,
            "host_bytes": self.host_bytes,
            "parts": parts,
            "assumptions": list(self.assumptions),
            "not_counted": list(self.not_counted),
        }


@dataclass(frozen=True)
class RolloutLoad:
    """What the in-process rollout ("hf") holds on every rank: the whole model, and a cache while it generates.

    ``rows``: responses generated at a time on one rank (``min(max_num_seqs, rows of the rank)``); ``tokens``:
    ``prompt_length + response_length``; ``gives_way``: ``free_cache_engine`` beside an actor: the model is on the
    device only while it generates, and new weights reach it in host memory.
    """

    rows: int
    tokens: int
    dtype: str = "bfloat16"
    gives_way: bool = True


def _phases(parts: tuple[MemoryPart, ...], names: tuple[str, ...]) -> dict[str, int]:
    always = sum(part.bytes for part in parts if not part.phases)
    return {name: always + sum(part.bytes for part in parts if name in part.phases) for name in names}


def _element_size(dtype: str, key: str) -> int:
    if dtype not in _SIZES:
        raise ValueError(f"{key}={dtype} is not known; known: {', '.join(_SIZES)}")
    return _SIZES[dtype]


@dataclass(frozen=True)
class _State:
    """Sizes of one rank's state: numbers trained, frozen, in buffers, in this rank's optimizer shard, and gathered at
    once to save one kind of the optimizer's state."""

    trained: int
    frozen: int
    buffers: int
    optimizer: int
    gathered: int
    words: str


def _state(
    shape: ModelShape,
    layout: Layout,
    pp_rank: int,
    *,
    distributed: bool,
    instances: int,
    mtp_trained: bool,
    value_head: bool,
    transformer_engine: bool,
) -> _State:
    groups = parameter_groups(shape, layout, pp_rank, value_head=value_head, transformer_engine=transformer_engine)
    trained = [g for g in groups if mtp_trained or g.component != "mtp"]
    frozen = sum(g.total for g in groups) - sum(g.total for g in trained)
    total = sum(g.total for g in trained)
    if not distributed:
        return _State(total, frozen, total, total, 0, f"{total:,} parameters, whole on every data-parallel rank")
    apart = layout.experts_apart
    kinds = [([g for g in trained if not (g.expert and apart)], layout.dp_cp, "dp x cp")]
    if apart:
        kinds.append(([g for g in trained if g.expert], layout.expert_dp, "expert dp"))
    buffers, shards, gathered, words = 0, 0, 0, []
    for members, ranks, what in kinds:
        if not members:
            continue
        ranks //= instances
        padded = padded_numel(members, ranks)
        shard = min(padded // ranks, sum(g.total for g in members))
        buffers, shards, gathered = buffers + padded, shards + shard, max(gathered, padded + padded // ranks)
        words.append(f"{padded:,} / {ranks} ({what})" if ranks > 1 else f"{shard:,}, not shared ({what} is 1)")
    return _State(total, frozen, buffers, shards, gathered, " + ".join(words))


def _host_bytes(parts: Iterable[MemoryPart]) -> int:
    return sum(part.bytes for part in parts if part.host)


def _weights(state: _State, size: int, phases: tuple[str, ...]) -> MemoryPart:
    numbers = state.buffers + state.frozen
    formula = f"{numbers:,} numbers x {size} bytes"
    if state.buffers != state.trained:
        formula += f" ({state.trained:,} parameters, padded in the optimizer's buffers)"
    if state.frozen:
        formula += f"; {state.frozen:,} of them frozen"
    return MemoryPart("weights", numbers * size, formula, phases, host=bool(phases))


def _gradients(state: _State, size: int, in_float32: bool, phases: tuple[str, ...]) -> MemoryPart:
    width = _FLOAT32 if in_float32 else size
    why = "float32, so that sums over micro-batches lose no bits" if in_float32 and size < width else "as the weights"
    formula = f"{state.buffers:,} numbers x {width} bytes ({why}); whole on every rank, in one buffer"
    return MemoryPart("gradients", state.buffers * width, formula, phases)


def _optimizer(state: _State, size: int, name: str, phases: tuple[str, ...]) -> MemoryPart:
    width = max(size, _FLOAT32)
    pieces = {"momentum": width} if name == "sgd" else {"first moment": width, "second moment": width}
    if size < _FLOAT32:
        pieces = {"float32 master weights": _FLOAT32} | pieces
    each = sum(pieces.values())
    words = " + ".join(f"{piece} {n}" for piece, n in pieces.items())
    formula = f"{state.optimizer:,} numbers ({state.words}) x {each} bytes ({words})"
    return MemoryPart("optimizer state", state.optimizer * each, formula, phases, host=bool(phases))


def _logits(
    name: str, shape: ModelShape, layout: Layout, tokens: int, size: int, tensors: int, temporaries: int, phase: str
) -> MemoryPart:
    width = shape.vocab_size // layout.tp
    rows = min(tokens, max(1, _CHUNK_ELEMENTS // width))
    temporary = temporaries * rows * width * max(size, _FLOAT32)
    count = f" x {tensors} (main head and prediction depths)" if tensors > 1 else ""
    over = ", overwritten by their gradient" if phase == UPDATE else ""
    formula = (
        f"{tokens:,} tokens x {width:,} columns x {size} bytes{count}{over}; "
        f"+ at most {temporaries} float32 temporaries of {rows:,} rows = {temporary:,}"
    )
    return MemoryPart(name, tokens * width * size * tensors + temporary, formula, (phase,))


def _rollout(shape: ModelShape, load: RolloutLoad) -> list[MemoryPart]:
    size = _element_size(load.dtype, "rollout.dtype")
    numbers = num_parameters(shape.without_mtp())["total"]
    copy = MemoryPart(
        "rollout's copy of the model",
        numbers * size,
        f"{numbers:,} parameters x {size} bytes: whole on every rank",
        (GENERATE,) if load.gives_way else (),
        host=load.gives_way,
    )
    heads = shape.num_heads if shape.is_mla else shape.num_kv_heads
    per_token = heads * (shape.query_head_dim + shape.value_head_dim)
    cells, layers = load.rows * load.tokens * per_token * size, shape.num_layers
    cache = MemoryPart(
        "rollout's KV cache",
        cells * (layers + 1),
        f"{load.rows:,} rows x {load.tokens:,} tokens x {per_token:,} numbers ({heads} heads x "
        f"({shape.query_head_dim} + {shape.value_head_dim})) x {size} bytes x ({layers} layers + 1 that is copied as "
        "it grows)",
        (GENERATE,),
    )
    columns = load.rows * shape.vocab_size
    sampling = MemoryPart(
        "rollout's logits",
        columns * (size + _SAMPLING_COPIES * _FLOAT32),
        f"{load.rows:,} rows x {shape.vocab_size:,} columns x ({size} + {_SAMPLING_COPIES} float32 copies x 4) bytes",
        (GENERATE,),
    )
    return [copy, cache, sampling]


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What the estimate depends on besides model and layout; the config key of each in brackets.

    Attributes:
        max_tokens_per_rank: tokens of the largest training micro-batch on one context rank: the token budget, or rows
            of a micro-batch x length / context_parallel_size.
        max_tokens_without_grad: likewise for log-probs; the training budget if None.
        max_tokens_of_reference: likewise for those of the reference policy; as ``max_tokens_without_grad`` if None.
        dtype: ``megatron.dtype``.
        use_distributed_optimizer: ``megatron.use_distributed_optimizer``.
        recompute: ``override_transformer_config``: the ``recompute_*`` keys and ``bias_activation_fusion`` are read.
        optimizer: ``optim``: ``optimizer`` and ``override_optimizer_config`` are read.
        ddp: ``override_ddp_config``: ``grad_reduce_in_fp32`` and ``num_distributed_optimizer_instances`` are read.
        forward_only: no optimizer: a reference policy on its own, or evaluation.
        param_offload: weights and gradients are on the device only while they are used. Here and in the next two
            keys, as far as there is a memory beside the host's: False for a CPU.
        optimizer_offload: the optimizer's state is on the device only during updates and while it is saved.
        num_micro_batches: of one update on a rank; None: at least as many as the pipeline needs.
        mtp_enable: ``model.mtp.enable``; without it the prediction layers are not built.
        mtp_train: ``model.mtp.enable_train``.
        value_head: a critic.
        saves: there are checkpoints, with the optimizer's state in them.
        reference: a reference policy in the same process, laid out alike.
        reference_offload: its ``param_offload``.
        rollout: the in-process rollout on the same rank, or None.
        packed: ``model.use_remove_padding``.
        transformer_engine: layers as on an accelerator, or as on a CPU.
    """

    max_tokens_per_rank: int
    max_tokens_without_grad: int | None = None
    max_tokens_of_reference: int | None = None
    dtype: str = "bfloat16"
    use_distributed_optimizer: bool = True
    recompute: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    ddp: Mapping[str, Any] | None = None
    forward_only: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    num_micro_batches: int | None = None
    mtp_enable: bool = False
    mtp_train: bool = False
    value_head: bool = False
    saves: bool = True
    reference: bool = False
    reference_offload: bool = False
    rollout: RolloutLoad | None = None
    packed: bool = True
    transformer_engine: bool = True

    def __post_init__(self) -> None:
        _element_size(self.dtype, "dtype")
        for name in ("max_tokens_per_rank", "max_tokens_without_grad", "max_tokens_of_reference"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name}={tokens} must be at least 1")

    @property
    def element_size(self) -> int:
        """Bytes of one weight."""
        return _SIZES[self.dtype]

    @property
    def tokens_without_grad(self) -> int:
        """Tokens of the largest micro-batch of log-probs."""
        return self.max_tokens_without_grad or self.max_tokens_per_rank

    @property
    def activations(self) -> dict[str, Any]:
        """What the tables of activations ask for."""
        return {
            "element_size": self.element_size,
            "overrides": dict(self.recompute or {}),
            "packed": self.packed,
            "transformer_engine": self.transformer_engine,
        }

    @property
    def phase_names(self) -> tuple[str, ...]:
        """Phases of a step, and the checkpoint after it."""
        trains = not self.forward_only
        there_is = {
            GENERATE: self.rollout is not None,
            LOG_PROB: True,
            REF_LOG_PROB: self.reference,
            UPDATE: trains,
            UPDATE_WEIGHTS: trains and self.rollout is not None,
            SAVE: trains and self.saves,
        }
        return tuple(phase for phase, found in there_is.items() if found)

    def only_in(self, *phases: str) -> tuple[str, ...]:
        """Those of ``phases`` that there are."""
        return tuple(phase for phase in self.phase_names if phase in phases)


def _training_parts(shape: ModelShape, layout: Layout, pp_rank: int, given: MemorySettings) -> list[MemoryPart]:
    size, ddp, trains = given.element_size, dict(given.ddp or {}), not given.forward_only
    mtp_trained = given.mtp_train and shape.mtp_layers > 0
    state = _state(
        shape,
        layout,
        pp_rank,
        distributed=given.use_distributed_optimizer and trains,
        instances=ddp.get("num_distributed_optimizer_instances") or 1,
        mtp_trained=mtp_trained,
        value_head=given.value_head,
        transformer_engine=given.transformer_engine,
    )
    in_use = given.only_in(LOG_PROB, UPDATE, UPDATE_WEIGHTS, SAVE)
    parts = [_weights(state, size, in_use if given.param_offload else ())]
    if not trains:
        return parts
    in_float32 = ddp.get("grad_reduce_in_fp32", size < _FLOAT32)
    parts.append(_gradients(state, size, in_float32, (UPDATE,) if given.param_offload else ()))
    name = dict(given.optimizer or {}).get("optimizer", "adam")
    parts.append(_optimizer(state, size, name, given.only_in(UPDATE, SAVE) if given.optimizer_offload else ()))
    if given.saves and state.gathered:
        formula = (
            f"{state.gathered:,} numbers x {_FLOAT32} bytes: one kind of the optimizer's state at a time, of the "
            "larger buffer, whole on every rank, and this rank's part of it"
        )
        parts.append(MemoryPart("optimizer state gathered to be saved", state.gathered * _FLOAT32, formula, (SAVE,)))
    tokens = given.max_tokens_per_rank
    kept = stage_activations(
        shape,
        layout,
        pp_rank,
        tokens,
        num_micro_batches=given.num_micro_batches,
        mtp_trained=mtp_trained,
        **given.activations,
    )
    parts.append(MemoryPart("activations", kept.bytes, kept.formula, (UPDATE,)))
    if pp_rank == layout.pp - 1 and not given.value_head:
        heads = 1 + (shape.mtp_layers if mtp_trained else 0)
        parts.append(_logits("logits", shape, layout, tokens, size, heads, _LOSS_TEMPORARIES, UPDATE))
    return parts


def _forward_parts(
    shape: ModelShape, layout: Layout, pp_rank: int, given: MemorySettings, what: str, tokens: int, phase: str
) -> list[MemoryPart]:
    """What a forward pass without gradients takes besides the weights."""
    kinds = [kept_by_layer(shape, layout, moe, **given.activations) for moe in set(shape.moe_layers)]
    each = ceil(max(sum(item.bytes for item in kept) for kept in kinds))
    formula = f"{tokens:,} tokens x {each:,} bytes: at most what one layer makes while it runs without gradients"
    parts = [MemoryPart(f"working memory of {what}", tokens * each, formula, (phase,))]
    if pp_rank == layout.pp - 1 and not given.value_head:
        name, size = f"logits of {what}", given.element_size
        parts.append(_logits(name, shape, layout, tokens, size, 1, _LOG_PROB_TEMPORARIES, phase))
    return parts


def _reference_parts(shape: ModelShape, layout: Layout, pp_rank: int, given: MemorySettings) -> list[MemoryPart]:
    engine = {"transformer_engine": given.transformer_engine}
    numbers = parameters_on_rank(shape, layout, pp_rank, **engine)["total"]
    formula = f"{numbers:,} parameters x {given.element_size} bytes, no buffers"
    weights = MemoryPart(
        "reference model's weights",
        numbers * given.element_size,
        formula,
        (REF_LOG_PROB,) if given.reference_offload else (),
        host=given.reference_offload,
    )
    tokens = given.max_tokens_of_reference or given.tokens_without_grad
    return [
        weights,
        *_forward_parts(shape, layout, pp_rank, given, "reference log-probs", tokens, REF_LOG_PROB),
    ]


def estimate_stages(shape: ModelShape, layout: Layout, **settings: Any) -> list[MemoryEstimate]:
    """Memory of a rank of each pipeline stage, for one engine and, with an actor, the reference and rollout beside it.

    Args:
        shape: of the whole model; prediction layers are dropped unless ``mtp_enable``.
        layout: sizes of the parallel groups.
        settings: fields of :class:`MemorySettings`; ``max_tokens_per_rank`` must be given.

    Raises:
        ValueError: the layout does not divide the model, a dtype is not known, or there are no tokens.
    """
    given, whole = MemorySettings(**settings), as_built(shape, layout)
    plain = whole.without_mtp()
    built = whole if given.mtp_enable and not given.forward_only else plain
    made = []
    for pp_rank in range(layout.pp):
        parts = _training_parts(built, layout, pp_rank, given)
        tokens = given.tokens_without_grad
        parts += _forward_parts(built, layout, pp_rank, given, "log-probs", tokens, LOG_PROB)
        if given.reference:
            parts += _reference_parts(plain, layout, pp_rank, given)
        if given.rollout:
            parts += _rollout(shape, given.rollout)  # transformers builds it, so the layout changes nothing
        sums, host = _phases(tuple(parts), given.phase_names), _host_bytes(parts)
        made.append(MemoryEstimate(tuple(parts), pp_rank, sums, host, _assumptions(built, layout, given)))
    return made


def estimate_memory(shape: ModelShape, layout: Layout, **settings: Any) -> MemoryEstimate:
    """The stage of :func:`estimate_stages` that needs most; the same arguments."""
    stages = estimate_stages(shape, layout, **settings)
    worst = max(stages, key=lambda estimate: estimate.total)
    return replace(worst, host_bytes=max(estimate.host_bytes for estimate in stages))


def _assumptions(shape: ModelShape, layout: Layout, given: MemorySettings) -> tuple[str, ...]:
    found = []
    if shape.num_experts:
        found.append("each expert gets the same number of tokens")
    if given.transformer_engine:
        found.append(
            "activations are those of TransformerEngine's layers with flash attention, by formula, not measured"
        )
    if not given.forward_only:
        found.append("one gradient buffer for each kind of parameter (overlap_grad_reduce pads more, by bucket)")
    override = dict(dict(given.optimizer or {}).get("override_optimizer_config") or {})
    found += [
        f"override_optimizer_config.{name} is set, and the optimizer's state is counted as without it"
        for name in _NOT_MODELLED
        if override.get(name)
    ]
    if layout.pp > 1:
        found.append("all stages run the same number of micro-batches in 1F1B order")
    return tuple(found)


def combine(estimates: Mapping[str, MemoryEstimate]) -> MemoryEstimate:
    """Several engines in one process, such as ``{"actor": ..., "critic": ...}``.

    What is always on the device adds up; phases do not overlap and keep their engine's name. Each engine is taken at
    its own worst pipeline stage, which may not be the same one: then the sum is an upper bound.
    """
    parts = tuple(
        replace(p, name=f"{key}: {p.name}", phases=tuple(f"{key} {phase}" for phase in p.phases))
        for key, estimate in estimates.items()
        for p in estimate.parts
    )
    names = tuple(f"{key} {phase}" for key, estimate in estimates.items() for phase in estimate.phases)
    stages = {estimate.pipeline_stage for estimate in estimates.values()}
    assumptions = dict.fromkeys(text for estimate in estimates.values() for text in estimate.assumptions)
    host = sum(estimate.host_bytes for estimate in estimates.values())
    return MemoryEstimate(parts, max(stages), _phases(parts, names), host, tuple(assumptions))
