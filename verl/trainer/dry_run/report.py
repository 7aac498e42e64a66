# SPDX-License-Identifier: Apache-2.0
"""Everything that a dry run tells, as one object."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.trainer.dry_run.batches import (
    BatchReport,
    describe_ppo_batches,
    describe_sft_batches,
    warmup_problems,
)
from verl.trainer.dry_run.layout import LayoutReport, World, describe_layout
from verl.trainer.dry_run.memory import (
    MemoryReport,
    describe_generation_memory,
    describe_ppo_memory,
    describe_sft_memory,
)
from verl.trainer.dry_run.offline import OfflineReport, describe_evaluation, describe_generation
from verl.trainer.dry_run.regime import RegimeReport, describe_regimes
from verl.trainer.ppo.preflight import (
    ACTOR,
    ENGINE,
    MODEL,
    Findings,
    check_ppo_config,
    check_sft_config,
    uses_reference,
)
from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.trainer.ppo.preflight_model import ThisMachine, read_model
from verl.trainer.ppo.preflight_offline import check_evaluation_config, check_generation_config
from verl.trainer.ppo.preflight_repair import is_consequence, value_in_words, with_usable_numbers
from verl.utils.config import compose_config, flatten, to_tree

COMMANDS = {
    "ppo_trainer": "verl.trainer.main_ppo",
    "sft_trainer_engine": "verl.trainer.sft_trainer",
    "generation": "verl.trainer.main_generation",
    "evaluation": "verl.trainer.main_eval",
}
_CHECKS: dict[str, Callable[..., Findings]] = {
    "ppo_trainer": check_ppo_config,
    "sft_trainer_engine": check_sft_config,
    "generation": check_generation_config,
    "evaluation": check_evaluation_config,
}


@dataclass(frozen=True)
class ChangedKey:
    """A key whose value, as written, is not the shipped one."""

    key: str
    value: Any
    default: Any


@dataclass(frozen=True)
class UnreadKey:
    """A key that is set and has no effect here, and why."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Report:
    """What a command would do. Sections that the command does not have, or that cannot be told, are None or empty."""

    command: str
    errors: tuple[str, ...]
    notes: tuple[str, ...] = ()
    layout: LayoutReport | None = None
    batches: BatchReport | None = None
    regimes: tuple[RegimeReport, ...] = ()
    offline: OfflineReport | None = None
    memory: MemoryReport | None = None
    changed: tuple[ChangedKey, ...] = ()
    unread: tuple[UnreadKey, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, else 2."""
        return 2 if self.errors else 0


def build_report(config: DictConfig | None, config_name: str, refused: Sequence[str] = ()) -> Report:
    """Check a config and describe what it asks for.

    Args:
        config: composed by hydra; None if that was not possible.
        config_name: its name in ``verl/trainer/config``.
        refused: what hydra said of arguments that are left out of ``config``.
    """
    command = COMMANDS[config_name]
    if config is None:
        return Report(command, tuple(refused))
    try:
        found = _CHECKS[config_name](config, is_dry_run=True)
    except ValueError as error:  # an interpolation that leads nowhere
        return Report(command, (*refused, *str(error).splitlines()), changed=changed_keys(config, config_name))
    key_errors = [*refused, *found.key_errors]
    doubtful = [problem for problem in found.errors if is_consequence(problem, key_errors)]
    elsewhere = [problem for problem in found.errors if isinstance(problem, ThisMachine) and problem not in doubtful]
    errors = [problem for problem in found.errors if problem not in (*doubtful, *elsewhere)]
    tree, unusable = with_usable_numbers(found.tree, found.defaults, config_name)
    parts = _describe(tree, config_name, found)
    if parts.get("batches") is not None:
        errors += warmup_problems(parts["batches"], tree)
    notes = [*_repair_notes(found, unusable), *_doubts(doubtful), *found.notes, *elsewhere]
    return Report(
        command=command,
        errors=tuple(dict.fromkeys([*key_errors, *errors])),
        notes=(*notes, *_place_notes(tree, config_name)),
        changed=changed_keys(config, config_name),
        unread=tuple(UnreadKey(key, value, why) for key, value, why in found.no_effect),
        **parts,
    )


def _describe(tree: dict, config_name: str, found: Findings) -> dict[str, Any]:
    if config_name == "evaluation":
        return {"offline": describe_evaluation(tree)}
    world = world_of(tree["trainer"], config_name, os.environ)
    if config_name == "generation":
        work = describe_generation(tree, world.size)
        return {"offline": work, "memory": describe_generation_memory(tree, work)}
    if config_name == "sft_trainer_engine":
        engines = [("engine", tree["engine"], "model", tree["model"], None)]
        roles: tuple[str, ...] = ("its share of the model, which is trained",)
    else:
        engines = [(ENGINE, get(tree, ENGINE), MODEL, get(tree, MODEL), get(tree, f"{ACTOR}.loss_agg_mode"))]
        roles = ppo_roles(tree)
        if uses_critic(tree):
            critic = tree["critic"]
            engines.append(
                ("critic.megatron", critic["megatron"], "critic.model", critic["model"], critic["loss_agg_mode"])
            )
    path, engine, _, model, _ = engines[0]
    facts = read_model(model)
    layers, experts = (None, None) if facts is None else (facts.number("num_hidden_layers"), facts.num_experts)
    layout = describe_layout(engine, path, world, layers, experts, roles)
    if config_name == "ppo_trainer":
        batches = describe_ppo_batches(tree, layout.data, uses_reference(tree))
        memory = describe_ppo_memory(tree, layout, batches, uses_reference(tree))
    else:
        batches = describe_sft_batches(tree, layout.data)
        memory = describe_sft_memory(tree, layout, batches)
    return {"layout": layout, "batches": batches, "regimes": tuple(describe_regimes(engines)), "memory": memory}


def ppo_roles(tree: Mapping) -> tuple[str, ...]:
    """What every process of a PPO run holds."""
    roles = ["its share of the actor, which is trained"]
    if uses_reference(tree):
        roles.append("its share of the reference model (the weights of model.path, frozen)")
    if uses_critic(tree):
        roles.append("its share of the critic, which is trained")
    name = get(tree, "actor_rollout_ref.rollout.name")
    return (*roles, f"a whole copy of the model for the rollout ({name}), which is not sharded")


def world_of(trainer: Mapping, config_name: str, env: Mapping[str, str]) -> World:
    """The processes of a run; under torchrun, which only the SFT trainer knows, those that it has started."""
    if config_name == "sft_trainer_engine" and env.get("WORLD_SIZE", "").isdecimal():
        size = int(env["WORLD_SIZE"])
        return World(size, "WORLD_SIZE of torchrun", int(env.get("LOCAL_WORLD_SIZE") or size))
    nodes, per_node = trainer["nnodes"], trainer["n_gpus_per_node"]
    return World(nodes * per_node, f"trainer.nnodes {nodes} x trainer.n_gpus_per_node {per_node}", per_node)


def _doubts(errors: Sequence[str]) -> list[str]:
    return [f"perhaps only because of an error below: {error}" for error in errors]


def _repair_notes(found: Findings, unusable: Sequence[str]) -> list[str]:
    """For which keys the numbers of the report are not those of the command line."""
    known = flatten(found.defaults)
    return [
        f"the numbers are those of {key}={value_in_words(known[key])}, the default"
        for key in (*sorted(found.bad_keys), *unusable)
        if key in known
    ]


def _place_notes(tree: Mapping, config_name: str) -> list[str]:
    """What depends on the machine that the command will run on, and is not checked."""
    notes = []
    if config_name == "sft_trainer_engine" and tree["trainer"]["nnodes"] > 1 and "WORLD_SIZE" not in os.environ:
        notes.append(f"trainer.nnodes={tree['trainer']['nnodes']} needs torchrun on every node")
    folder = tree["trainer"].get("default_local_dir")
    if folder:
        notes.append(f"not checked: whether trainer.default_local_dir={Path(folder)} can be written to")
    return notes


@functools.cache
def _shipped(config_name: str) -> dict[str, Any]:
    return flatten(to_tree(compose_config(config_name), resolve=False))


def changed_keys(config: DictConfig, config_name: str) -> tuple[ChangedKey, ...]:
    """The keys that were written, with their values; what follows another key is not listed."""
    given = flatten(to_tree(config, resolve=False))
    shipped = _shipped(config_name)
    return tuple(
        ChangedKey(key, value, shipped.get(key))
        for key, value in given.items()
        if (key not in shipped or value != shipped[key]) and key != "trainer.dry_run"
    )
