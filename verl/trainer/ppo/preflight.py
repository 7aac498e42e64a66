# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration before anything is started: no torch, no Ray, no model, a second or two.

How an entry point uses it::

    def prepare(config):
        validate_ppo_config(config)        # one ValueError with every problem found
        ...                                # open data and tokenizer; a ValueError here reads just the same
        return lambda: train(config)       # from here on an exception is a fault and shows its traceback

    def main():
        run_hydra(prepare, "ppo_trainer")

``run_hydra`` composes the config from the command line and calls ``prepare``. What hydra refuses (unknown keys, wrong
syntax) and any ``ValueError`` of ``prepare`` goes to stderr as one sentence a problem, without a traceback, and the
process exits with 2. ``prepare`` may return a function of no arguments, which is then called, or None.
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight_algos import check_algorithm
from verl.trainer.ppo.preflight_batch import (
    check_model_options,
    check_ppo_batches,
    check_sft_batches,
    get,
    model_parallel_size,
)
from verl.trainer.ppo.preflight_critic import (
    check_critic_files,
    check_layout_of_critic,
    check_presence,
    uses_critic,
)
from verl.trainer.ppo.preflight_files import (
    PROMPT_ROW,
    check_data_sources,
    check_dist_checkpoints,
    check_model_folder,
    check_num_rows,
    check_reward_file,
    open_data_files,
)
from verl.trainer.ppo.preflight_layout import check_layout
from verl.trainer.ppo.preflight_model import RefusedByEngine, allows_layout, check_ppo_models, check_sft_model
from verl.trainer.ppo.preflight_overrides import check_ppo_overrides, check_sft_overrides
from verl.trainer.ppo.preflight_regime import check_guards
from verl.trainer.ppo.preflight_repair import all_positive, is_consequence, with_defaults_at, with_usable_numbers
from verl.trainer.ppo.preflight_resume import check_resume
from verl.trainer.ppo.preflight_sampling import check_filter_groups
from verl.trainer.ppo.preflight_values import with_values, without_followers
from verl.trainer.ppo.preflight_warnings import ppo_warnings, save_warnings, sft_warnings
from verl.utils.config import (
    CONFIG_DIR,
    compose_config,
    default_tree,
    explain_hydra_error,
    explain_unknown_key,
    flatten,
    is_free_form,
    is_of_type,
    omega_conf_to_dataclass,
    to_tree,
    type_in_words,
)
from verl.utils.environment import MIN_PYTHON
from verl.utils.quiet import quiet_libraries
from verl.utils.run_end import last_words
from verl.workers.config.names import SERVER_ROLLOUTS, name_problems
from verl.workers.config.reward import REWARD_MANAGERS, reward_kwargs_problem

logger = logging.getLogger(__name__)

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL, ENGINE = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"


def run_hydra(prepare: Callable[[DictConfig], Callable[[], Any] | None], config_name: str) -> None:
    """Compose ``config_name`` from the command line, let ``prepare`` check it, then run what ``prepare`` returns.

    Args:
        prepare: takes the composed config and raises ``ValueError`` for what is wrong with it; may return a function.
        config_name: a config in ``verl/trainer/config``.

    Raises:
        SystemExit: 2 after a refused configuration, 1 after a failed run, 130 after Ctrl-C; stderr ends with the
            reason.
    """
    refuse_old_python()
    from hydra.errors import HydraException

    refusals: list[str] = []

    @functools.wraps(prepare)
    def job(config: DictConfig) -> Any:
        with last_words():
            try:
                start = prepare(config)
            except ValueError as error:
                # Not raised through hydra, which would put its own lines around the sentence.
                refusals.append(str(error))
                return None
            return start() if start is not None else None

    try:
        call_with_config(job, config_name)
    except HydraException as error:
        refuse(explain_hydra_error(error, config_name, tables.MOVED))
    if refusals:
        refuse("\n".join(refusals))


def refuse_old_python() -> None:
    """Exit with 2 where Python is older than what the package is written for."""
    if sys.version_info < MIN_PYTHON:
        have, need = (".".join(map(str, version[:2])) for version in (sys.version_info, MIN_PYTHON))
        refuse(f"Python {need} or later is needed, and this is Python {have} ({sys.executable})")


def call_with_config(job: Callable[[DictConfig], Any], config_name: str) -> None:
    """Call ``job`` with ``config_name``, composed by hydra from ``sys.argv``.

    Raises:
        HydraException: hydra refuses the command line.
    """
    import hydra
    from hydra.errors import HydraException

    quiet_libraries()
    entered = False

    @functools.wraps(job)
    def enter(config: DictConfig) -> Any:
        nonlocal entered
        entered = True
        return job(config)

    # Hydra names the job's log after the module the job comes from.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if enter.__module__ == "__main__" and spec is not None:
        enter.__module__ = spec.name
    # With this set, hydra raises instead of printing its own traceback and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(CONFIG_DIR), config_name=config_name, version_base="1.3")(enter)()
    except ValueError as error:
        if entered:
            raise
        # Hydra takes a key without a dot for one of its groups, and its number for a fault of the program's.
        bare = [argument for argument in sys.argv[1:] if not re.search("[./]", argument.partition("=")[0])]
        raise HydraException(
            f"{' '.join(bare)}: a whole group of keys takes no number; write KEY.NAME=VALUE"
        ) from error


def refuse(reason: str) -> None:
    """Print the lines of ``reason`` as errors and exit with 2."""
    # Under a launcher every rank refuses; one of them says why.
    if os.environ.get("RANK", "0") == "0":
        problems = [line for line in reason.splitlines() if line.strip()]
        head = "error:" if len(problems) == 1 else f"{len(problems)} errors\n "
        print(head, "\n  ".join(problems), file=sys.stderr, flush=True)
    raise SystemExit(2)


@dataclass
class Findings:
    """What the checks of a configuration have found.

    Attributes:
        tree: the configuration as nested dicts, interpolations resolved. In a dry run, keys that are unknown, gone or
            of another type have their defaults in it, so that everything else can still be checked.
        defaults: the shipped configuration, likewise.
        bad_keys: these keys.
        key_errors: sentences about them.
        errors: sentences about everything else that is wrong.
        notes: what is allowed and worth a warning; in a dry run also what is missing here and may be.
        no_effect: key, value and reason of each key that is set and not read.
        is_dry_run: whether nothing will be started.
    """

    tree: dict
    defaults: dict
    bad_keys: set[str]
    key_errors: list[str]
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    no_effect: list[tuple[str, Any, str]] = field(default_factory=list)
    is_dry_run: bool = False

    def may_check(self, *prefixes: str) -> bool:
        """Whether the keys with these prefixes can be read."""
        return self.is_dry_run or not any(key.startswith(prefixes) for key in self.bad_keys)

    def note_refused_models(self) -> None:
        """In a dry run, tell of models that the engine refuses, which is no fault of the command line's."""
        if self.is_dry_run:
            self.notes += [error for error in self.errors if isinstance(error, RefusedByEngine)]
            self.errors = [error for error in self.errors if not isinstance(error, RefusedByEngine)]

    def refuse(self) -> None:
        """Raise ``ValueError`` if anything is wrong; otherwise log what is worth a warning."""
        refuse_all(self.key_errors + self.errors)
        for note in self.notes:
            logger.warning("%s", note)
        notes = [f"{key}={value} ({why})" for key, value, why in self.no_effect]
        if notes:
            logger.warning("without effect here: %s", "; ".join(notes))


def validate_ppo_config(config: DictConfig, env: Mapping[str, str] | None = None) -> None:
    """Check a ``ppo_trainer`` config, its files and the environment (``env``, by default the process's own).

    Raises:
        ValueError: every problem found, one a line, each with the key, its value and the nearest right one.
    """
    check_ppo_config(config, env).refuse()


def check_ppo_config(config: DictConfig, env: Mapping[str, str] | None = None, is_dry_run: bool = False) -> Findings:
    """`validate_ppo_config` as findings; raises ``ValueError`` only for a config that cannot be read at all."""
    found = read_findings(config, "ppo_trainer", is_dry_run)
    tree, defaults = found.tree, found.defaults
    found.errors += _check_not_torchrun(os.environ if env is None else env)
    if found.may_check(""):
        _check_ppo_values(found)
    if found.may_check("data", "reward", MODEL):
        _check_ppo_files(tree, found.errors, found.notes, is_dry_run)
    if found.may_check(""):
        found.errors = with_values(found.errors, tree, "ppo_trainer")
    found.no_effect = _changed(tree, defaults, _ppo_no_effect(tree, defaults))
    found.note_refused_models()
    found.notes += ppo_warnings(tree) if found.may_check("") else []
    return found


def validate_sft_config(config: DictConfig, env: Mapping[str, str] | None = None) -> None:
    """Check an ``sft_trainer_engine`` config and its files; under torchrun ``WORLD_SIZE`` is the number of ranks.

    Raises:
        ValueError: every problem found, one a line, each with the key, its value and the nearest right one.
    """
    check_sft_config(config, env).refuse()


def check_sft_config(config: DictConfig, env: Mapping[str, str] | None = None, is_dry_run: bool = False) -> Findings:
    """`validate_sft_config` as findings; raises ``ValueError`` only for a config that cannot be read at all."""
    found = read_findings(config, "sft_trainer_engine", is_dry_run)
    if found.may_check(""):
        _check_sft_values(found, os.environ if env is None else env)
    if found.may_check("data", "model"):
        _check_sft_files(found.tree, found.errors, found.notes, is_dry_run)
    if found.may_check(""):
        found.errors = with_values(found.errors, found.tree, "sft_trainer_engine")
    reasons = _below("engine", tables.engine_no_effect(found.tree["engine"])) | _below("model", tables.MODEL_NO_EFFECT)
    found.no_effect = _changed(found.tree, found.defaults, reasons | tables.SFT_NO_EFFECT)
    found.note_refused_models()
    found.notes += sft_warnings(found.tree) if found.may_check("") else []
    return found


def read_findings(config: DictConfig, config_name: str, is_dry_run: bool = False) -> Findings:
    """The config and what is wrong with its keys.

    Raises:
        ValueError: an interpolation cannot be resolved.
    """
    errors: list[str] = []
    tree, defaults, bad_keys = read_config(config, config_name, errors)
    errors = without_followers(errors, tree, config_name)
    if is_dry_run:
        tree = with_defaults_at(tree, defaults, bad_keys)
    return Findings(tree, defaults, bad_keys, errors, is_dry_run=is_dry_run)


def refuse_all(errors: list[str]) -> None:
    """Raise ``ValueError`` with each of ``errors`` once, one a line, if there are any."""
    if errors:
        raise ValueError("\n".join(dict.fromkeys(errors)))


def _check_not_torchrun(env: Mapping[str, str]) -> list[str]:
    # RANK and WORLD_SIZE alone are also set by cluster schedulers that start Ray.
    if "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(env):
        return [
            "verl.trainer.main_ppo starts its own workers through Ray and cannot run under torchrun (RANK, WORLD_SIZE "
            "and LOCAL_RANK are set); run it once, with python3 -m verl.trainer.main_ppo"
        ]
    return []


def read_config(config: DictConfig, config_name: str, errors: list[str]) -> tuple[dict, dict, set[str]]:
    """The config and the shipped one as nested dicts, and the keys that are unknown, gone or of another type."""
    try:
        for key in sorted(OmegaConf.missing_keys(config)):
            errors.append(f"{key} must be set{_choices(config_name, key)}")
        tree = to_tree(config)
    except OmegaConfBaseException as error:
        raise ValueError("\n".join([*errors, explain_hydra_error(error, config_name, tables.MOVED)])) from error
    defaults = default_tree(config_name)
    problems = _check_keys(tree, defaults, config_name)
    errors += problems.values()
    return tree, defaults, set(problems)


def _choices(config_name: str, key: str) -> str:
    known = tables.ONE_OF[config_name].get(key)
    return f"; choose one of {', '.join(map(repr, known))}, for instance {key}={known[0]}" if known else ""


def _check_keys(tree: dict, shipped: dict, config_name: str) -> dict[str, str]:
    """What is wrong, by key: keys that the shipped config lacks, keys that are gone, values of another type."""
    flat, defaults = flatten(tree), flatten(shipped)
    problems = {}
    for key, value in flat.items():
        if key in defaults or is_free_form(key):
            continue
        inner = [name for name in defaults if name.startswith(f"{key}.")]
        outer = next((name for name in defaults if key.startswith(f"{name}.")), None)
        if inner and not (value == {} and all(map(is_free_form, inner))):
            problems[key] = f"{key}={value!r} must be a group of keys, such as {inner[0]}"
        elif outer:
            problems[key] = f"{outer} takes a value and no keys of its own, so {key} is not possible"
        elif not inner:
            problems[key] = explain_unknown_key(key, config_name, tables.MOVED)
    for key, default in defaults.items():
        if key in flat:
            problem = _type_problem(key, flat[key], default)
        elif is_free_form(key) or any(name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in flat):
            continue
        else:
            problem = f"{key} was taken out of the config; leave out the ~ and set it to {default!r}"
        if problem:
            problems[key] = problem
    return problems


def _type_problem(key: str, value: Any, default: Any) -> str | None:
    if default is None or value == "???" or is_free_form(key) or key.endswith("_target_"):
        return None
    if isinstance(default, list) or key.endswith("_files"):
        is_right, words = isinstance(value, str | list | None), "one value or a list of them"
    elif isinstance(default, dict):
        is_right, words = isinstance(value, dict | None), "a group of keys"
    else:
        server_keys = (f"{ROLLOUT}.{name}" for name in (*tables.ROLLOUT_SERVER_ONLY, "max_num_seqs"))
        is_right = is_of_type(value, type(default))
        if value is None:
            is_right = isinstance(default, str) or key in server_keys
        words = f"{type_in_words(type(default))}, such as {default!r}"
        if value == "after_each_epoch":
            words += "; it counts steps, of which an epoch has the number of rows over data.train_batch_size"
    return None if is_right else f"{key}={value!r} must be {words}"


def check_section(tree: dict, path: str, errors: list[str]) -> None:
    """Build the section's typed config, which checks the values that need no other section."""
    try:
        omega_conf_to_dataclass(get(tree, path), path=path)
    except ValueError as error:
        errors += str(error).splitlines()


def _check_tables(tree: dict, refused: Mapping[str, tuple[Any, str]], prefix: str, errors: list[str]) -> None:
    for key, (inert, instead) in refused.items():
        full = f"{prefix}.{key}" if prefix else key
        value = get(tree, full)
        if value != inert:
            errors.append(f"{full}={value!r} is not supported (only {inert!r} is): {instead}")


def _check_common(tree: dict, config_name: str, errors: list[str]) -> None:
    """Words, counts, trackers and the place to resume from."""
    for key, known in tables.ONE_OF[config_name].items():
        value = get(tree, key)
        if value not in (*known, "???"):
            name_error(key, value, known, errors)
    for key in tables.AT_LEAST_ONE[config_name]:
        value = get(tree, key)
        if value is not None and (not is_of_type(value, int) or value < 1):
            errors.append(f"{key}={value!r} must be a whole number of at least 1")
    trainer = tree["trainer"]
    for name in [trainer["logger"]] if isinstance(trainer["logger"], str) else trainer["logger"] or []:
        if name not in tables.LOGGERS:
            name_error("trainer.logger", name, tables.LOGGERS, errors)
    if trainer["resume_mode"] == "resume_path":
        path = trainer["resume_from_path"]
        if not path:
            errors.append(
                "trainer.resume_from_path is not set, and trainer.resume_mode=resume_path needs the folder of a "
                "checkpoint (global_step_...)"
            )
        elif not os.path.isdir(os.path.expanduser(path)):
            errors.append(f"trainer.resume_from_path={path!r} is not a folder; resume_mode='resume_path' needs one")
    errors += check_resume(tree, config_name)


def name_error(key: str, value: Any, known: tuple, errors: list[str]) -> None:
    """Add what is wrong with a name to ``errors``; the None among the known names is not shown."""
    if key.endswith("rollout.name") and value in SERVER_ROLLOUTS:
        errors.append(
            f"{key}={value!r} is not supported here; use {key}=hf, which keeps a whole copy of the model on each GPU "
            "(docs/rollout.md)"
        )
    else:
        errors += name_problems(key, value, [name for name in known if name is not None])


def _check_ppo_values(found: Findings) -> None:
    tree, errors = found.tree, found.errors
    _check_common(tree, "ppo_trainer", errors)
    errors += check_presence(tree)
    for path in (ACTOR, ROLLOUT, MODEL, REF, "algorithm", *["critic"] * uses_critic(tree)):
        check_section(tree, path, errors)
    if uses_critic(tree):
        _check_tables(tree, tables.ENGINE_REFUSED, "critic.megatron", errors)
        _check_tables(tree, tables.CRITIC_MODEL_REFUSED, "critic.model", errors)
        _check_tables(tree, tables.CHECKPOINT_REFUSED, "critic.checkpoint", errors)
    for prefix in tables.ENGINES["ppo_trainer"]:
        _check_tables(tree, tables.ENGINE_REFUSED, prefix, errors)
    _check_tables(tree, tables.MODEL_REFUSED, MODEL, errors)
    _check_tables(tree, tables.CHECKPOINT_REFUSED, f"{ACTOR}.checkpoint", errors)
    _check_tables(tree, tables.PPO_REFUSED, "", errors)
    errors += check_ppo_overrides(tree)
    errors += check_algorithm(tree)
    problem = reward_kwargs_problem(
        get(tree, "reward.reward_manager.name"),
        get(tree, "reward.reward_kwargs"),
        get(tree, "data.max_response_length"),
    )
    errors += (problem or "").splitlines()
    if all_positive(tree, ("data.gen_batch_size", f"{ROLLOUT}.n")):
        errors += check_filter_groups(tree)
    _check_with_usable_numbers(found, "ppo_trainer", _check_ppo_layout)
    # What the reference model copies from the actor is wrong once, not twice.
    errors[:] = [error for error in errors if error.replace(f"{REF}.", f"{ACTOR}.") not in errors or REF not in error]


def _check_with_usable_numbers(found: Findings, config_name: str, check: Callable[[dict, list[str]], None]) -> None:
    """Call ``check`` if its numbers can be divided by; in a dry run also with defaults where they cannot."""
    usable, wrong = with_usable_numbers(found.tree, found.defaults, config_name)
    if not wrong:
        check(usable, found.errors)
    elif found.is_dry_run:
        more: list[str] = []
        check(usable, more)
        found.errors += [error for error in more if not is_consequence(error, wrong)]


def uses_reference(tree: Mapping) -> bool:
    """Whether there is a reference model: for a KL penalty in the reward or in the loss."""
    return bool(get(tree, "algorithm.use_kl_in_reward") or get(tree, f"{ACTOR}.use_kl_loss"))


def _check_ppo_layout(tree: dict, errors: list[str]) -> None:
    engine, padding_free = get(tree, ENGINE), get(tree, f"{MODEL}.use_remove_padding")
    world_size = tree["trainer"]["nnodes"] * tree["trainer"]["n_gpus_per_node"]
    allowed = allows_layout(get(tree, MODEL), ENGINE)
    errors += check_layout(engine, ENGINE, world_size, "trainer.nnodes x trainer.n_gpus_per_node", allowed)
    errors += check_model_options(engine, ENGINE, MODEL, padding_free)
    errors += check_guards(engine, ENGINE, get(tree, MODEL), MODEL, get(tree, f"{ACTOR}.loss_agg_mode"))
    errors += check_ppo_models(tree, world_size)
    if uses_reference(tree):
        ref = get(tree, f"{REF}.megatron")
        for name in tables.LAYOUT_FIELDS:
            if ref[name] != engine[name]:
                errors.append(
                    f"{REF}.megatron.{name}={ref[name]} differs from {ENGINE}.{name}={engine[name]}: the reference "
                    "model runs in the actor's processes and layout; leave it out"
                )
    fits = world_size % model_parallel_size(engine) == 0
    dp_size = world_size // model_parallel_size(engine) if fits else None
    errors += check_ppo_batches(tree, dp_size, uses_reference(tree))
    if uses_critic(tree):
        errors += check_layout_of_critic(tree, dp_size)


def _check_ppo_files(tree: dict, errors: list[str], notes: list[str], is_dry_run: bool) -> None:
    data, custom = tree["data"], get(tree, "reward.custom_reward_function")
    names = {"prompt": data["prompt_key"], "data_source": data["reward_fn_key"], "reward_model": "reward_model"}
    needed = {names[column]: value for column, value in PROMPT_ROW.items()}
    if not data["train_files"]:
        errors.append("data.train_files is empty; name at least one .parquet, .json or .jsonl file")
    for key in ("train_files", "val_files"):
        files = open_data_files(f"data.{key}", data[key], needed, errors)
        if key == "train_files" and files:
            own = "gen_batch_size" if data["gen_batch_size"] else "train_batch_size"
            errors += check_num_rows("data.train_files", files, data["train_max_samples"], f"data.{own}", data[own])
            notes += save_warnings(tree, [file.num_rows for file in files], data[own])
        if not custom["path"] and get(tree, "reward.reward_manager.name") in REWARD_MANAGERS:
            errors += check_data_sources(f"data.{key}", data["reward_fn_key"], files)
    if custom["path"]:
        manager = get(tree, "reward.reward_manager.name")
        errors += check_reward_file(custom, "reward.custom_reward_function", manager)
    if get(tree, f"{MODEL}.path"):
        errors += check_model_folder(MODEL, get(tree, MODEL), notes if is_dry_run else None)
    engines = [ENGINE, "actor_rollout_ref.ref.megatron"] if uses_reference(tree) else [ENGINE]
    if uses_critic(tree):
        errors += check_critic_files(tree, notes if is_dry_run else None)
        engines.append("critic.megatron")
    errors += check_dist_checkpoints(tree, engines)


def _check_sft_values(found: Findings, env: Mapping[str, str]) -> None:
    tree, errors = found.tree, found.errors
    _check_common(tree, "sft_trainer_engine", errors)
    for path in ("model", "engine", "optim", "checkpoint"):
        check_section(tree, path, errors)
    _check_tables(tree, tables.ENGINE_REFUSED, "engine", errors)
    _check_tables(tree, tables.MODEL_REFUSED, "model", errors)
    _check_tables(tree, tables.CHECKPOINT_REFUSED, "checkpoint", errors)
    _check_tables(tree, tables.SFT_REFUSED, "", errors)
    errors += check_sft_overrides(tree)
    _check_with_usable_numbers(found, "sft_trainer_engine", functools.partial(_check_sft_layout, env=env))


def _check_sft_layout(tree: dict, errors: list[str], env: Mapping[str, str]) -> None:
    engine, padding_free = tree["engine"], tree["model"]["use_remove_padding"]
    world_size, words = int(env.get("WORLD_SIZE", 0)), "WORLD_SIZE"
    if not world_size:
        world_size = tree["trainer"]["nnodes"] * tree["trainer"]["n_gpus_per_node"]
        words = "trainer.nnodes x trainer.n_gpus_per_node"
    errors += check_layout(engine, "engine", world_size, words, allows_layout(tree["model"], "engine"))
    errors += check_model_options(engine, "engine", "model", padding_free)
    errors += check_guards(engine, "engine", tree["model"], "model", None)
    errors += check_sft_model(tree, world_size)
    if world_size % model_parallel_size(engine) == 0:
        errors += check_sft_batches(tree, world_size // model_parallel_size(engine))


def _check_sft_files(tree: dict, errors: list[str], notes: list[str], is_dry_run: bool) -> None:
    data = tree["data"]
    needed = {data["messages_key"]: [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}]}
    if not data["train_files"]:
        errors.append("data.train_files is empty; name at least one .parquet, .json or .jsonl file")
    files = open_data_files("data.train_files", data["train_files"], needed, errors)
    if files:
        batch_size, most = data["train_batch_size"], data["train_max_samples"]
        errors += check_num_rows("data.train_files", files, most, "data.train_batch_size", batch_size)
        notes += save_warnings(tree, [file.num_rows for file in files], batch_size)
    open_data_files("data.val_files", data["val_files"], needed, errors)
    if tree["model"]["path"]:
        errors += check_model_folder("model", tree["model"], notes if is_dry_run else None)
    errors += check_dist_checkpoints(tree, ["engine"])


def _below(prefix: str, reasons: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{key}": reason for key, reason in reasons.items()}


def _changed(tree: dict, defaults: dict, reasons: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    changed = [(key, why) for key, why in reasons.items() if get(tree, key) != get(defaults, key)]
    return [(key, get(tree, key), why) for key, why in changed]


def _ppo_no_effect(tree: dict, defaults: dict) -> dict[str, str]:
    reasons = tables.PPO_NO_EFFECT | _critic_no_effect(tree, defaults) | _below(MODEL, tables.MODEL_NO_EFFECT)
    estimator = get(tree, "algorithm.adv_estimator")
    for key, readers in tables.READ_BY_ESTIMATORS.items():
        if estimator not in readers:
            reasons[key] = f"read by {' and '.join(readers)} only"
    reasons |= _below(ROLLOUT, dict.fromkeys(tables.ROLLOUT_SERVER_ONLY, "for rollout servers"))
    return reasons | _below(ENGINE, tables.engine_no_effect(get(tree, ENGINE)))


def _critic_no_effect(tree: dict, defaults: dict) -> dict[str, str]:
    if uses_critic(tree):
        critic = _below("critic.megatron", tables.engine_no_effect(get(tree, "critic.megatron")))
        return critic | _below("critic.model", tables.MODEL_NO_EFFECT)
    # What follows another key changes with it, and is nobody's setting.
    written = flatten(to_tree(compose_config("ppo_trainer").critic, resolve=False))
    own = [key for key in flatten(defaults["critic"]) if "${" not in str(written.get(key, ""))]
    critic = _below("critic", dict.fromkeys(own, "there is no critic"))
    return critic | {"trainer.max_critic_ckpt_to_keep": "there is no critic"}
