# SPDX-License-Identifier: Apache-2.0
"""Checks of the free-form groups that go to megatron-core: names, kinds of values, and settings that contradict."""

from collections.abc import Mapping
from typing import Any

from verl.trainer.ppo import preflight_sources as sources
from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.trainer.ppo.preflight_model import read_model
from verl.utils.config import did_you_mean
from verl.utils.hf_config import MTP_COUNTS
from verl.workers.config.names import NPU_FIELDS

__all__ = ["check_overrides", "check_ppo_overrides", "check_sft_overrides"]

AUX_LOSS_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BALANCING_TYPES = (*AUX_LOSS_TYPES, "sinkhorn", "none")
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")

_OF_MTP = dict.fromkeys(MTP_COUNTS, "enable") | {
    "mtp_loss_scaling_factor": "mtp_loss_scaling_factor",
    "mtp_detach_heads": "detach_encoder",
}


def check_ppo_overrides(tree: Mapping) -> list[str]:
    """The groups of the actor, of a reference model where they differ, and of the critic."""
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    model = get(tree, "actor_rollout_ref.model")
    errors = check_overrides(f"{actor}.megatron", get(tree, f"{actor}.megatron"), "actor_rollout_ref.model", model)
    errors += _check_optimizer(f"{actor}.optim", get(tree, f"{actor}.optim"), f"{actor}.megatron", tree)
    if get(tree, f"{ref}.megatron.override_transformer_config") != get(
        tree, f"{actor}.megatron.override_transformer_config"
    ):
        known = [error.replace(actor, ref) for error in errors]
        found = check_overrides(f"{ref}.megatron", get(tree, f"{ref}.megatron"), "actor_rollout_ref.model", model)
        errors += [error for error in found if error not in known]
    if uses_critic(tree):
        critic, own = get(tree, "critic.megatron"), get(tree, "critic.model")
        known = [error.replace(actor, "critic") for error in errors]
        found = check_overrides("critic.megatron", critic, "critic.model", own)
        errors += [error for error in found if error not in known]
        errors += _check_optimizer("critic.optim", get(tree, "critic.optim"), "critic.megatron", tree)
    return errors


def check_sft_overrides(tree: Mapping) -> list[str]:
    """The groups of fine-tuning."""
    errors = check_overrides("engine", tree["engine"], "model", tree["model"])
    return errors + _check_optimizer("optim", tree["optim"], "engine", tree)


def check_overrides(path: str, engine: Mapping, model_path: str, model: Mapping) -> list[str]:
    """``override_transformer_config`` and ``override_ddp_config`` of an engine.

    Args:
        path: the engine's key.
        engine: its node.
        model_path: the model's key.
        model: its node.
    """
    group = f"{path}.override_transformer_config"
    # What is null is left to the model.
    given = {name: value for name, value in engine["override_transformer_config"].items() if value is not None}
    facts = read_model(model)
    errors = [
        f"{group}.{name}={given.pop(name)!r} is not taken: set {model_path}.mtp.{key}"
        for name, key in _OF_MTP.items()
        if name in given
    ]
    fields = sources.provider_fields(facts.architecture if facts else "") if given else {}
    read = {name: value for name, value in given.items() if name not in NPU_FIELDS}
    errors += _check_fields(group, read, fields, "megatron-core's transformer configuration")
    if not errors:
        errors += _check_balancing(group, given)
        errors += _check_recomputation(group, given)
        errors += _check_words(path, group, given, engine)
    ddp = engine["override_ddp_config"]
    own = f"{path}.override_ddp_config"
    errors += _check_fields(own, ddp, sources.ddp_fields() if ddp else {}, "megatron-core's DDP configuration")
    if "use_distributed_optimizer" in ddp and ddp["use_distributed_optimizer"] != engine["use_distributed_optimizer"]:
        errors.append(
            f"{own}.use_distributed_optimizer={ddp['use_distributed_optimizer']!r} contradicts {path}."
            f"use_distributed_optimizer={engine['use_distributed_optimizer']!r}; set the latter only"
        )
    return errors


def _check_optimizer(path: str, optim: Mapping, engine_path: str, tree: Mapping) -> list[str]:
    group, given = f"{path}.override_optimizer_config", optim["override_optimizer_config"] or {}
    fields = sources.optimizer_fields() if given else {}
    errors = _check_fields(group, given, fields, "megatron-core's optimizer configuration")
    name = given.get("optimizer", optim["optimizer"])
    if name == "sgd" and get(tree, f"{engine_path}.use_distributed_optimizer"):
        key = f"{group}.optimizer" if "optimizer" in given else f"{path}.optimizer"
        errors.append(
            f"{key}='sgd' does not go with {engine_path}.use_distributed_optimizer=True, which shards Adam's "
            f"state only; set {engine_path}.use_distributed_optimizer=False"
        )
    return errors


def _check_fields(group: str, given: Mapping, fields: Mapping[str, sources.Field], owner: str) -> list[str]:
    errors = []
    for name, value in given.items() if fields else ():
        if name not in fields:
            errors.append(f"{group}.{name}={value!r} is not a field of {owner}.{did_you_mean(str(name), fields)}")
        elif value != value:
            errors.append(f"{group}.{name}={value!r} is not a number")
        elif not fields[name].allows(value):
            errors.append(f"{group}.{name}={value!r} must be {fields[name].in_words()}")
    return errors


def _check_balancing(group: str, given: Mapping) -> list[str]:
    """Whether a type of load balancing has its coefficient, and a coefficient its type."""
    types, coefficients = given.get("moe_router_load_balancing_type"), given.get("moe_aux_loss_coeff")
    names = [types or "none"] if isinstance(types, str | None) else list(types)
    for name in names:
        if name not in BALANCING_TYPES:
            hint = did_you_mean(str(name), BALANCING_TYPES)
            return [
                f"{group}.moe_router_load_balancing_type={name!r} is not known; choose one of "
                f"{', '.join(BALANCING_TYPES)}.{hint}"
            ]
    if isinstance(types, list):
        if not isinstance(coefficients, list) or len(coefficients) != len(names):
            return [
                f"{group}.moe_aux_loss_coeff={coefficients!r} must be a list with a number for each of "
                f"moe_router_load_balancing_type={types!r}"
            ]
    elif isinstance(coefficients, list):
        return [f"{group}.moe_aux_loss_coeff={coefficients!r} must be a number for one balancing type"]
    negative = [c for c in coefficients if c < 0] if isinstance(coefficients, list) else (coefficients or 0) < 0
    if negative:
        return [f"{group}.moe_aux_loss_coeff={coefficients!r} must not be negative"]
    if set(names) & set(AUX_LOSS_TYPES) and not coefficients:
        return [
            f"{group}.moe_router_load_balancing_type={names[0]!r} has no effect without a coefficient; add "
            f"+{group}.moe_aux_loss_coeff=0.001"
        ]
    if coefficients and names == ["sinkhorn"]:
        return [
            f"{group}.moe_aux_loss_coeff={coefficients!r} has no effect with moe_router_load_balancing_type="
            f"'sinkhorn'; choose one of {', '.join(AUX_LOSS_TYPES)}"
        ]
    return []


def _check_recomputation(group: str, given: Mapping) -> list[str]:
    granularity, layers = given.get("recompute_granularity"), given.get("recompute_num_layers")
    if granularity == "full":
        if given.get("recompute_method") not in ("uniform", "block"):
            return [
                f"{group}.recompute_granularity='full' needs {group}.recompute_method=uniform or block, and is "
                f"{given.get('recompute_method')!r}"
            ]
        if not isinstance(layers, int) or layers < 1:
            return [
                f"{group}.recompute_num_layers={layers!r} must be a whole number of at least 1 with "
                "recompute_granularity='full'; 1 saves the most memory"
            ]
    if granularity == "selective" and layers is not None:
        return [
            f"{group}.recompute_num_layers={layers!r} contradicts recompute_granularity='selective', which names "
            "modules (recompute_modules) and no layers; leave it out"
        ]
    return []


def _check_words(path: str, group: str, given: Mapping, engine: Mapping) -> list[str]:
    """Words that are looked up late, and types of numbers that belong to ``dtype``."""
    errors = []
    backend: Any = given.get("attention_backend", "auto")
    if isinstance(backend, str) and backend not in ATTENTION_BACKENDS:
        errors.append(
            f"{group}.attention_backend={backend!r} is not known; choose one of {', '.join(ATTENTION_BACKENDS)}."
            f"{did_you_mean(backend, ATTENTION_BACKENDS)}"
        )
    if given.get("moe_token_dispatcher_type") == "allgather":
        errors.append(
            f"{group}.moe_token_dispatcher_type='allgather' does not go with sequences of different length; use "
            "alltoall, the default"
        )
    is_bfloat16 = engine["dtype"] in ("bfloat16", "bf16")
    if given.get("fp16") or bool(given.get("bf16", is_bfloat16)) != is_bfloat16:
        name = "fp16" if given.get("fp16") else "bf16"
        errors.append(
            f"{group}.{name}={given[name]!r} contradicts {path}.dtype={engine['dtype']!r}; set the latter only"
        )
    return errors
