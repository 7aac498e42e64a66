# SPDX-License-Identifier: Apache-2.0
"""How megatron-core 0.19.2 divides a model: decoder layers over pipeline stages, widths over tensor ranks.

The only place that knows these rules: the checks before a run, the dry run and the memory estimate ask here. Neither
torch nor transformers is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["PipelineSplit", "SplitError", "TensorRule", "Widths", "built_layers", "tensor_rules", "whole_number"]

SplitKind = Literal["stages", "ends", "chunks", "middle", "both", "layout"]


class SplitError(ValueError):
    """Why layers cannot be divided over pipeline stages.

    Attributes:
        kind: "stages": ``number`` layers over ``parts`` stages. "ends": ``number`` layers are left over by the first
            and last stage, whose sizes are given, and there are ``parts`` other stages. "chunks": ``number`` layers of
            a stage over its ``parts`` virtual stages. "middle": virtual stages, and no stage between a first and a last
            one whose sizes are given. "both": two ways of dividing are asked for. "layout": they are divided by
            ``pipeline_model_parallel_layout``, which is not read here.
    """

    def __init__(self, kind: SplitKind, words: str, number: int = 0, parts: int = 0):
        super().__init__(words)
        self.kind, self.number, self.parts = kind, number, parts


def whole_number(value: Any) -> int | None:
    """``value`` if it is one, else None: what is wrong with it is said where values are checked."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def built_layers(overrides: Mapping[str, Any] | None, num_layers: int | None) -> int | None:
    """Decoder layers that an engine builds of a model of ``num_layers``, under its ``override_transformer_config``."""
    return whole_number((overrides or {}).get("num_layers")) or num_layers


@dataclass(frozen=True)
class PipelineSplit:
    """What decides which decoder layers a pipeline stage builds; without more than ``stages``, each the same number.

    Attributes:
        stages: ``pipeline_model_parallel_size``.
        chunks: virtual stages on each stage; 1 for none.
        first, last: layers of the first and last stage (``num_layers_in_first_pipeline_stage`` and ``_last_``).
        counts_embedding, counts_loss: the embedding takes a layer's place on the first stage, the loss on the last
            (``account_for_embedding_in_pipeline_split`` and ``_loss_``).
        has_layout: ``pipeline_model_parallel_layout`` decides, which is not read here.
    """

    stages: int = 1
    chunks: int = 1
    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    has_layout: bool = False

    @classmethod
    def of_engine(cls, engine: Mapping[str, Any]) -> "PipelineSplit":
        """From an engine's node of the config."""
        overrides = engine["override_transformer_config"] or {}
        return cls(
            stages=engine["pipeline_model_parallel_size"],
            chunks=engine["virtual_pipeline_model_parallel_size"] or 1,
            first=whole_number(overrides.get("num_layers_in_first_pipeline_stage")),
            last=whole_number(overrides.get("num_layers_in_last_pipeline_stage")),
            counts_embedding=bool(overrides.get("account_for_embedding_in_pipeline_split")),
            counts_loss=bool(overrides.get("account_for_loss_in_pipeline_split")),
            has_layout=bool(overrides.get("pipeline_model_parallel_layout")),
        )

    def places(self, num_layers: int) -> tuple[int, ...]:
        """Places for layers on each stage; embedding and loss have taken theirs where they are counted.

        Raises:
            SplitError: of any kind but "chunks".
        """
        counted = self.counts_embedding + self.counts_loss
        ends = [count for count in (self.first, self.last) if count is not None]
        if self.has_layout:
            raise SplitError("layout", "override_transformer_config.pipeline_model_parallel_layout decides")
        if ends and counted:
            raise SplitError("both", "sizes of the first or last stage and account_for_*_in_pipeline_split exclude")
        if not ends:
            places = num_layers + counted
            if places % self.stages:
                more = f" (with embedding and loss {places})" if counted else ""
                words = f"{num_layers} layers{more} cannot be divided by {self.stages} pipeline stages"
                raise SplitError("stages", words, places, self.stages)
            return (places // self.stages,) * self.stages
        rest, others = num_layers - sum(ends), self.stages - len(ends)
        if min(ends) < 1 or others < 0 or rest < 0 or bool(rest) != bool(others) or (others and rest % others):
            words = f"{rest} of {num_layers} layers are left for {others} stages beside the first or last"
            raise SplitError("ends", words, rest, others)
        middle = (rest // others,) * others if others else ()
        return (*((self.first,) if self.first else ()), *middle, *((self.last,) if self.last else ()))

    def layers(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """For each stage, for each of its virtual stages, the decoder layers (from 0) that it builds.

        Raises:
            SplitError: layers cannot be divided so.
        """
        places, chunks = self.places(num_layers), self.chunks if self.stages > 1 else 1
        for number in places:
            if number % chunks:
                words = f"the {number} layers of a stage cannot be divided by {chunks} virtual stages"
                raise SplitError("chunks", words, number, chunks)
        if chunks > 1 and self.first is not None and self.last is not None and self.stages == 2:
            # megatron-core divides by the number of stages in between.
            raise SplitError("middle", "virtual stages need a stage between a first and a last of given sizes")
        stages: list[list[range]] = [[] for _ in places]
        start = 0
        for chunk in range(chunks):
            for stage, number in enumerate(places):
                held = number // chunks
                held -= self.counts_embedding and (chunk, stage) == (0, 0)
                held -= self.counts_loss and (chunk, stage) == (chunks - 1, self.stages - 1)
                stages[stage].append(range(start, start + held))
                start += held
        return tuple(tuple(held) for held in stages)

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...]:
        """The number of decoder layers on each stage; raises as :meth:`layers`."""
        return tuple(sum(map(len, chunks)) for chunks in self.layers(num_layers))


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Numbers of a model that tensor ranks divide; None where it has none, or where that is not known.

    Attributes:
        heads, kv_heads: attention heads, and those of keys and values.
        dense: columns of the dense layers' MLPs.
        shared: columns of all shared experts together.
        expert: columns of a routed expert, if the expert tensor size follows the tensor size.
        expert_key: the key of config.json that says so.
        vocabulary: if it is not padded.
        vision_heads: attention heads of the vision tower.
        linear_heads: heads of linear attention by their key; each context rank has its own too.
        context: ``context_parallel_size``.
    """

    heads: int | None = None
    kv_heads: int | None = None
    dense: int | None = None
    shared: int | None = None
    expert: int | None = None
    expert_key: str = "moe_intermediate_size"
    vocabulary: int | None = None
    vision_heads: int | None = None
    linear_heads: Mapping[str, int] = field(default_factory=dict)
    context: int = 1


class TensorRule(NamedTuple):
    """``words``: what is divided; ``allows``: whether that many tensor ranks can; ``is_vocabulary``: padding helps."""

    words: str
    allows: Callable[[int], bool]
    is_vocabulary: bool = False


def tensor_rules(widths: Widths) -> list[TensorRule]:
    """What a tensor size must divide."""

    def divides(number: int, context: int = 1) -> Callable[[int], bool]:
        return lambda size: number % (size * context) == 0

    rules = []
    if number := widths.heads:
        rules.append(TensorRule(f"the {number} attention heads (num_attention_heads)", divides(number)))
    if groups := widths.kv_heads:
        words = f"the {groups} heads of keys and values (num_key_value_heads), nor be a multiple of them,"
        # Fewer groups than ranks are held several times.
        rules.append(TensorRule(words, lambda size: groups % size == 0 or size % groups == 0))
    if number := widths.dense:
        rules.append(TensorRule(f"the {number} columns of the dense layers (intermediate_size)", divides(number)))
    if number := widths.shared:
        rules.append(TensorRule(f"the {number} columns of the shared experts", divides(number)))
    if number := widths.expert:
        words = f"the {number} columns of an expert ({widths.expert_key}; expert_tensor_parallel_size follows it)"
        rules.append(TensorRule(words, divides(number)))
    if number := widths.vocabulary:
        rules.append(TensorRule(f"the vocabulary of {number} tokens (vocab_size)", divides(number), True))
    if number := widths.vision_heads:
        rules.append(TensorRule(f"the {number} attention heads of the vision tower (num_heads)", divides(number)))
    for key, number in widths.linear_heads.items():
        words = f"the {number} heads of linear attention ({key}, with context_parallel_size={widths.context})"
        rules.append(TensorRule(words, divides(number, widths.context)))
    return rules
