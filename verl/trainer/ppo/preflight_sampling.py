# SPDX-License-Identifier: Apache-2.0
"""Checks of dynamic sampling: whether groups can differ, and whether its keys have an effect."""

from collections.abc import Mapping

from verl.trainer.ppo.preflight_batch import get


def check_filter_groups(tree: Mapping) -> list[str]:
    """What is wrong with algorithm.filter_groups and data.gen_batch_size, given as nested dicts."""
    groups, n = get(tree, "algorithm.filter_groups"), get(tree, "actor_rollout_ref.rollout.n")
    drawn, train = get(tree, "data.gen_batch_size"), get(tree, "data.train_batch_size")
    if not groups["enable"]:
        if drawn in (None, train):
            return []
        return [
            f"data.gen_batch_size={drawn} differs from data.train_batch_size={train} and has no effect without "
            "algorithm.filter_groups.enable=True; leave it out"
        ]
    errors = []
    if n < 2:
        errors.append(
            f"algorithm.filter_groups.enable=True compares the responses to a prompt, and actor_rollout_ref.rollout.n="
            f"{n} gives one; set rollout.n=2 or more"
        )
    if groups["metric"] == "seq_final_reward" and get(tree, "algorithm.use_kl_in_reward"):
        errors.append(
            "algorithm.filter_groups.metric='seq_final_reward' is not supported with algorithm.use_kl_in_reward=True: "
            "groups are filtered before the penalty is known; use seq_reward"
        )
    return errors
