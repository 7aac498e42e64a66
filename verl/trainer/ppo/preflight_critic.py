# SPDX-License-Identifier: Apache-2.0
"""Checks of the critic's part of a PPO config. Each function returns sentences about what is wrong."""

from collections.abc import Mapping

from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight_batch import (
    check_budget,
    check_mini_batch,
    check_model_options,
    check_virtual_stages,
    get,
)
from verl.trainer.ppo.preflight_files import check_model_folder
from verl.trainer.ppo.preflight_regime import check_guards

ENGINE, MODEL = "critic.megatron", "critic.model"


def uses_critic(tree: Mapping) -> bool:
    """Whether there is a critic: as ``critic.enable`` says, or, if that is null, as the advantage estimator needs."""
    enable = get(tree, "critic.enable")
    return get(tree, "algorithm.adv_estimator") in tables.NEEDS_CRITIC if enable is None else bool(enable)


def check_presence(tree: Mapping) -> list[str]:
    """Whether the estimator has the critic that it reads, and the warm-up one to warm."""
    if uses_critic(tree):
        return []
    errors = []
    name, warmup = get(tree, "algorithm.adv_estimator"), get(tree, "trainer.critic_warmup")
    if name in tables.NEEDS_CRITIC:
        errors.append(
            f"critic.enable=False leaves algorithm.adv_estimator={name!r} without the values it needs; leave "
            "critic.enable out, or set algorithm.adv_estimator=grpo"
        )
    if warmup:
        errors.append(
            f"trainer.critic_warmup={warmup} needs a critic, and algorithm.adv_estimator={name!r} has none; leave it "
            "out, or set algorithm.adv_estimator=gae"
        )
    return errors


def check_layout_of_critic(tree: Mapping, dp_size: int | None) -> list[str]:
    """The critic's layout, which must be the actor's, its batches and its budgets.

    Args:
        tree: the config.
        dp_size: data-parallel ranks; None if the layout does not fit the world, which is said elsewhere.
    """
    critic, actor_engine = tree["critic"], get(tree, "actor_rollout_ref.actor.megatron")
    engine, padding_free = critic["megatron"], get(tree, f"{MODEL}.use_remove_padding")
    errors = [
        f"{ENGINE}.{name}={engine[name]} differs from actor_rollout_ref.actor.megatron.{name}={actor_engine[name]}: "
        "the critic runs in the actor's processes and layout; leave it out"
        for name in tables.LAYOUT_FIELDS
        if engine[name] != actor_engine[name]
    ]
    errors += check_model_options(engine, ENGINE, MODEL, padding_free)
    errors += check_guards(engine, ENGINE, critic["model"], MODEL, critic["loss_agg_mode"])
    train, n = get(tree, "data.train_batch_size"), get(tree, "actor_rollout_ref.rollout.n")
    errors += check_mini_batch(critic, "critic", train, n, dp_size)
    if critic["rollout_n"] != get(tree, "actor_rollout_ref.rollout.n"):
        errors.append(
            f"critic.rollout_n={critic['rollout_n']} contradicts actor_rollout_ref.rollout.n="
            f"{get(tree, 'actor_rollout_ref.rollout.n')}; set the latter only"
        )
    if critic["use_dynamic_bsz"]:
        for key in ("ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu"):
            errors += check_budget(tree, f"critic.{key}", engine["context_parallel_size"])
    return errors + _check_value_pass(tree, dp_size)


def _check_value_pass(tree: Mapping, dp_size: int | None) -> list[str]:
    """Values are computed for the whole batch at once; virtual stages need a fitting number of micro-batches there."""
    critic, dynamic = tree["critic"], get(tree, "critic.use_dynamic_bsz")
    micro = None if dynamic else critic["ppo_micro_batch_size_per_gpu"]
    if not dp_size or not (dynamic or micro):
        return []
    rows = get(tree, "data.train_batch_size") * get(tree, "actor_rollout_ref.rollout.n") // dp_size
    key = "critic.use_dynamic_bsz=True" if dynamic else "critic.ppo_micro_batch_size_per_gpu"
    return check_virtual_stages(get(tree, ENGINE), key, micro, rows)


def check_critic_files(tree: Mapping, notes: list[str] | None = None) -> list[str]:
    """The critic's model folder, where it is another than the actor's; ``notes`` as in `check_model_folder`."""
    path, model = get(tree, f"{MODEL}.path"), get(tree, MODEL)
    if not path or path == get(tree, "actor_rollout_ref.model.path"):
        return []
    return check_model_folder(MODEL, model, notes)
