# SPDX-License-Identifier: Apache-2.0
"""Which of the two regimes of docs/objective.md, section 4, a run will be in, and what the guards of section 5 refuse.

Megatron's ``calculate_per_token_loss`` is set by the user or, for some models, by their megatron-bridge provider. Both
are known before anything starts: the latter from the model's config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.utils.hf_config import architecture_of, find_hf_config

__all__ = ["PROVIDERS_THAT_SET_IT", "Guard", "Regime", "find_guards", "find_regime"]

# Hugging Face architecture -> provider of megatron-bridge 0.6.2 that sets calculate_per_token_loss in its finalize() at
# context_parallel_size > 1, whatever was set before. A test compares this with the installed sources.
PROVIDERS_THAT_SET_IT = {
    "Qwen3VLForConditionalGeneration": "Qwen3VLModelProvider",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoEModelProvider",
    "Qwen3_5ForConditionalGeneration": "Qwen35VLModelProvider",
    "Qwen3_5MoeForConditionalGeneration": "Qwen35VLMoEModelProvider",
}


@dataclass(frozen=True)
class Regime:
    """Whether ``calculate_per_token_loss`` will be on.

    Attributes:
        per_token: it will be; None if that cannot be told.
        source: "config", "provider", "off", or "unknown".
        why: a sentence.
        setting: what sets it, as an error message names it.
    """

    per_token: bool | None
    source: str
    why: str
    setting: str = ""


@dataclass(frozen=True)
class Guard:
    """One combination that is refused together with ``calculate_per_token_loss`` while the guards are on.

    ``combination`` is what is refused, ``present`` whether this configuration has it, ``refuses`` whether it is refused
    here: present, the flag on and the guards on. ``error`` is the sentence for that, else empty.
    """

    combination: str
    present: bool
    refuses: bool
    error: str


def find_regime(engine: Mapping[str, Any], path: str, model: Mapping[str, Any], model_path: str) -> Regime:
    """The regime of an engine.

    Args:
        engine: the engine's node.
        path: its key.
        model: the model's node.
        model_path: its key.
    """
    given = (engine["override_transformer_config"] or {}).get("calculate_per_token_loss")
    flag = f"{path}.override_transformer_config.calculate_per_token_loss"
    if given:
        return Regime(True, "config", f"{flag}=True", f"{flag}=True")
    cp = engine["context_parallel_size"]
    config, source = find_hf_config(model)
    architecture = architecture_of(config)
    if cp == 1:
        return Regime(False, "off", f"{flag} is not set, and no provider sets it without context parallelism")
    if architecture is None:
        return Regime(
            None,
            "unknown",
            f"{flag} is not set, and whether the model's provider sets it at context_parallel_size={cp} is unknown: "
            f"{source}",
        )
    provider = PROVIDERS_THAT_SET_IT.get(architecture)
    if provider is None:
        return Regime(False, "off", f"{flag} is not set, and the provider of {architecture} does not set it")
    why = f"{provider}, megatron-bridge's provider of {architecture}, sets it at {path}.context_parallel_size={cp}"
    if given is not None:
        why += f", although {flag}={given}"
    setting = f"calculate_per_token_loss=True (set by {provider} at {path}.context_parallel_size={cp})"
    return Regime(True, "provider", why, setting)


def find_guards(
    regime: Regime, engine: Mapping[str, Any], path: str, model: Mapping[str, Any], model_path: str, mode: str | None
) -> list[Guard]:
    """The guards, and which of them refuse here.

    Args:
        regime: of the engine.
        engine: the engine's node.
        path: its key.
        model: the model's node.
        model_path: its key.
        mode: ``loss_agg_mode``; None where there is none (SFT).
    """
    acts = bool(regime.per_token and engine["per_token_loss_guards"])
    lift = f"or lift the guard with {path}.per_token_loss_guards=False (docs/objective.md)"

    def guard(combination: str, words: str, present: bool, instead: str) -> Guard:
        error = f"{words} is refused together with {regime.setting}; {instead}, {lift}" if acts and present else ""
        return Guard(combination, present, acts and present, error)

    guards, name, padded = [], "seq-mean-token-mean", f"{model_path}.use_remove_padding=False"
    if mode is not None:
        guards.append(guard(f"loss_agg_mode={name}", f"loss_agg_mode={name!r}", mode == name, "use token-mean"))
    guards.append(guard(padded, padded, not model["use_remove_padding"], "set it to True"))
    return guards


def check_guards(
    engine: Mapping[str, Any], path: str, model: Mapping[str, Any], model_path: str, mode: str | None
) -> list[str]:
    """Sentences about what the guards refuse; arguments as in `find_guards`."""
    regime = find_regime(engine, path, model, model_path)
    return [guard.error for guard in find_guards(regime, engine, path, model, model_path, mode) if guard.refuses]
