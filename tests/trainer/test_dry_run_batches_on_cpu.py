# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a step, against numbers worked out by hand and against the engine's own splitting."""

import random
from pathlib import Path

import pytest

from tests.trainer.config.files import CHAT, PROMPT, write_rows
from verl.models.mcore.packing import alignment
from verl.trainer.dry_run.batches import (
    describe_ppo_batches,
    describe_schedule,
    describe_sft_batches,
    padding_multiple,
    split_rows,
    warmup_problems,
)
from verl.utils.config import compose_config, flatten
from verl.utils.seqlen_balancing import _smallest_fitting

A = "actor_rollout_ref"


def tree_of(config_name: str, *overrides: str) -> dict:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(compose_config(config_name, overrides), resolve=True)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "prompts.jsonl", [PROMPT] * 100)


def ppo(prompts: Path, *overrides: str) -> dict:
    return tree_of(
        "ppo_trainer",
        f"data.train_files={prompts}",
        "data.train_batch_size=32",
        f"{A}.rollout.name=hf",
        f"{A}.rollout.n=4",
        f"{A}.actor.ppo_mini_batch_size=8",
        f"{A}.actor.ppo_epochs=2",
        f"{A}.actor.use_dynamic_bsz=True",
        f"{A}.actor.ppo_max_token_len_per_gpu=2000",
        f"{A}.actor.megatron.tensor_model_parallel_size=2",
        f"{A}.actor.megatron.context_parallel_size=2",
        "data.max_prompt_length=500",
        "data.max_response_length=1000",
        "algorithm.adv_estimator=grpo",
        *overrides,
    )


def test_a_ppo_step_by_hand(prompts: Path) -> None:
    report = describe_ppo_batches(ppo(prompts), dp=2, uses_reference=True)
    assert (report.items_per_step, report.responses_per_prompt, report.rows_per_step) == (32, 4, 128)
    (actor,) = report.updates
    # 32 prompts / 8 = 4 mini-batches, twice; 8 prompts x 4 = 32 responses over 2 ranks.
    assert (actor.mini_batches, actor.updates_per_step, actor.mini_batch_responses) == (4, 8, 32)
    part = actor.micro_batches
    assert (part.rows, part.tokens, part.tokens_times_cp, part.longest) == (16, 2000, 4000, 1500)
    # 4000 tokens hold two sequences of 1500, so 16 of them need at most 8 micro-batches.
    assert (part.least, part.most) == (1, 8)
    assert [(p.name, p.rows, p.most) for p in report.passes] == [
        ("old log-probs", 64, 32),
        ("reference log-probs", 64, 32),
    ]
    assert report.padding_multiple == 8
    steps = report.steps
    assert (steps.rows, steps.steps_per_epoch, steps.epochs, steps.total_steps) == (100, 3, 30, 90)


def test_a_fixed_micro_batch_size_is_an_exact_number(prompts: Path) -> None:
    changes = [f"{A}.actor.use_dynamic_bsz=False", f"{A}.actor.ppo_micro_batch_size_per_gpu=2"]
    changes += [f"{A}.rollout.log_prob_micro_batch_size_per_gpu=5"]
    report = describe_ppo_batches(ppo(prompts, *changes), dp=2, uses_reference=False)
    part = report.updates[0].micro_batches
    assert (part.rows, part.size, part.least, part.most, part.tokens) == (16, 2, 8, 8, None)
    assert report.passes[0].most == 13  # 64 rows, five at a time


def test_what_does_not_divide_is_unknown_and_the_rest_is_told(prompts: Path) -> None:
    report = describe_ppo_batches(ppo(prompts, f"{A}.actor.ppo_mini_batch_size=5"), dp=3, uses_reference=False)
    (actor,) = report.updates
    assert (actor.mini_batches, actor.updates_per_step, actor.micro_batches.rows) == (None, None, None)
    assert (actor.mini_batch_responses, report.rows_per_step, report.steps.total_steps) == (20, 128, 90)
    assert describe_ppo_batches(ppo(prompts), dp=None, uses_reference=False).updates[0].micro_batches.rows is None


def test_the_critic_has_its_own_numbers(prompts: Path) -> None:
    changes = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=16", "critic.ppo_epochs=3"]
    changes += ["critic.ppo_max_token_len_per_gpu=6000", "trainer.critic_warmup=5"]
    report = describe_ppo_batches(ppo(prompts, *changes), dp=2, uses_reference=False)
    critic = report.updates[1]
    assert (critic.name, critic.mini_batches, critic.updates_per_step) == ("critic", 2, 6)
    assert (critic.micro_batches.rows, critic.micro_batches.tokens_times_cp, critic.micro_batches.most) == (
        32,
        12000,
        4,
    )
    assert [p.name for p in report.passes] == ["old log-probs", "values"]
    assert [schedule.key for schedule in report.schedules] == [f"{A}.actor.optim", "critic.optim"]
    assert any("first 5 steps update the critic only" in note for note in report.notes)


def test_an_sft_step_by_hand(tmp_path: Path) -> None:
    chats = write_rows(tmp_path / "chats.parquet", [CHAT] * 50)
    tree = tree_of("sft_trainer_engine", f"data.train_files={chats}", "data.train_batch_size=12", "data.max_length=100")
    report = describe_sft_batches(tree, dp=3)
    assert report.updates[0].micro_batches.rows == 4
    assert (report.steps.steps_per_epoch, report.steps.total_steps) == (4, 16)


def test_the_number_of_steps(prompts: Path) -> None:
    def steps(*changes: str):
        report = describe_ppo_batches(ppo(prompts, *changes), dp=1, uses_reference=False)
        return report.steps, report.notes

    cut, _ = steps("data.train_max_samples=70")
    assert (cut.rows, cut.rows_used, cut.steps_per_epoch) == (100, 70, 2)
    given, notes = steps("trainer.total_training_steps=7", "trainer.total_epochs=2")
    assert (given.total_steps, given.total_key) == (7, "trainer.total_training_steps")
    assert any("needs 3 epochs" in note for note in notes)
    unknown, _ = steps("data.train_files=/no/such.parquet")
    assert (unknown.rows, unknown.steps_per_epoch, unknown.total_steps) == (None, None, None)
    assert steps("data.filter_overlong_prompts=True")[0].may_shrink
    drawn, notes = steps("algorithm.filter_groups.enable=True", "data.gen_batch_size=48")
    assert (drawn.batch_key, drawn.steps_per_epoch) == ("data.gen_batch_size", 2)
    assert any("dynamic sampling draws 48 prompts" in note for note in notes)


def test_what_is_due_on_the_way(prompts: Path) -> None:
    def due(*changes: str) -> tuple:
        steps = describe_ppo_batches(ppo(prompts, *changes), dp=1, uses_reference=False).steps
        return steps.validation_rows, steps.validate_first, steps.validate_every, steps.save_every

    assert due("data.val_files=null") == (None, False, None, None)
    changes = [f"data.val_files={prompts}", "data.val_max_samples=7", "trainer.test_freq=5", "trainer.save_freq=10"]
    assert due(*changes, "trainer.val_before_train=False") == (7, False, 5, 10)
    assert due(f"data.val_files={prompts}") == (100, True, None, None)


@pytest.mark.parametrize("divisor", [1, 2])
def test_the_engine_never_makes_more_micro_batches(divisor: int) -> None:
    rng = random.Random(0)
    reached = 0
    for _ in range(300):
        longest, rows = rng.randint(2, 50), rng.randint(1, 20)
        budget = rng.randint(longest, 4 * longest)
        part = split_rows("x", rows, longest, 1, dynamic=True, size=("", None), budget=("", budget), divisor=divisor)
        lengths = [rng.choice([longest, rng.randint(1, longest)]) for _ in range(rows)]
        made = -(-len(_smallest_fitting(lengths, budget)) // divisor) * divisor
        assert part.least <= made <= part.most, (lengths, budget)
        reached += len(_smallest_fitting([longest] * rows, budget)) == -(-rows // (budget // longest))
    assert reached == 300, "with sequences of the longest kind the bound is the number itself"


def test_too_small_a_bound_would_be_seen() -> None:
    # One part in three for sequences of just above half a budget, where a sum of tokens says two.
    assert len(_smallest_fitting([51, 51, 51], 100)) == 3 > -(-153 // 100)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (4, 1), (1, 2), (2, 4)])
def test_the_padding_is_that_of_the_packing(tensor: int, context: int) -> None:
    assert padding_multiple(tensor, context) == alignment(tensor, context)


def test_schedules() -> None:
    optim = tree_of("sft_trainer_engine")["optim"]

    def schedule(total: int | None, **changes):
        found = describe_schedule("optim", optim | changes, total)
        return found.warmup_steps, found.decay_steps

    assert schedule(100) == (0, None)
    assert schedule(100, lr_warmup_steps_ratio=0.1, lr_decay_style="cosine") == (10, 100)
    assert schedule(100, lr_warmup_steps=7, lr_warmup_steps_ratio=0.1) == (7, None)
    assert schedule(None, lr_warmup_steps_ratio=0.1, lr_decay_style="linear") == (None, None)
    assert schedule(100, lr_decay_steps=40, lr_decay_style="linear") == (0, 40)


def test_a_warm_up_longer_than_the_run_is_an_error(prompts: Path) -> None:
    tree = ppo(prompts, f"{A}.actor.optim.lr_decay_style=cosine", f"{A}.actor.optim.lr_warmup_steps=90")
    (problem,) = warmup_problems(describe_ppo_batches(tree, dp=1, uses_reference=False), tree)
    assert problem.startswith(f"{A}.actor.optim.lr_warmup_steps=90") and "89" in problem


TOTAL = 90  # 100 // 32 = 3 steps an epoch x 30 epochs


def test_the_actor_s_schedule_is_shorter_by_the_critic_s_warm_up(prompts: Path) -> None:
    changes = [f"{A}.actor.optim.lr_decay_style=cosine", "trainer.critic_warmup=30", "algorithm.adv_estimator=gae"]
    changes += ["critic.optim.lr_decay_style=cosine", f"{A}.actor.optim.lr_warmup_steps_ratio=0.5"]
    tree = ppo(prompts, *changes, f"critic.optim.lr_warmup_steps={TOTAL - 1}")
    batches = describe_ppo_batches(tree, dp=1, uses_reference=False)
    actor, critic = batches.schedules
    assert (actor.decay_steps, actor.warmup_steps) == (TOTAL - 30, (TOTAL - 30) // 2)
    assert (critic.decay_steps, critic.warmup_steps) == (TOTAL, TOTAL - 1)
    assert warmup_problems(batches, tree) == []
    tree[A]["actor"]["optim"]["lr_warmup_steps"] = TOTAL - 30
    (problem,) = warmup_problems(describe_ppo_batches(tree, dp=1, uses_reference=False), tree)
    assert problem.startswith(f"{A}.actor.optim.lr_warmup_steps={TOTAL - 30} must be below")


def test_the_key_is_in_every_config() -> None:
    for name in ("ppo_trainer", "sft_trainer_engine", "generation", "evaluation"):
        assert flatten(tree_of(name))["trainer.dry_run"] is False
