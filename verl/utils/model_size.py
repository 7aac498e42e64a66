# SPDX-License-Identifier: Apache-2.0
"""How many parameters a model has, in all and on one rank of a Megatron layout, from its config.json alone.

Nothing is built and neither torch nor transformers is imported. The rules are those of what megatron-core 0.19.2 builds
through megatron-bridge 0.6.2 for this engine; ``tests/utils/test_memory_of_built_models.py`` holds them against
real models in real worlds, parameter for parameter.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import Any, NamedTuple

from verl.utils.hf_config import EXPERT_COUNTS, MTP_COUNTS, architecture_of
from verl.utils.model_split import (
    PipelineSplit,
    SplitError,
    Widths,
    built_layers,
    tensor_rules,
    whole_number,
)

__all__ = [
    "COMPONENTS",
    "KNOWN_ARCHITECTURES",
    "Layout",
    "ModelShape",
    "ParameterGroup",
    "VisionShape",
    "as_built",
    "layout_problems",
    "num_parameters",
    "padded_numel",
    "parameter_groups",
    "parameters_on_rank",
    "read_model_shape",
    "stage_layers",
]

COMPONENTS = (
    "embedding",
    "output_head",
    "attention",
    "dense_mlp",
    "router",
    "experts",
    "shared_experts",
    "norms",
    "vision",
    "mtp",
)


@dataclass(frozen=True)
class VisionShape:
    """Vision tower of Qwen3-VL: ``depth`` blocks of ``hidden_size``, mergers into the text model's ``out_hidden_size``.

    ``deepstack`` counts the extra mergers that feed inner layers; ``patch_elements`` is the numbers in one patch.
    """

    depth: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_positions: int
    patch_elements: int
    out_hidden_size: int
    merge_size: int
    deepstack: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, free of its family's key names.

    Attributes:
        architecture: the class name in config.json's ``architectures``.
        vocab_multiple: a vocabulary that is padded becomes a multiple of it on each tensor rank.
        ffn_size: width of a dense MLP; all MLPs here are gated (two matrices in, one out).
        tied: embedding and output head are one matrix.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: queries and keys are normalised per head.
        kv_lora_rank: above 0 for multi-head latent attention, with ``q_lora_rank`` (0: queries are not compressed),
            ``qk_nope_head_dim``, ``qk_rope_head_dim`` and ``v_head_dim``.
        moe_layers: for each decoder layer, whether its MLP is a mixture of experts.
        shared_ffn_size: width of all shared experts together, 0 without.
        mtp_layers: depths of multi-token prediction; each holds a copy of the last decoder layer's structure.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_multiple: int = 1
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    moe_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_size: int = 0
    shared_ffn_size: int = 0
    mtp_layers: int = 0
    vision: VisionShape | None = None

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def query_head_dim(self) -> int:
        """Width of one query (and key) head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.is_mla else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.is_mla else self.head_dim

    def without_mtp(self) -> "ModelShape":
        """The same model as it is built without its multi-token prediction layers."""
        return replace(self, mtp_layers=0)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups.

    ``etp`` None means ``tp``, as in the engine. From ``override_transformer_config``: ``split`` says how layers go over
    the pipeline stages (None: evenly), ``num_layers`` how many are built (None: the model's), ``pads_vocabulary``
    whether the vocabulary is padded, to a multiple of ``vocabulary_multiple`` on each tensor rank (None: the model's).
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    world_size: int = 1
    sequence_parallel: bool = True
    split: PipelineSplit | None = None
    num_layers: int | None = None
    pads_vocabulary: bool = False
    vocabulary_multiple: int | None = None

    @classmethod
    def of_engine(cls, engine: Mapping[str, Any], world_size: int) -> "Layout":
        """From an engine's node of the config."""
        overrides = engine["override_transformer_config"] or {}
        return cls(
            tp=engine["tensor_model_parallel_size"],
            pp=engine["pipeline_model_parallel_size"],
            vpp=engine["virtual_pipeline_model_parallel_size"],
            cp=engine["context_parallel_size"],
            ep=engine["expert_model_parallel_size"],
            etp=engine["expert_tensor_parallel_size"],
            world_size=world_size,
            sequence_parallel=bool(engine["sequence_parallel"]),
            split=PipelineSplit.of_engine(engine),
            num_layers=built_layers(overrides, None),
            pads_vocabulary=bool(overrides.get("should_pad_vocab")),
            vocabulary_multiple=whole_number(overrides.get("make_vocab_size_divisible_by")),
        )

    @property
    def pipeline(self) -> PipelineSplit:
        """How layers go over the pipeline stages."""
        return self.split or PipelineSplit(stages=self.pp, chunks=self.vpp or 1)

    @property
    def expert_tp(self) -> int:
        """Expert tensor parallel size."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Groups that hold different data: world / (tp * pp * cp)."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def dp_cp(self) -> int:
        """Ranks over which gradients and optimizer state of everything but experts are shared: dp * cp."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts: world / (etp * ep * pp)."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def experts_apart(self) -> bool:
        """Whether Megatron reduces expert gradients over groups of their own."""
        return self.ep > 1 or self.expert_tp != self.tp


class ParameterGroup(NamedTuple):
    """``copies`` parameters of ``numel`` numbers each on one rank; ``expert``: a routed expert's."""

    component: str
    numel: int
    copies: int = 1
    expert: bool = False

    @property
    def total(self) -> int:
        """All numbers of the group."""
        return self.numel * self.copies


# ------------------------------------------------------------------ from config.json
def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(_first(config, *EXPERT_COUNTS, default=0))


def _base(config: Mapping[str, Any], architecture: str, **more: Any) -> ModelShape:
    missing = [
        key
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if config.get(key) is None
    ]
    if missing:
        raise ValueError(f"config.json of {architecture} lacks {', '.join(missing)}")
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    settings: dict[str, Any] = dict(
        architecture=architecture,
        vocab_size=vocabulary,
        # megatron-bridge's, unless a family's bridge has its own: the largest power of 2, up to 128, that divides it.
        vocab_multiple=min(128, vocabulary & -vocabulary),
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_first(config, "num_key_value_heads", default=heads),
        head_dim=_first(config, "head_dim", default=config["hidden_size"] // heads),
        ffn_size=config["intermediate_size"],
        tied=bool(_first(config, "tie_word_embeddings", default=False)),
        qkv_bias=bool(_first(config, "attention_bias", default=False)),
        moe_layers=(False,) * config["num_hidden_layers"],
        mtp_layers=_first(config, *MTP_COUNTS, default=0),
    )
    return ModelShape(**settings | more)


def _qwen2(config: Mapping[str, Any], architecture: str) -> ModelShape:
    return _base(config, architecture, qkv_bias=True)


def _qwen3(config: Mapping[str, Any], architecture: str) -> ModelShape:
    return _base(config, architecture, qk_norm=True)


def _qwen3_moe(config: Mapping[str, Any], architecture: str) -> ModelShape:
    if not _num_experts(config):
        raise KeyError("num_experts")
    step, dense = _first(config, "decoder_sparse_step", default=1), set(config.get("mlp_only_layers") or ())
    layers = range(config["num_hidden_layers"])
    return _base(
        config,
        architecture,
        qk_norm=True,
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        num_experts=_num_experts(config),
        experts_per_token=config["num_experts_per_tok"],
        moe_ffn_size=config["moe_intermediate_size"],
    )


def _qwen3_vl(config: Mapping[str, Any], architecture: str) -> ModelShape:
    text, vision = dict(config["text_config"]), config["vision_config"]
    text["tie_word_embeddings"] = _first(config, "tie_word_embeddings", default=False)
    tower = VisionShape(
        depth=vision["depth"],
        hidden_size=vision["hidden_size"],
        ffn_size=vision["intermediate_size"],
        num_heads=vision["num_heads"],
        num_positions=vision["num_position_embeddings"],
        patch_elements=_first(vision, "in_channels", default=3)
        * vision["temporal_patch_size"]
        * vision["patch_size"] ** 2,
        out_hidden_size=vision["out_hidden_size"],
        merge_size=vision["spatial_merge_size"],
        deepstack=len(vision.get("deepstack_visual_indexes") or ()),
    )
    read = _qwen3_moe if _num_experts(text) else _qwen3
    return replace(read(text, architecture), vision=tower)


def _sparse_after_dense(config: Mapping[str, Any], architecture: str, **more: Any) -> ModelShape:
    first, layers = _first(config, "first_k_dense_replace", default=0), config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types")
    moe = tuple(kind == "sparse" for kind in kinds) if kinds else tuple(i >= first for i in range(layers))
    shared = _first(config, "n_shared_experts", "num_shared_experts", default=0)
    return _base(
        config,
        architecture,
        moe_layers=moe,
        num_experts=_num_experts(config),
        experts_per_token=config["num_experts_per_tok"],
        moe_ffn_size=config["moe_intermediate_size"],
        shared_ffn_size=shared * config["moe_intermediate_size"],
        **more,
    )


def _deepseek_v3(config: Mapping[str, Any], architecture: str) -> ModelShape:
    mla = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    more = {name: config[name] for name in mla} | {"q_lora_rank": config.get("q_lora_rank") or 0}
    return _sparse_after_dense(config, architecture, tied=False, qkv_bias=False, vocab_multiple=1280, **more)


def _glm4_moe(config: Mapping[str, Any], architecture: str) -> ModelShape:
    return _sparse_after_dense(config, architecture, tied=False, qk_norm=bool(config.get("use_qk_norm")))


def _hy_v3(config: Mapping[str, Any], architecture: str) -> ModelShape:
    return _sparse_after_dense(config, architecture, qk_norm=True, qkv_bias=False)


_FAMILIES: dict[str, Callable[[Mapping[str, Any], str], ModelShape]] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeForCausalLM": _glm4_moe,
    "HYV3ForCausalLM": _hy_v3,
    "LlamaForCausalLM": _base,
    "MiMoForCausalLM": _qwen2,
    "MistralForCausalLM": _base,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
}
KNOWN_ARCHITECTURES = tuple(_FAMILIES)


def read_model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The sizes of a model from its Hugging Face config.json as a dict.

    Multi-token prediction layers that the configuration names are part of the shape; the engine builds them only under
    ``model.mtp.enable`` (:meth:`ModelShape.without_mtp`). A bias on other projections than queries, keys and values,
    and the routers' correction bias (a buffer), are not counted.

    Raises:
        ValueError: for an architecture that is not among ``KNOWN_ARCHITECTURES``, or a size that is missing.
    """
    name = architecture_of(config) or "(no architectures in config.json)"
    family = _FAMILIES.get(name)
    if family is None:
        raise ValueError(f"sizes of architecture {name} are not known; known: {', '.join(KNOWN_ARCHITECTURES)}")
    try:
        return family(config, name)
    except KeyError as error:
        raise ValueError(f"config.json of {name} lacks {error.args[0]}") from None


# ------------------------------------------------------------------ what a rank holds
def as_built(shape: ModelShape, layout: Layout) -> ModelShape:
    """The sizes that an engine builds: the layout's number of layers, and its padded vocabulary."""
    layers, vocabulary = layout.num_layers or shape.num_layers, shape.vocab_size
    kinds = shape.moe_layers[:layers] + shape.moe_layers[-1:] * (layers - len(shape.moe_layers))
    if layout.pads_vocabulary:
        multiple = (layout.vocabulary_multiple or shape.vocab_multiple) * layout.tp
        vocabulary = ceil(vocabulary / multiple) * multiple
    return replace(shape, num_layers=layers, moe_layers=kinds, vocab_size=vocabulary)


def _widths(shape: ModelShape, layout: Layout) -> Widths:
    return Widths(
        heads=shape.num_heads,
        kv_heads=None if shape.is_mla else shape.num_kv_heads,
        dense=None if all(shape.moe_layers) else shape.ffn_size,
        shared=shape.shared_ffn_size,
        expert=shape.moe_ffn_size if layout.etp is None else None,
        vocabulary=None if layout.pads_vocabulary else shape.vocab_size,
        vision_heads=shape.vision.num_heads if shape.vision else None,
        context=layout.cp,
    )


def layout_problems(shape: ModelShape, layout: Layout) -> list[str]:
    """What keeps Megatron from building the model in this layout: one sentence each, empty if nothing does."""
    found = []

    def divides(size: int, value: int, what: str, by: str) -> None:
        if value % size:
            found.append(f"{what}={value} cannot be divided by {by}={size}")

    divides(layout.tp * layout.pp * layout.cp, layout.world_size, "world size", "tensor * pipeline * context")
    if shape.num_experts:
        etp, ep = layout.expert_tp, layout.ep
        divides(ep, shape.num_experts, "number of experts", "expert_model_parallel_size")
        if layout.etp is not None:
            divides(etp, shape.moe_ffn_size, "moe_intermediate_size", "expert_tensor_parallel_size")
        divides(etp * ep * layout.pp, layout.world_size, "world size", "expert tensor * expert * pipeline")
    found += [
        f"tensor_model_parallel_size={layout.tp} cannot divide {rule.words.rstrip(',')}"
        for rule in tensor_rules(_widths(shape, layout))
        if not rule.allows(layout.tp)
    ]
    try:
        layout.pipeline.layers(layout.num_layers or shape.num_layers)
    except SplitError as error:
        found.append(str(error))
    return found


def stage_layers(shape: ModelShape, layout: Layout, pp_rank: int) -> list[int]:
    """Decoder layers (from 0) of one pipeline stage, all its virtual stages together."""
    return [layer for chunk in layout.pipeline.layers(shape.num_layers)[pp_rank] for layer in chunk]


def _attention(shape: ModelShape, tp: int, transformer_engine: bool) -> Iterator[ParameterGroup]:
    hidden, heads, query = shape.hidden_size, shape.num_heads, shape.query_head_dim
    if not shape.is_mla:
        width = (heads + 2 * shape.num_kv_heads) * query
        yield ParameterGroup("attention", hidden * width // tp)
        if shape.qkv_bias:
            yield ParameterGroup("attention", width // tp)
        yield ParameterGroup("attention", heads * query * hidden // tp)
        if shape.qk_norm:
            yield ParameterGroup("norms", query, 2)
        return
    # The compressing matrices are whole on every tensor rank with TransformerEngine, split without it.
    down = 1 if transformer_engine else tp
    if shape.q_lora_rank:
        yield ParameterGroup("attention", hidden * shape.q_lora_rank // down)
        yield ParameterGroup("attention", shape.q_lora_rank * heads * query // tp)
        yield ParameterGroup("norms", shape.q_lora_rank)
    else:
        yield ParameterGroup("attention", hidden * heads * query // tp)
    yield ParameterGroup("attention", hidden * (shape.kv_lora_rank + shape.qk_rope_head_dim) // down)
    yield ParameterGroup("attention", shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim) // tp)
    yield ParameterGroup("norms", shape.kv_lora_rank)
    yield ParameterGroup("attention", heads * shape.v_head_dim * hidden // tp)


def _gated_mlp(
    component: str, hidden: int, width: int, copies: int = 1, expert: bool = False
) -> Iterator[ParameterGroup]:
    yield ParameterGroup(component, 2 * hidden * width, copies, expert)
    yield ParameterGroup(component, width * hidden, copies, expert)


def _decoder_layer(shape: ModelShape, layout: Layout, moe: bool, transformer_engine: bool) -> Iterator[ParameterGroup]:
    hidden, tp = shape.hidden_size, layout.tp
    yield ParameterGroup("norms", hidden, 2)
    yield from _attention(shape, tp, transformer_engine)
    if not moe:
        yield from _gated_mlp("dense_mlp", hidden, shape.ffn_size // tp)
        return
    yield ParameterGroup("router", shape.num_experts * hidden)
    local = shape.num_experts // layout.ep
    yield from _gated_mlp("experts", hidden, shape.moe_ffn_size // layout.expert_tp, local, expert=True)
    if shape.shared_ffn_size:
        yield from _gated_mlp("shared_experts", hidden, shape.shared_ffn_size // tp)


def _vision(vision: VisionShape, tp: int) -> Iterator[ParameterGroup]:
    hidden, ffn = vision.hidden_size, vision.ffn_size
    sizes = [hidden * vision.patch_elements, hidden, vision.num_positions * hidden]
    block = [hidden] * 4 + [3 * hidden * hidden // tp, 3 * hidden // tp, hidden * hidden // tp, hidden]
    block += [hidden * ffn // tp, ffn // tp, ffn * hidden // tp, hidden]
    merged, out = hidden * vision.merge_size**2, vision.out_hidden_size
    merger = [merged * merged // tp, merged // tp, merged * out // tp, out]
    sizes += block * vision.depth + [hidden, hidden, *merger] + [merged, merged, *merger] * vision.deepstack
    for size in sizes:
        yield ParameterGroup("vision", size)


def _mtp(shape: ModelShape, layout: Layout, transformer_engine: bool) -> Iterator[ParameterGroup]:
    hidden = shape.hidden_size
    for _ in range(shape.mtp_layers):
        yield ParameterGroup("mtp", 2 * hidden * hidden // layout.tp)
        yield ParameterGroup("mtp", hidden, 3)
        for group in _decoder_layer(shape, layout, shape.moe_layers[-1], transformer_engine):
            yield group._replace(component="mtp")


def parameter_groups(
    shape: ModelShape, layout: Layout, pp_rank: int, *, value_head: bool = False, transformer_engine: bool = True
) -> list[ParameterGroup]:
    """Every parameter of one rank, equal ones grouped; arguments as :func:`parameters_on_rank`."""
    problems = layout_problems(shape, layout)
    if problems:
        raise ValueError(f"{shape.architecture} cannot be laid out so: {'; '.join(problems)}")
    if not 0 <= pp_rank < layout.pp:
        raise ValueError(f"pp_rank={pp_rank} is not one of {layout.pp} pipeline stages")
    shape = as_built(shape, layout)
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    hidden, matrix = shape.hidden_size, shape.vocab_size * shape.hidden_size // layout.tp
    groups: list[ParameterGroup] = []
    if first and shape.vision is not None:
        groups += _vision(shape.vision, layout.tp)
    if first or (last and shape.mtp_layers):
        groups.append(ParameterGroup("embedding", matrix))
    for layer in stage_layers(shape, layout, pp_rank):
        groups += _decoder_layer(shape, layout, shape.moe_layers[layer], transformer_engine)
    if last:
        groups.append(ParameterGroup("norms", hidden))
        groups += _mtp(shape, layout, transformer_engine)
        if value_head:
            groups += [ParameterGroup("output_head", hidden), ParameterGroup("output_head", 1)]
        elif not (shape.tied and first):
            groups.append(ParameterGroup("output_head", matrix))
    return groups


def _by_component(groups: list[ParameterGroup]) -> dict[str, int]:
    sums = {name: sum(group.total for group in groups if group.component == name) for name in COMPONENTS}
    return sums | {"total": sum(sums.values())}


def num_parameters(shape: ModelShape) -> dict[str, int]:
    """Parameters of the whole model by component (``COMPONENTS``) and in ``total``, each counted once.

    Multi-token prediction layers are counted under ``mtp``, without the embedding and head that they share.
    """
    return _by_component(parameter_groups(shape, Layout(), 0))


def parameters_on_rank(
    shape: ModelShape, layout: Layout, pp_rank: int, *, value_head: bool = False, transformer_engine: bool = True
) -> dict[str, int]:
    """Parameters that one rank holds, split as in :func:`num_parameters`.

    All ranks of a pipeline stage hold the same number. Split over the tensor ranks: embedding, head, attention, MLPs,
    the projection of a prediction layer; over expert ranks: experts; whole everywhere: norms, routers, the vision
    tower's patch and position embeddings. The vocabulary must be divisible where the layout does not pad it. Fewer
    key-value heads than tensor ranks: the fused matrix is split evenly all the same. A tied head
    is a matrix of its own on the last of several stages; prediction layers bring an embedding there.

    Args:
        shape: as built: :meth:`ModelShape.without_mtp` unless ``model.mtp.enable``.
        layout: sizes of the groups.
        pp_rank: pipeline stage.
        value_head: a critic: one number for each position in place of the vocabulary head, and nothing tied.
        transformer_engine: layers are TransformerEngine's (accelerators) or megatron-core's own (CPUs); they differ
            for the compressing matrices of multi-head latent attention.

    Raises:
        ValueError: the layout does not divide the model (:func:`layout_problems`), or there is no such stage.
    """
    groups = parameter_groups(shape, layout, pp_rank, value_head=value_head, transformer_engine=transformer_engine)
    return _by_component(groups)


def padded_numel(groups: list[ParameterGroup], shards: int) -> int:
    """Numbers in one contiguous buffer of the distributed optimizer: every parameter starts at a multiple of 64, the
    end is a multiple of ``lcm(shards, 128)`` (megatron-core's ``optimizer/param_layout.py``; one bucket).
    """
    aligned = sum(ceil(group.numel / 64) * 64 * group.copies for group in groups)
    divisor = lcm(shards, 128)
    return ceil(aligned / divisor) * divisor
