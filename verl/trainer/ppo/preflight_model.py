# SPDX-License-Identifier: Apache-2.0
"""Checks of the model against its layout, from the model folder's config.json alone: no torch, no weights.

The rules are those by which megatron-core and megatron-bridge divide a model: layers over pipeline stages, heads,
widths and the vocabulary over tensor ranks, experts over expert ranks. What config.json does not say is not checked.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.trainer.ppo.preflight_layout import fits_world, nearest
from verl.utils.config import did_you_mean
from verl.utils.hf_config import EXPERT_COUNTS, MTP_COUNTS, architecture_of, find_hf_config, text_config
from verl.utils.model_split import PipelineSplit, SplitError, Widths, built_layers, tensor_rules
from verl.workers.config.names import NOT_TRAINED

__all__ = [
    "ModelFacts",
    "RefusedByEngine",
    "ThisMachine",
    "WithOverride",
    "allows_layout",
    "check_generation_model",
    "check_model",
    "check_ppo_models",
    "check_sft_model",
    "has_own_class",
    "is_dense",
    "read_model",
]

# Architectures (by their first letters) whose layers are not cut by the number of layers alone.
_OWN_PIPELINE = ("Sarvam", "NemotronH", "FalconH1", "T5")
# Architectures that pad their vocabulary whether asked to or not.
_OWN_VOCABULARY = ("Gemma4",)

# Architectures (by their first letters) that need TransformerEngine's layers, and what for.
_NEED_TRANSFORMER_ENGINE = {
    "Gemma": "its norms add 1 to their weight",
    "GptOss": "it has layers with a sliding window",
    "Qwen3VL": "megatron-bridge builds its layers of nothing else",
}


class WithOverride(str):
    """A sentence that ends with advice to set a key of ``override_transformer_config``; ``plain`` is it without."""

    plain: str

    def __new__(cls, plain: str, advice: str) -> "WithOverride":
        """Put both together."""
        made = super().__new__(cls, plain + advice)
        made.plain = plain
        return made


class ThisMachine(str):
    """A sentence about what is installed here, which may not hold where the run will be."""


class RefusedByEngine(str):
    """A sentence about a model that the engine cannot train, whose layout a dry run tells all the same."""


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says of a model; None where it does not.

    Attributes:
        file: the config.json.
        architecture: the first entry of ``architectures``.
        text: the entries of the language model, which vision-language models nest in ``text_config``.
    """

    file: str
    architecture: str
    text: Mapping[str, Any]

    def number(self, *names: str) -> int | None:
        """The first of the entries that is a whole number."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 0 for a dense model."""
        return self.number(*EXPERT_COUNTS) or 0

    @property
    def context(self) -> int | None:
        """Positions that the model knows, stretched by its rope scaling where it has one."""
        positions = self.number("max_position_embeddings")
        scaling = self.text.get("rope_scaling") or self.text.get("rope_parameters") or {}
        factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
        if positions and isinstance(factor, int | float) and factor > 1:
            return int(positions * factor)
        return positions


def read_model(model: Mapping[str, Any]) -> ModelFacts | None:
    """Read a model node's config.json, with ``override_config`` put in; None if there is none that can be read."""
    whole, file = find_hf_config(model)
    if whole is None:
        return None
    return ModelFacts(file, architecture_of(whole) or "", text_config(whole))


def check_override_config(path: str, model: Mapping[str, Any]) -> list[str]:
    """Whether the model's configuration has the entries that ``override_config`` replaces, and of which kind."""
    given = model.get("override_config") or {}
    own, file = find_hf_config(dict(model) | {"override_config": {}})
    if own is None or not given:
        return []
    errors = []
    for name, value in given.items():
        key, old = f"{path}.override_config.{name}", own.get(name)
        kinds = (int, float) if isinstance(old, int | float) and not isinstance(old, bool) else (type(old),)
        if name not in own and not _may_be_entry(name, own.get("model_type")):
            errors.append(f"{key}={value!r} is not an entry of {file}.{did_you_mean(str(name), own)}")
        elif old is not None and value is not None and not isinstance(value, kinds):
            errors.append(f"{key}={value!r} replaces {old!r} in {file} by a value of another kind")
    return errors


def _may_be_entry(name: str, model_type: Any) -> bool:
    """Whether transformers' class for a config.json may have an entry that the file leaves to its default."""
    text = "".join(file.read_text(encoding="utf-8") for file in _configuration_files(model_type))
    return not text or re.search(rf"\b{re.escape(str(name))}\b", text) is not None


def _configuration_files(model_type: Any) -> list[Path]:
    """Sources of transformers' class for a type of model; none if they are not where they are expected."""
    spec = find_spec("transformers")
    root = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else Path()
    file = root / "models" / str(model_type) / f"configuration_{model_type}.py"
    return [file, root / "configuration_utils.py"] if file.is_file() else []


def has_own_class(model_type: Any) -> bool:
    """Whether transformers has code of its own for a type of model."""
    return bool(_configuration_files(model_type))


def is_dense(facts: ModelFacts) -> bool:
    """Whether a model has no experts; one whose experts go by a name that is not known here is no dense one."""
    return not facts.num_experts and "moe" not in json.dumps([facts.architecture, *facts.text]).lower()


def check_ppo_models(tree: Mapping, world_size: int | None = None) -> list[str]:
    """The actor's model, which the reference model shares, and the critic's where it is another."""
    node, engine = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"
    model, actor = get(tree, node), get(tree, engine)
    prompt, response = get(tree, "data.max_prompt_length"), get(tree, "data.max_response_length")
    longest = (prompt + response, f"data.max_prompt_length={prompt} + data.max_response_length={response}")
    errors = check_override_config(node, model) + check_model(node, model, engine, actor, longest, world_size)
    critic, own = get(tree, "critic.model"), get(tree, "critic.megatron")
    if uses_critic(tree) and (critic["path"], own) != (model["path"], actor):
        errors += [
            error
            for error in check_model("critic.model", critic, "critic.megatron", own, longest, world_size)
            if error.replace("critic.model", node).replace("critic.megatron", engine) not in errors
        ]
    return errors


def check_sft_model(tree: Mapping, world_size: int | None = None) -> list[str]:
    """The model that is fine-tuned."""
    length = get(tree, "data.max_length")
    longest = (length, f"data.max_length={length}")
    errors = check_override_config("model", tree["model"])
    return errors + check_model("model", tree["model"], "engine", tree["engine"], longest, world_size)


def check_generation_model(tree: Mapping) -> list[str]:
    """The model that generates: transformers runs it, so that there is no layout."""
    facts = read_model(tree["model"])
    prompt, response = get(tree, "rollout.prompt_length"), get(tree, "rollout.response_length")
    words = f"rollout.prompt_length={prompt} + rollout.response_length={response}"
    errors = check_override_config("model", tree["model"])
    return errors + ([] if facts is None else _check_context("model", facts, prompt + response, words))


def check_model(
    path: str,
    model: Mapping[str, Any],
    engine_path: str,
    engine: Mapping[str, Any],
    longest: tuple[int, str],
    world_size: int | None = None,
) -> list[str]:
    """What of the model cannot be laid out as the engine is asked to, one sentence each.

    Args:
        path: the model node's key.
        model: the node.
        engine_path: the engine node's key.
        engine: the node; its sizes are whole numbers of at least 1.
        longest: the longest sequence in tokens, and the keys that say so.
        world_size: ranks that sizes are proposed for; None for any number.
    """
    facts = read_model(model)
    if facts is None:
        return []
    errors = _check_sizes(facts, engine_path, engine, world_size)
    errors += _check_mtp(path, facts, model) + _check_trained(path, facts)
    errors += _check_transformer_engine(path, facts)
    return errors + _check_context(path, facts, *longest)


def allows_layout(model: Mapping[str, Any], engine_path: str) -> Callable[[Mapping[str, Any]], bool]:
    """Says of an engine's node whether the model can be laid out by it; of a model that is not here, that it can."""
    facts = read_model(model)
    return lambda engine: facts is None or not _check_sizes(facts, engine_path, engine, None)


def _check_sizes(facts: ModelFacts, path: str, engine: Mapping, world_size: int | None) -> list[str]:
    errors = _check_pipeline(facts, path, engine, world_size)
    return errors + _check_tensor(facts, path, engine, world_size) + _check_experts(facts, path, engine, world_size)


def _near(engine: Mapping, name: str, sizes: Iterable[int], world_size: int | None) -> str:
    """The sizes around an engine's own, in words; those that the ranks divide into if there are any."""
    sizes, own = list(sizes), engine[name]
    fitting = [size for size in sizes if world_size and fits_world({**engine, name: size}, world_size)]
    return " or ".join(map(str, nearest(own, fitting) or nearest(own, sizes) or [1]))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_pipeline(facts: ModelFacts, path: str, engine: Mapping, world_size: int | None) -> list[str]:
    """Layers over pipeline stages, and those of a stage over its virtual stages."""
    overrides = engine["override_transformer_config"]
    pp, vpp = engine["pipeline_model_parallel_size"], engine["virtual_pipeline_model_parallel_size"]
    if vpp == 1 and pp > 1:
        return [
            f"{path}.virtual_pipeline_model_parallel_size=1 is no division; set it to null, or to 2 or more chunks of "
            "layers on each stage"
        ]
    layers, split = built_layers(overrides, facts.number("num_hidden_layers")), PipelineSplit.of_engine(engine)
    if not layers or facts.architecture.startswith(_OWN_PIPELINE):
        return []
    try:
        split.layers(layers)
    except SplitError as error:
        near = _near(engine, "pipeline_model_parallel_size", _divisors(error.number), world_size)
        return _pipeline_sentences(error, facts.file, path, split, layers, near)
    return []


def _pipeline_sentences(
    error: SplitError, file: str, path: str, split: PipelineSplit, layers: int, near: str
) -> list[str]:
    """What is wrong in the keys of a trainer, with the values that would be right; ``near`` for the stages."""
    otc, pp = f"{path}.override_transformer_config", split.stages
    ends = {"first": split.first, "last": split.last}
    said = [f"{otc}.num_layers_in_{end}_pipeline_stage={value}" for end, value in ends.items() if value is not None]
    if error.kind == "layout":
        return []
    if error.kind == "both":
        return [f"{said[0]} and {otc}.account_for_*_in_pipeline_split exclude each other; set one of them"]
    if error.kind == "middle":
        return [
            f"{path}.virtual_pipeline_model_parallel_size={split.chunks} does not go with {' and '.join(said)} where "
            f"{path}.pipeline_model_parallel_size=2; set one of these sizes only"
        ]
    if error.kind == "ends":
        between = f"over {error.parts} other stages" if error.parts > 0 else "and no other stage"
        return [
            f"{' and '.join(said)} leaves {error.number} of the {layers} layers in {file} {between}; all stages must "
            "get layers"
        ]
    if error.kind == "stages":
        more = f" with embedding and loss counted {error.number}," if error.number != layers else ""
        sentence = (
            f"{path}.pipeline_model_parallel_size={pp} does not divide the {layers} layers (num_hidden_layers in "
            f"{file}){',' if more else ''}{more}; use {near}"
        )
        return [WithOverride(sentence, f", or set +{otc}.num_layers_in_first_pipeline_stage")]
    return [
        f"{path}.virtual_pipeline_model_parallel_size={split.chunks} does not divide the {error.number} layers of a "
        f"stage ({layers} layers in {file}, {path}.pipeline_model_parallel_size={pp}); use "
        f"{_virtual_sizes(split.chunks, split.places(layers))}"
    ]


def _virtual_sizes(asked: int, stages: Sequence[int]) -> str:
    fitting = [size for size in range(2, max(stages) + 1) if not any(layers % size for layers in stages)]
    nearest = sorted(fitting, key=lambda size: abs(size - asked))[:2]
    return " or ".join(map(str, [*sorted(nearest), "null"]))


def _check_tensor(facts: ModelFacts, path: str, engine: Mapping, world_size: int | None) -> list[str]:
    """Heads, widths and vocabulary over tensor ranks; one sentence with the sizes that all of them allow."""
    overrides = engine["override_transformer_config"]
    tp, rules = engine["tensor_model_parallel_size"], tensor_rules(_widths(facts, engine, overrides))
    wrong = next((rule for rule in rules if not rule.allows(tp)), None)
    if wrong is None:
        return []
    heads = facts.number("num_attention_heads") or tp
    fitting = [size for size in range(1, heads + 1) if all(rule.allows(size) for rule in rules)]
    use = _near(engine, "tensor_model_parallel_size", fitting, world_size)
    said = f"{path}.tensor_model_parallel_size={tp} cannot divide {wrong.words} in {facts.file}; use {use}"
    if wrong.is_vocabulary:
        return [WithOverride(said, f", or pad it with +{path}.override_transformer_config.should_pad_vocab=True")]
    return [said]


def _widths(facts: ModelFacts, engine: Mapping, overrides: Mapping) -> Widths:
    sparse = facts.num_experts and not facts.number("first_k_dense_replace")
    padded = overrides.get("should_pad_vocab") or facts.architecture.startswith(_OWN_VOCABULARY)
    linear = {name: facts.number(name) for name in ("linear_num_key_heads", "linear_num_value_heads")}
    return Widths(
        heads=facts.number("num_attention_heads"),
        kv_heads=facts.number("num_key_value_heads"),
        dense=None if sparse else facts.number("intermediate_size"),
        shared=_shared_width(facts) if facts.num_experts else None,
        expert=_expert_width(facts) if engine["expert_tensor_parallel_size"] is None else None,
        expert_key=_width_name(facts),
        vocabulary=None if padded else facts.number("vocab_size"),
        linear_heads={name: number for name, number in linear.items() if number},
        context=engine["context_parallel_size"],
    )


def _shared_width(facts: ModelFacts) -> int:
    own = facts.number("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared, width = facts.number("n_shared_experts"), facts.number("moe_intermediate_size")
    return own or (shared or 0) * (width or 0)


def _width_name(facts: ModelFacts) -> str:
    return "moe_intermediate_size" if facts.number("moe_intermediate_size") else "intermediate_size"


def _expert_width(facts: ModelFacts) -> int | None:
    return facts.number(_width_name(facts)) if facts.num_experts else None


def _check_experts(facts: ModelFacts, path: str, engine: Mapping, world_size: int | None) -> list[str]:
    """Experts over expert ranks, their width over expert tensor ranks, and what they demand of tensor parallelism."""
    tp, ep, etp = (engine[f"{name}_parallel_size"] for name in ("tensor_model", "expert_model", "expert_tensor"))
    experts = facts.num_experts
    if not experts:
        if ep == 1 or not is_dense(facts):
            return []
        return [
            f"{path}.expert_model_parallel_size={ep} needs experts, and {facts.file} is of a dense model; set it to 1"
        ]
    errors = []
    if experts % ep:
        errors.append(
            f"{path}.expert_model_parallel_size={ep} does not divide the {experts} experts in {facts.file}; use "
            f"{_near(engine, 'expert_model_parallel_size', _divisors(experts), world_size)}"
        )
    width = _expert_width(facts)
    if etp and width and width % etp:
        errors.append(
            f"{path}.expert_tensor_parallel_size={etp} does not divide the {width} columns of an expert "
            f"({_width_name(facts)} in {facts.file}); use "
            f"{_near(engine, 'expert_tensor_parallel_size', _divisors(width), world_size)}"
        )
    if facts.architecture.startswith("GptOss") and (etp or tp) > 1:
        errors.append(
            f"{path}.expert_tensor_parallel_size={etp or tp} is not possible for the experts of {facts.architecture}, "
            f"which have a bias; set {path}.expert_tensor_parallel_size=1"
        )
    if tp > 1 and not engine["sequence_parallel"]:
        errors.append(
            f"{path}.sequence_parallel=False is not supported with {path}.tensor_model_parallel_size={tp} for a model "
            f"with experts ({facts.file}); set it to True"
        )
    return errors


def _check_mtp(path: str, facts: ModelFacts, model: Mapping) -> list[str]:
    """Whether there are the layers of multi-token prediction that are asked for."""
    mtp = model.get("mtp") or {}
    if not mtp.get("enable") or facts.number(*MTP_COUNTS):
        return []
    if not any(name in facts.text for name in MTP_COUNTS) and _may_default(facts.text.get("model_type")):
        return []
    return [
        f"{path}.mtp.enable=True needs layers of multi-token prediction, and {facts.file} has none "
        f"({MTP_COUNTS[0]}); set {path}.mtp.enable=False"
    ]


def _may_default(model_type: Any) -> bool:
    """Whether transformers' class for a config.json may give a number of these layers that the file does not."""
    files = _configuration_files(model_type)[:1]
    return not files or any(name in files[0].read_text(encoding="utf-8") for name in MTP_COUNTS)


def _check_trained(path: str, facts: ModelFacts) -> list[str]:
    """Whether the engine knows how to train the architecture."""
    return [
        RefusedByEngine(
            f"{path}.path: the engine refuses this model at the start, {facts.architecture} ({facts.file}): {reason}"
        )
        for name, reason in NOT_TRAINED.items()
        if facts.architecture.startswith(name)
    ]


def _check_transformer_engine(path: str, facts: ModelFacts) -> list[str]:
    """What the layers that are used in TransformerEngine's absence do not compute."""
    if find_spec("transformer_engine") is not None:
        return []
    reason = next((why for name, why in _NEED_TRANSFORMER_ENGINE.items() if facts.architecture.startswith(name)), None)
    if facts.architecture.startswith("Mistral") and facts.text.get("sliding_window"):
        reason = f"it has a sliding window of {facts.text['sliding_window']} tokens"
    if reason is None:
        return []
    return [
        ThisMachine(
            f"{path}.path: {facts.architecture} needs the package transformer_engine, which is not installed here, "
            f"because {reason} ({facts.file}); install it on a machine with an accelerator, or use another model"
        )
    ]


def _check_context(path: str, facts: ModelFacts, longest: int, words: str) -> list[str]:
    """Whether the longest sequence has positions."""
    context = facts.context
    if not context or longest <= context:
        return []
    given = f"{words} = {longest} tokens are" if "+" in words else f"{words} tokens is"
    further = f"+{path}.override_config.max_position_embeddings={longest}"
    return [
        f"{given} more than the {context} positions of {facts.file} (max_position_embeddings); make it {context} or "
        f"less, or, where the model is meant to go further, set {further}"
    ]
