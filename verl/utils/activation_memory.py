# SPDX-License-Identifier: Apache-2.0
"""What the forward pass keeps for the backward pass, layer by layer, in bytes for each token of a rank.

Two tables of the same layer: megatron-core's own layers with this project's attention, as they run on a CPU (measured:
``tests/utils/test_memory_of_built_models.py``), and TransformerEngine's layers with flash attention, as they run on an
accelerator (derived from the sources of megatron-core 0.19.2, measured nowhere yet). The split over tensor ranks
follows Korthikanti et al. 2022, arXiv 2205.05198: outside attention and MLP a token's numbers are split only under
sequence parallelism.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from verl.utils.model_size import Layout, ModelShape

__all__ = ["Activations", "Kept", "Recompute", "kept_by_layer", "stage_activations"]

_FLOAT32 = 4
# Architectures for which megatron-bridge 0.6.2 fuses the gated activation (bias_activation_fusion).
_FUSED_ACTIVATION = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "LlamaForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
# Of each chosen expert of a token: indices (int64, three of them, one with two columns) and its probability.
_ROUTING_BYTES = 36


class Kept(NamedTuple):
    """``bytes`` for each token of a rank; ``part``: the piece of the layer, as recomputation names it."""

    what: str
    part: str
    bytes: Fraction


@dataclass(frozen=True)
class Recompute:
    """megatron-core's ``recompute_*`` settings."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, Any]) -> "Recompute":
        """Read from ``override_transformer_config``."""
        modules = overrides.get("recompute_modules")
        return cls(
            granularity=overrides.get("recompute_granularity"),
            method=overrides.get("recompute_method"),
            num_layers=overrides.get("recompute_num_layers"),
            modules=("core_attn",) if modules is None else tuple(modules),
        )


@dataclass(frozen=True)
class Activations:
    """Of one pipeline stage.

    Attributes:
        kept: bytes that one micro-batch keeps until its backward.
        recomputed: bytes that appear while the largest recomputed piece runs again.
        released: of ``kept``, what the backward has let go of before any piece runs again: the final norm's.
        micro_batches: how many micro-batches keep theirs at once; a fraction under virtual stages.
        formula: how ``kept`` comes about, in words and numbers.
    """

    kept: int
    recomputed: int
    released: int
    micro_batches: Fraction
    formula: str

    @property
    def bytes(self) -> int:
        """The most that is held at once."""
        return ceil(self.kept * self.micro_batches) + max(self.recomputed - self.released, 0)


def _fused_activation(shape: ModelShape, overrides: Mapping[str, Any], transformer_engine: bool) -> bool:
    if not transformer_engine:
        return False
    given = overrides.get("bias_activation_fusion")
    return shape.architecture in _FUSED_ACTIVATION if given is None else bool(given)


def _norm_copies(transformer_engine: bool) -> int:
    # Input and output; megatron-core's own norm also keeps the normalised values before the weight.
    return 2 if transformer_engine else 3


def _attention(shape: ModelShape, layout: Layout, size: int, packed: bool, te: bool) -> list[Kept]:
    tp, heads = layout.tp, shape.num_heads
    qk, v = shape.query_head_dim, shape.value_head_dim
    made = []

    def keep(what: str, part: str, elements: int, divisor: int = tp, width: int = size) -> None:
        if elements:
            made.append(Kept(what, part, Fraction(elements * width, divisor)))

    if shape.is_mla:
        split = tp if layout.sequence_parallel else 1
        copies = _norm_copies(te)
        low = shape.q_lora_rank * copies + shape.kv_lora_rank * copies + shape.qk_rope_head_dim
        keep("compressed queries and keys", "attention", low, split)
        keep("their norms' statistics", "attention", 2 if shape.q_lora_rank else 1, split, _FLOAT32)
        if packed:
            v = qk  # values are padded to the keys' width
        key_heads, part, rope = heads, "mla_up_proj", shape.qk_rope_head_dim
    else:
        key_heads, part, rope = shape.num_kv_heads, "attention", qk
        if shape.qk_norm:
            before = (heads + key_heads) * qk
            if not te:
                # The fused matrix's output, which keys are a view of, and the normalised values before the weight;
                # queries of several groups are copied out of it.
                before += (heads + 2 * key_heads) * qk + (heads * qk if key_heads > tp else 0)
            keep("queries and keys before their norm", "attention", before)
            keep("their norms' statistics", "attention", heads + key_heads, tp, _FLOAT32)
    if not te:
        keep("rotary angles", "attention", 4 * rope, 1)
    whole = 1 if te else layout.cp  # keys and values of all context ranks are gathered
    keep("queries, keys, values", part, heads * qk + key_heads * (qk + v) * whole)
    keep("attention output", "attention", heads * shape.value_head_dim)
    if not te or (shape.is_mla and packed):
        keep("attention output before it is put in order", "core_attn", heads * v)
    keep("softmax statistics", "core_attn", heads, tp, _FLOAT32)
    return made


def _gated(what: str, part: str, width: int, fused: bool, size: int, divisor: int, extra: int = 0) -> list[Kept]:
    """Both halves of the first matrix's output, then the activation; unfused also silu's output and the second half."""
    kept = [Kept(f"{what}: first matrix", part, Fraction(2 * width * size, divisor))]
    activation = (1 if fused else 3 + extra) * width * size
    return [*kept, Kept(f"{what}: activation", "moe_act" if part == "moe" else part, Fraction(activation, divisor))]


def kept_by_layer(
    shape: ModelShape,
    layout: Layout,
    moe: bool,
    *,
    element_size: int,
    overrides: Mapping[str, Any],
    packed: bool = True,
    transformer_engine: bool = True,
) -> list[Kept]:
    """What one decoder layer keeps without recomputation, for each token of a rank.

    Experts are assumed to be loaded alike: a rank computes ``tokens * experts_per_token * expert_tp / tp`` rows.
    """
    te, size, hidden, tp = transformer_engine, element_size, shape.hidden_size, layout.tp
    split = tp if layout.sequence_parallel else 1
    fused = _fused_activation(shape, overrides, te)
    norm, statistics = _norm_copies(te) * hidden, Fraction(_FLOAT32, split)
    kept = [Kept("norm", "attention", Fraction(norm * size, split) + statistics)]
    kept += _attention(shape, layout, size, packed, te)
    kept.append(Kept("second norm", "norm", Fraction(norm * size, split) + statistics))
    if not moe:
        return kept + _gated("MLP", "mlp", shape.ffn_size, fused, size, tp)
    rows = Fraction(shape.experts_per_token * layout.expert_tp, tp)
    kept.append(Kept("routing", "moe", Fraction(_ROUTING_BYTES * shape.experts_per_token, tp)))
    kept.append(Kept("experts: input", "moe", rows * (hidden * size + _FLOAT32)))
    for item in _gated("experts", "moe", shape.moe_ffn_size, fused, size, layout.expert_tp, extra=1):
        kept.append(item._replace(bytes=rows * item.bytes))
    if shape.shared_ffn_size:
        shared = _gated("shared experts", "shared_experts", shape.shared_ffn_size, True, size, tp)
        if not fused:
            shared.append(Kept("shared experts: silu", "shared_experts", Fraction(shape.shared_ffn_size * size, tp)))
        kept += shared
    return kept


def _dropped(recompute: Recompute, te: bool) -> set[str]:
    """Parts of a layer that selective recomputation does not keep."""
    if recompute.granularity != "selective":
        return set()
    names = set(recompute.modules)
    dropped = names & {"core_attn", "mlp", "moe_act", "shared_experts", "mla_up_proj"}
    return dropped | ({"moe", "moe_act", "shared_experts"} if "moe" in names else set())


class _Layer(NamedTuple):
    kept: Fraction
    recomputed: Fraction
    everything: Fraction


def _layer(kept: list[Kept], recompute: Recompute, te: bool) -> _Layer:
    dropped = _dropped(recompute, te)
    gone = sum((item.bytes for item in kept if item.part in dropped), Fraction(0))
    everything = sum((item.bytes for item in kept), Fraction(0))
    return _Layer(everything - gone, gone, everything)


def _chunks(layers: list[_Layer], recompute: Recompute, entering: Fraction) -> tuple[Fraction, Fraction]:
    """(kept, recomputed) for each token of a run of layers that one forward goes through."""
    nothing = Fraction(0)
    if recompute.granularity != "full":
        kept = sum((layer.kept for layer in layers), nothing)
        return kept, max((layer.recomputed for layer in layers), default=nothing)
    number = recompute.num_layers or 1
    if recompute.method == "block":
        first, rest = layers[:number], layers[number:]
        groups = [[layer] for layer in first]
    else:
        rest, groups = [], [layers[i : i + number] for i in range(0, len(layers), number)]
    again = max((sum((layer.everything for layer in group), nothing) for group in groups), default=entering)
    again -= entering  # which is kept already
    return entering * len(groups) + sum((layer.everything for layer in rest), nothing), again


def _in_flight(layout: Layout, pp_rank: int, num_micro_batches: int | None) -> Fraction:
    """Micro-batches whose activations a stage holds at once (1F1B; interleaved under virtual stages)."""
    if layout.pp == 1:
        return Fraction(1)
    chunks = layout.vpp or 1
    if chunks == 1:
        most = layout.pp - pp_rank
    else:
        most = (layout.pp - pp_rank - 1) * 2 + (chunks - 1) * layout.pp + 1
    if num_micro_batches is not None:
        most = min(most, num_micro_batches * chunks)
    return Fraction(most, chunks)


def stage_activations(
    shape: ModelShape,
    layout: Layout,
    pp_rank: int,
    tokens: int,
    *,
    element_size: int,
    overrides: Mapping[str, Any],
    num_micro_batches: int | None = None,
    mtp_trained: bool = False,
    packed: bool = True,
    transformer_engine: bool = True,
) -> Activations:
    """Activations of one pipeline stage, logits left out.

    Args:
        shape, layout, pp_rank: the model as built and the stage.
        tokens: of one micro-batch on one rank, after the split over context ranks, before that over tensor ranks.
        element_size: bytes of the parameters' type.
        overrides: ``override_transformer_config``: ``recompute_*`` and ``bias_activation_fusion``.
        num_micro_batches: of one step on a rank; None: more than the pipeline has stages.
        mtp_trained: the prediction layers run.
        packed: ``model.use_remove_padding``.
        transformer_engine: which of the two tables.
    """
    te, size, hidden = transformer_engine, element_size, shape.hidden_size
    split = layout.tp if layout.sequence_parallel else 1
    settings: dict[str, Any] = dict(element_size=size, overrides=overrides, packed=packed, transformer_engine=te)
    recompute, entering = Recompute.from_overrides(overrides), Fraction(hidden * size, split)
    by_kind = {moe: kept_by_layer(shape, layout, moe, **settings) for moe in set(shape.moe_layers)}
    cost = {moe: _layer(kept, recompute, te) for moe, kept in by_kind.items()}
    chunks = [[shape.moe_layers[i] for i in chunk] for chunk in layout.pipeline.layers(shape.num_layers)[pp_rank]]
    kinds = [moe for chunk in chunks for moe in chunk]
    kept, again = Fraction(0), Fraction(0)
    for chunk in filter(None, chunks):
        some, peak = _chunks([cost[moe] for moe in chunk], recompute, entering)
        kept, again = kept + some, max(again, peak)
    words = [
        f"{kinds.count(moe)} {'MoE' if moe else 'dense'} layers of {_number(cost[moe].everything)} bytes a token "
        f"({', '.join(f'{item.what} {_number(item.bytes)}' for item in kept_items)})"
        for moe, kept_items in by_kind.items()
        if moe in kinds
    ]
    last = Fraction(0)
    if pp_rank == layout.pp - 1:
        last = Fraction(_norm_copies(te) * hidden * size + _FLOAT32, split)
        kept += last
        words.append(f"the final norm {_number(last)}")
        if mtp_trained and shape.mtp_layers:
            depth = Fraction((6 if te else 9) * hidden * size + 3 * _FLOAT32, split)
            inner = entering if recompute.granularity == "full" else cost[shape.moe_layers[-1]].kept
            kept += shape.mtp_layers * (depth + inner)
            words.append(f"{shape.mtp_layers} prediction layers of {_number(depth + inner)}")
    if recompute.granularity:
        words.append(f"after {recompute.granularity} recomputation {_number(kept)} bytes a token are kept")
    flight = _in_flight(layout, pp_rank, num_micro_batches)
    total, more, released = (ceil(each * tokens) for each in (kept, again, last))
    formula = (
        f"{tokens:,} tokens x {_number(kept)} bytes = {total:,} a micro-batch: {'; '.join(words)}; "
        f"x {_number(flight)} micro-batch{'' if flight == 1 else 'es'} in flight"
    )
    if more > released:
        formula += f"; + {more:,} while the largest piece is recomputed"
        formula += f", less {released:,} of the final norm, gone by then" if released else ""
    return Activations(total, more, released, flight, formula)


def _number(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"
