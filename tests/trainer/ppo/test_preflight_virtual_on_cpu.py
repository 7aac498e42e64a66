# SPDX-License-Identifier: Apache-2.0
"""Virtual pipeline stages take a multiple of the pipeline size of micro-batches: in updates and in every other pass."""

import copy
from typing import Any

import pytest

from verl.trainer.ppo.preflight_batch import check_ppo_batches, check_sft_batches, check_virtual_stages
from verl.trainer.ppo.preflight_critic import check_layout_of_critic
from verl.utils.config import compose_config, to_tree

A = "actor_rollout_ref"
SIZES = [f"{A}.actor.megatron.{name}_model_parallel_size=2" for name in ("pipeline", "virtual_pipeline")]
PPO = to_tree(
    compose_config(
        "ppo_trainer",
        [
            *("algorithm.adv_estimator=gae", f"{A}.rollout.name=hf", "data.train_batch_size=16", *SIZES),
            *(f"{A}.actor.ppo_mini_batch_size=8", f"{A}.rollout.n=2", f"{A}.actor.ppo_micro_batch_size_per_gpu=2"),
            *(f"{A}.{part}.log_prob_micro_batch_size_per_gpu=4" for part in ("rollout", "ref")),
            *("critic.ppo_micro_batch_size_per_gpu=4", "critic.ppo_mini_batch_size=16"),
        ],
    )
)
SFT = to_tree(
    compose_config(
        "sft_trainer_engine",
        [
            *("engine.pipeline_model_parallel_size=2", "engine.virtual_pipeline_model_parallel_size=2"),
            *("data.train_batch_size=16", "data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=4"),
        ],
    )
)


def changed(tree: dict, changes: dict[str, Any]) -> dict:
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return tree


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (f"{A}.actor.ppo_micro_batch_size_per_gpu", 16, "1 micro-batches of the 16 rows"),
        (f"{A}.rollout.log_prob_micro_batch_size_per_gpu", 12, "makes 3 micro-batches of the 32 rows"),
        (f"{A}.ref.log_prob_micro_batch_size_per_gpu", 32, "use 31"),
        ("critic.ppo_micro_batch_size_per_gpu", 32, "makes 1 micro-batches of the 32 rows"),
    ],
)
def test_every_pass_of_ppo_is_counted(key: str, value: int, words: str) -> None:
    def problems(tree: dict) -> list[str]:
        return check_ppo_batches(tree, 1, True) + check_layout_of_critic(tree, 1)

    assert problems(PPO) == []
    found = set(problems(changed(PPO, {key: value})))
    assert len(found) == 1, found
    (error,) = found
    assert error.startswith(f"{key}={value} makes ") and words in error
    assert "multiple of pipeline_model_parallel_size=2" in error
    without = {f"{name}.megatron.virtual_pipeline_model_parallel_size": None for name in (f"{A}.actor", "critic")}
    assert problems(changed(PPO, {key: value} | without)) == []


def test_fine_tuning_is_counted() -> None:
    assert check_sft_batches(SFT, 1) == []
    (found,) = check_sft_batches(changed(SFT, {"data.micro_batch_size_per_gpu": 16}), 1)
    assert found.startswith("data.micro_batch_size_per_gpu=16 makes 1 micro-batches") and "use 15" in found
    (found,) = check_sft_batches(changed(SFT, {"data.use_dynamic_bsz": True}), 16)
    assert found.startswith("data.use_dynamic_bsz=True makes at most 1 micro-batches of the 1 rows")


def test_the_sizes_that_are_offered_are_right() -> None:
    engine = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    for rows in range(1, 40):
        for micro in range(1, rows + 1):
            for error in check_virtual_stages(engine, "key", micro, rows):
                offered = error.partition("; use ")[2].partition(" rows")[0]
                sizes = [int(word) for word in offered.split() if word.isdigit()]
                assert all(-(-rows // size) % 4 == 0 for size in sizes)
                assert sizes or "larger batches" in offered
