# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a step: prompts, responses, mini-batches, micro-batches, token budgets, steps and schedules."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.trainer.ppo.preflight_files import as_paths, open_data_file
from verl.utils.run_length import check_warmup, lengths_of_schedules, resolve_total_steps

_A = "actor_rollout_ref"


@dataclass(frozen=True)
class MicroBatches:
    """How one rank splits ``rows`` sequences, in training or in a pass without gradients.

    ``rows`` is None where they do not divide. Under ``dynamic`` the number of micro-batches depends on the lengths and
    lies between ``least`` and ``most``; otherwise both are the number. They are None where it cannot be told.
    ``tokens`` is the budget of one rank and ``tokens_times_cp`` that of a micro-batch.
    """

    name: str
    rows: int | None
    dynamic: bool
    size_key: str
    size: int | None
    budget_key: str
    tokens: int | None
    tokens_times_cp: int | None
    longest: int
    least: int | None
    most: int | None


@dataclass(frozen=True)
class Updates:
    """The optimizer's updates within a training step, for the actor or the critic.

    Numbers are None where the sizes do not divide.
    """

    name: str
    mini_batch_prompts: int
    mini_batch_responses: int
    mini_batches: int | None
    epochs: int
    updates_per_step: int | None
    micro_batches: MicroBatches


@dataclass(frozen=True)
class Schedule:
    """Learning rate over training steps. ``decay_steps`` is None where the rate stays constant after warm-up."""

    key: str
    lr: float
    min_lr: float
    style: str
    warmup_steps: int | None
    decay_steps: int | None
    weight_decay: float


@dataclass(frozen=True)
class Steps:
    """Length of the run, and what is due on the way.

    ``rows`` are those of the files, before any is dropped; None if they cannot be read. ``validation_rows`` is None if
    nothing is validated or they cannot be read; ``validate_every`` and ``save_every`` are None for never.
    """

    rows: int | None
    rows_used: int | None
    batch_key: str
    batch_size: int
    steps_per_epoch: int | None
    epochs: int
    total_steps: int | None
    total_key: str
    may_shrink: bool
    validation_rows: int | None
    validation_samples: int
    validate_every: int | None
    validate_first: bool
    save_every: int | None


@dataclass(frozen=True)
class BatchReport:
    """``items`` is "prompts" or "conversations"; ``responses_per_prompt`` is 1 for the latter."""

    items: str
    items_per_step: int
    responses_per_prompt: int
    rows_per_step: int
    data_parallel: int | None
    padding_multiple: int
    longest: int
    longest_formula: str
    updates: tuple[Updates, ...]
    passes: tuple[MicroBatches, ...]
    steps: Steps
    schedules: tuple[Schedule, ...]
    notes: tuple[str, ...]


def padding_multiple(tensor: int, context: int) -> int:
    """What each sequence is padded to a multiple of; `verl.models.mcore.packing.alignment` says the same with torch."""
    return tensor * 2 * context if context > 1 else tensor


def count_rows(value: Any) -> int | None:
    """Rows of the files of a data key; None if there are none or one cannot be read."""
    paths = [Path(name).expanduser() for name in as_paths(value)]
    try:
        return sum(open_data_file(path).num_rows for path in paths) if paths else None
    except ValueError:
        return None


def split_rows(
    name: str,
    rows: int | None,
    longest: int,
    context: int,
    *,
    dynamic: bool,
    size: tuple[str, int | None],
    budget: tuple[str, int | None],
    divisor: int = 1,
) -> MicroBatches:
    """How many micro-batches a rank makes of ``rows`` sequences.

    With a token budget B for a micro-batch and sequences of up to L tokens, first fit puts at least B // L sequences
    into every micro-batch but the last, which bounds their number; the engine never makes more. The fewest, one, are
    made of sequences that fit together.

    Args:
        name: what is split.
        rows: sequences of the rank; None if unknown.
        longest: L.
        context: context-parallel size; B is the rank's budget times it.
        dynamic: by tokens, else by sequences.
        size: key and number of sequences in a micro-batch.
        budget: key and tokens of one rank.
        divisor: of the number of micro-batches (pipeline stages under virtual stages).
    """
    tokens = budget[1] if dynamic else None
    least = most = None
    if rows and not dynamic and size[1]:
        least = most = ceil(rows / size[1])
    elif rows and tokens and longest and tokens * context >= longest:
        each = tokens * context // longest
        least, most = divisor, ceil(ceil(rows / each) / divisor) * divisor
    return MicroBatches(
        name=name,
        rows=rows,
        dynamic=bool(dynamic),
        size_key=size[0],
        size=None if dynamic else size[1],
        budget_key=budget[0],
        tokens=tokens,
        tokens_times_cp=tokens * context if tokens else None,
        longest=longest,
        least=least,
        most=most,
    )


def _divide(value: int, by: int | None) -> int | None:
    return value // by if by and value % by == 0 else None


def _divisor(engine: Mapping[str, Any]) -> int:
    """What the number of micro-batches must be a multiple of."""
    return engine["pipeline_model_parallel_size"] if engine["virtual_pipeline_model_parallel_size"] else 1


def describe_ppo_batches(tree: Mapping, dp: int | None, uses_reference: bool) -> BatchReport:
    """The arithmetic of a PPO step; ``dp`` is None where the ranks do not divide into the layout."""
    data, actor, rollout = tree["data"], get(tree, f"{_A}.actor"), get(tree, f"{_A}.rollout")
    engine, n, train = actor["megatron"], rollout["n"], data["train_batch_size"]
    cp, longest = engine["context_parallel_size"], data["max_prompt_length"] + data["max_response_length"]
    updates = [_updates(actor, f"{_A}.actor", "actor", train, n, dp, longest)]
    passes = [_log_prob_pass(rollout, f"{_A}.rollout", "old log-probs", train * n, dp, longest, engine)]
    if uses_reference:
        ref = get(tree, f"{_A}.ref")
        passes.append(_log_prob_pass(ref, f"{_A}.ref", "reference log-probs", train * n, dp, longest, engine))
    sections = [(f"{_A}.actor.optim", actor["optim"])]
    if uses_critic(tree):
        critic = tree["critic"]
        updates.append(_updates(critic, "critic", "critic", train, n, dp, longest))
        key = "critic.ppo_infer_max_token_len_per_gpu"
        passes.append(
            split_rows(
                "values",
                _divide(train * n, dp),
                longest,
                cp,
                dynamic=critic["use_dynamic_bsz"],
                size=("critic.ppo_micro_batch_size_per_gpu", critic["ppo_micro_batch_size_per_gpu"]),
                budget=(key, get(tree, key)),
                divisor=_divisor(critic["megatron"]),
            )
        )
        sections.append(("critic.optim", critic["optim"]))
    notes: list[str] = []
    drawn = data["gen_batch_size"] or train
    batch_key = "data.gen_batch_size" if data["gen_batch_size"] else "data.train_batch_size"
    steps = describe_steps(tree, batch_key, drawn, data["filter_overlong_prompts"], notes)
    if get(tree, "algorithm.filter_groups.enable"):
        notes.append(
            f"dynamic sampling draws {drawn} prompts at a time until {train} are kept, so a step may use several "
            "batches of data and an epoch has fewer steps"
        )
    if get(tree, "trainer.critic_warmup") and uses_critic(tree):
        notes.append(f"the first {get(tree, 'trainer.critic_warmup')} steps update the critic only")
    return BatchReport(
        items="prompts",
        items_per_step=train,
        responses_per_prompt=n,
        rows_per_step=train * n,
        data_parallel=dp,
        padding_multiple=padding_multiple(engine["tensor_model_parallel_size"], cp),
        longest=longest,
        longest_formula=f"data.max_prompt_length {data['max_prompt_length']} + data.max_response_length "
        f"{data['max_response_length']}",
        updates=tuple(updates),
        passes=tuple(passes),
        steps=steps,
        schedules=tuple(describe_schedule(key, optim, _length(key, steps, tree)) for key, optim in sections),
        notes=tuple(notes),
    )


def _length(key: str, steps: Steps, tree: Mapping) -> int | None:
    """Updates that the schedule of an optimiser section counts; None if they are not known."""
    if steps.total_steps is None or key == "optim":
        return steps.total_steps
    return lengths_of_schedules(steps.total_steps, get(tree, "trainer.critic_warmup") or 0, True)[key]


def _updates(section: Mapping, path: str, name: str, train: int, n: int, dp: int | None, longest: int) -> Updates:
    mini, engine = section["ppo_mini_batch_size"], section["megatron"]
    count = _divide(train, mini)
    return Updates(
        name=name,
        mini_batch_prompts=mini,
        mini_batch_responses=mini * n,
        mini_batches=count,
        epochs=section["ppo_epochs"],
        updates_per_step=None if count is None else count * section["ppo_epochs"],
        micro_batches=split_rows(
            f"{name} update",
            _divide(mini * n, dp),
            longest,
            engine["context_parallel_size"],
            dynamic=section["use_dynamic_bsz"],
            size=(f"{path}.ppo_micro_batch_size_per_gpu", section["ppo_micro_batch_size_per_gpu"]),
            budget=(f"{path}.ppo_max_token_len_per_gpu", section["ppo_max_token_len_per_gpu"]),
            divisor=_divisor(engine),
        ),
    )


def _log_prob_pass(
    section: Mapping, path: str, name: str, rows: int, dp: int | None, longest: int, engine: Mapping
) -> MicroBatches:
    return split_rows(
        name,
        _divide(rows, dp),
        longest,
        engine["context_parallel_size"],
        dynamic=section["log_prob_use_dynamic_bsz"],
        size=(f"{path}.log_prob_micro_batch_size_per_gpu", section["log_prob_micro_batch_size_per_gpu"]),
        budget=(f"{path}.log_prob_max_token_len_per_gpu", section["log_prob_max_token_len_per_gpu"]),
        divisor=_divisor(engine),
    )


def describe_sft_batches(tree: Mapping, dp: int | None) -> BatchReport:
    """The arithmetic of an SFT step; ``dp`` is None where the ranks do not divide into the layout."""
    data, engine = tree["data"], tree["engine"]
    batch, longest, cp = data["train_batch_size"], data["max_length"], engine["context_parallel_size"]
    micro = split_rows(
        "update",
        _divide(batch, dp),
        longest,
        cp,
        dynamic=data["use_dynamic_bsz"],
        size=("data.micro_batch_size_per_gpu", data["micro_batch_size_per_gpu"]),
        budget=("data.max_token_len_per_gpu", data["max_token_len_per_gpu"]),
        divisor=_divisor(engine),
    )
    notes: list[str] = []
    steps = describe_steps(tree, "data.train_batch_size", batch, False, notes)
    return BatchReport(
        items="conversations",
        items_per_step=batch,
        responses_per_prompt=1,
        rows_per_step=batch,
        data_parallel=dp,
        padding_multiple=padding_multiple(engine["tensor_model_parallel_size"], cp),
        longest=longest,
        longest_formula=f"data.max_length {longest}",
        updates=(Updates("model", batch, batch, 1, 1, 1, micro),),
        passes=(),
        steps=steps,
        schedules=(describe_schedule("optim", tree["optim"], steps.total_steps),),
        notes=tuple(notes),
    )


def describe_steps(tree: Mapping, batch_key: str, batch_size: int, may_shrink: bool, notes: list[str]) -> Steps:
    """Steps of an epoch and of the run, from the number of rows in the files.

    Args:
        tree: the config, with ``data.train_files`` and the trainer's epochs and steps.
        batch_key: key of the number of rows drawn at a time.
        batch_size: that number.
        may_shrink: whether rows will be dropped that only the tokenizer can find.
        notes: takes a sentence where the steps need more epochs than are set.
    """
    data, trainer = tree["data"], tree["trainer"]
    rows, used = _rows_used(data, "train")
    per_epoch = used // batch_size if used is not None else None
    total, wanted = None, trainer["total_training_steps"]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if per_epoch or wanted:
                total = resolve_total_steps(per_epoch or wanted, trainer["total_epochs"], wanted)
        notes += [str(warning.message) for warning in caught]
    except ValueError:
        pass  # a count below 1, which the checks of the configuration name
    return Steps(
        rows=rows,
        rows_used=used,
        batch_key=batch_key,
        batch_size=batch_size,
        steps_per_epoch=per_epoch,
        epochs=trainer["total_epochs"],
        total_steps=total,
        total_key="trainer.total_training_steps" if wanted else "trainer.total_epochs",
        may_shrink=bool(may_shrink),
        validation_rows=_rows_used(data, "val")[1],
        validation_samples=get(tree, f"{_A}.rollout.val_kwargs.n") or 1,
        validate_every=_every(trainer["test_freq"]),
        validate_first=bool(trainer.get("val_before_train", False) and data["val_files"]),
        save_every=_every(trainer["save_freq"]),
    )


def _rows_used(data: Mapping, kind: str) -> tuple[int | None, int | None]:
    """Rows of the training or validation files, and those of them that are used."""
    rows, most = count_rows(data[f"{kind}_files"]), data[f"{kind}_max_samples"]
    return rows, most if rows is not None and 0 <= most < rows else rows


def _every(steps: int | None) -> int | None:
    return steps if steps and steps > 0 else None


def describe_schedule(key: str, optim: Mapping, total: int | None) -> Schedule:
    """The learning rate's schedule as `verl.utils.megatron.optimizer.build_lr_scheduler` makes it."""
    warmup = optim["lr_warmup_steps"]
    if warmup is None or warmup < 0:
        ratio = optim["lr_warmup_steps_ratio"]
        warmup = 0 if not ratio else None if total is None else int(ratio * total)
    is_constant = optim["lr_decay_style"] == "constant"
    return Schedule(
        key=key,
        lr=optim["lr"],
        min_lr=optim["min_lr"],
        style=optim["lr_decay_style"],
        warmup_steps=warmup,
        decay_steps=None if is_constant else optim["lr_decay_steps"] or total,
        weight_decay=optim["weight_decay"],
    )


def warmup_problems(batches: BatchReport, tree: Mapping) -> list[str]:
    """Schedules whose warm-up is longer than the run."""
    problems = []
    for schedule in batches.schedules:
        length = _length(schedule.key, batches.steps, tree)
        if length is None:
            continue
        optim = SimpleNamespace(**{name: value for name, value in get(tree, schedule.key).items() if name[0] != "_"})
        try:
            check_warmup(schedule.key, optim, length)
        except ValueError as error:
            problems.append(str(error))
    return problems
