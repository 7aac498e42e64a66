# SPDX-License-Identifier: Apache-2.0
"""Checks of the batch sizes against the layout, and of what the losses allow.

Each function takes the config as nested dicts and returns sentences about what is wrong; none means all is well.
"""

from collections.abc import Mapping
from typing import Any


def get(tree: Mapping, key: str) -> Any:
    """The value at a dotted key; None if a part of the way is missing."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def near_multiples(value: int, of: int) -> str:
    """The multiples of ``of`` around ``value``, in words."""
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else f"{above}"


def near_divisors(value: int, of: int) -> str:
    """The divisors of ``of`` around ``value``, in words."""
    divisors = [number for number in range(1, of + 1) if of % number == 0]
    below, above = [d for d in divisors if d <= value], [d for d in divisors if d > value]
    return " or ".join(str(number) for number in (below[-1:] + above[:1]))


def model_parallel_size(engine: Mapping) -> int:
    """Ranks that together hold one copy of the model and one sequence: tensor * pipeline * context."""
    tp, pp, cp = (engine[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context"))
    return int(tp * pp * cp)


def check_model_options(engine: Mapping, path: str, model_path: str, use_remove_padding: bool) -> list[str]:
    """Whether packing, context parallelism and router losses go together."""
    errors = []
    if engine["use_remove_padding"] != use_remove_padding:
        errors.append(
            f"{path}.use_remove_padding={engine['use_remove_padding']} contradicts {model_path}.use_remove_padding="
            f"{use_remove_padding}; set the latter only"
        )
    cp = engine["context_parallel_size"]
    if cp > 1 and not use_remove_padding:
        errors.append(
            f"{model_path}.use_remove_padding=False is not supported with {path}.context_parallel_size={cp}: only "
            f"packed sequences are split over context ranks; set {model_path}.use_remove_padding=True"
        )
    overrides = engine["override_transformer_config"]
    coefficient = overrides.get("moe_aux_loss_coeff")
    if coefficient and overrides.get("moe_router_load_balancing_type") in (None, "none"):
        errors.append(
            f"{path}.override_transformer_config.moe_aux_loss_coeff={coefficient} has no effect without a balancing "
            f"type; add +{path}.override_transformer_config.moe_router_load_balancing_type=aux_loss"
        )
    return errors


def check_ppo_batches(tree: Mapping, dp_size: int | None, use_reference: bool) -> list[str]:
    """Prompt counts, mini-batches, micro-batches and token budgets of a PPO step.

    Args:
        tree: the config.
        dp_size: data-parallel ranks; None if the layout does not fit the world, which is said elsewhere.
        use_reference: whether there is a reference model.
    """
    actor, rollout = get(tree, "actor_rollout_ref.actor"), get(tree, "actor_rollout_ref.rollout")
    train = get(tree, "data.train_batch_size")
    errors = check_mini_batch(actor, "actor_rollout_ref.actor", train, rollout["n"], dp_size)
    rows, engine = train * rollout["n"] // dp_size if dp_size else None, actor["megatron"]
    errors += _check_pass(rollout, "actor_rollout_ref.rollout", rows, engine)
    if use_reference:
        errors += _check_pass(get(tree, "actor_rollout_ref.ref"), "actor_rollout_ref.ref", rows, engine)
    return errors + _check_budgets(tree, use_reference)


def check_mini_batch(section: Mapping, path: str, train: int, n: int, dp_size: int | None) -> list[str]:
    """Whether a training batch divides into the mini-batches of ``section``, and those into ranks and micro-batches.

    Args:
        section: the actor's or the critic's.
        path: its key.
        train: prompts in a batch.
        n: responses to each.
        dp_size: data-parallel ranks; None if unknown.
    """
    mini, errors = section["ppo_mini_batch_size"], []
    if mini > train:
        errors.append(
            f"data.train_batch_size={train} prompts are fewer than {path}.ppo_mini_batch_size={mini} prompts (both "
            f"count prompts, before rollout.n={n}); use ppo_mini_batch_size={train}, or train_batch_size={mini}"
        )
    elif train % mini:
        errors.append(
            f"data.train_batch_size={train} is not divisible by {path}.ppo_mini_batch_size={mini}; use "
            f"ppo_mini_batch_size={near_divisors(mini, train)}, or train_batch_size={near_multiples(train, mini)}"
        )
    rows = mini * n
    if dp_size is None:
        return errors
    if rows % dp_size:
        step = next(number for number in range(1, dp_size + 1) if number * n % dp_size == 0)
        errors.append(
            f"{path}.ppo_mini_batch_size={mini} x actor_rollout_ref.rollout.n={n} = {rows} responses cannot be shared "
            f"by {dp_size} data-parallel ranks; use ppo_mini_batch_size={near_multiples(mini, step)}"
        )
    elif section["use_dynamic_bsz"]:
        errors += check_virtual_stages(section["megatron"], f"{path}.use_dynamic_bsz=True", None, rows // dp_size)
    else:
        errors += _check_micro_batch(section, path, rows // dp_size)
    return errors


def _check_micro_batch(actor: Mapping, path: str, rows: int) -> list[str]:
    micro = actor["ppo_micro_batch_size_per_gpu"]
    if micro is None:
        return [
            f"{path}.ppo_micro_batch_size_per_gpu is not set while {path}.use_dynamic_bsz=False; set it to a divisor "
            f"of {rows}, the responses of a mini-batch on one rank, or set use_dynamic_bsz=True"
        ]
    if rows % micro:
        return [
            f"{path}.ppo_micro_batch_size_per_gpu={micro} does not divide {rows}, the responses of a mini-batch on one "
            f"data-parallel rank; use {near_divisors(micro, rows)}"
        ]
    return check_virtual_stages(actor["megatron"], f"{path}.ppo_micro_batch_size_per_gpu", micro, rows)


def check_virtual_stages(engine: Mapping, key: str, micro: int | None, rows: int | None) -> list[str]:
    """Whether a rank's rows make a number of micro-batches that virtual pipeline stages can take.

    Args:
        engine: the engine's node.
        key: of the micro-batch size, or of the budget that replaces it.
        micro: rows of a micro-batch; None where a token budget decides.
        rows: of a rank; None if unknown.
    """
    pp = engine["pipeline_model_parallel_size"]
    if not engine["virtual_pipeline_model_parallel_size"] or not rows:
        return []
    if micro is None:
        if rows >= pp:
            return []
        return [
            f"{key} makes at most {rows} micro-batches of the {rows} rows on one data-parallel rank; with virtual "
            f"pipeline stages there must be a multiple of pipeline_model_parallel_size={pp}; use larger batches or "
            "fewer data-parallel ranks"
        ]
    count = -(-rows // micro)
    if count % pp == 0:
        return []
    fitting = [size for size in range(1, rows + 1) if -(-rows // size) % pp == 0]
    near = [size for size in fitting if size < micro][-1:] + [size for size in fitting if size > micro][:1]
    advice = f"use {' or '.join(map(str, near))}" if near else "use larger batches or fewer data-parallel ranks"
    return [
        f"{key}={micro} makes {count} micro-batches of the {rows} rows on one data-parallel rank; with virtual "
        f"pipeline stages their number must be a multiple of pipeline_model_parallel_size={pp}; {advice}"
    ]


def _check_pass(section: Mapping, path: str, rows: int | None, engine: Mapping) -> list[str]:
    """A pass without gradients, over all of a rank's rows (None if unknown) at once."""
    micro = section["log_prob_micro_batch_size_per_gpu"]
    if section["log_prob_use_dynamic_bsz"]:
        return check_virtual_stages(engine, f"{path}.log_prob_use_dynamic_bsz=True", None, rows)
    if micro is not None:
        return check_virtual_stages(engine, f"{path}.log_prob_micro_batch_size_per_gpu", micro, rows)
    return [
        f"{path}.log_prob_micro_batch_size_per_gpu is not set while {path}.log_prob_use_dynamic_bsz=False; set the "
        "former, or the latter to True"
    ]


def _check_budgets(tree: Mapping, use_reference: bool) -> list[str]:
    """A prompt with its response must fit: a budget is per rank, and a sequence is split over the context ranks."""
    prompt, response = get(tree, "data.max_prompt_length"), get(tree, "data.max_response_length")
    actor, ref = get(tree, "actor_rollout_ref.actor"), get(tree, "actor_rollout_ref.ref")
    rollout = get(tree, "actor_rollout_ref.rollout")
    passes = [
        ("actor.ppo_max_token_len_per_gpu", actor["use_dynamic_bsz"]),
        ("rollout.log_prob_max_token_len_per_gpu", rollout["log_prob_use_dynamic_bsz"]),
        ("ref.log_prob_max_token_len_per_gpu", use_reference and ref["log_prob_use_dynamic_bsz"]),
    ]
    errors = []
    for key, is_used in passes:
        if is_used:
            errors += check_budget(tree, f"actor_rollout_ref.{key}", actor["megatron"]["context_parallel_size"])
    for key, own in (("prompt_length", prompt), ("response_length", response)):
        if rollout[key] != own:
            errors.append(
                f"actor_rollout_ref.rollout.{key}={rollout[key]} contradicts data.max_{key}={own}; set the latter only"
            )
    return errors


def check_budget(tree: Mapping, key: str, cp: int) -> list[str]:
    """Whether the longest sequence fits into the token budget at ``key``, given the context ranks that share it."""
    prompt, response = get(tree, "data.max_prompt_length"), get(tree, "data.max_response_length")
    budget, longest = get(tree, key), prompt + response
    if longest <= budget * cp:
        return []
    return [
        f"{key}={budget} x context_parallel_size={cp} is less than the longest sequence, data.max_prompt_length="
        f"{prompt} + data.max_response_length={response} = {longest}; use at least {-(-longest // cp)}"
    ]


def check_sft_batches(tree: Mapping, dp_size: int) -> list[str]:
    """Batch, micro-batches and token budget of an SFT step."""
    data, cp = tree["data"], get(tree, "engine.context_parallel_size")
    batch, micro = data["train_batch_size"], data["micro_batch_size_per_gpu"]
    budget, longest = data["max_token_len_per_gpu"], data["max_length"]
    errors = []
    if batch % dp_size:
        errors.append(
            f"data.train_batch_size={batch} cannot be shared by {dp_size} data-parallel ranks; use "
            f"{near_multiples(batch, dp_size)}"
        )
    elif not data["use_dynamic_bsz"] and (batch // dp_size) % micro:
        errors.append(
            f"data.micro_batch_size_per_gpu={micro} does not divide {batch // dp_size}, the conversations of a batch "
            f"on one data-parallel rank; use {near_divisors(micro, batch // dp_size)}"
        )
    else:
        key = "data.use_dynamic_bsz=True" if data["use_dynamic_bsz"] else "data.micro_batch_size_per_gpu"
        size = None if data["use_dynamic_bsz"] else micro
        errors += check_virtual_stages(tree["engine"], key, size, batch // dp_size)
    if data["use_dynamic_bsz"] and longest > budget * cp:
        errors.append(
            f"data.max_token_len_per_gpu={budget} x engine.context_parallel_size={cp} is less than data.max_length="
            f"{longest}; use at least {-(-longest // cp)}"
        )
    return errors
