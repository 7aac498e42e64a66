# SPDX-License-Identifier: Apache-2.0
"""Commands with values that make no sense: each is one sentence, and none ends in a traceback.

Function level: configuration and files are checked in this process.
"""

import json
import logging
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from tests.trainer.config.files import CHAT, PROMPT, Files, write_files, write_rows
from verl.trainer.ppo import preflight
from verl.trainer.ppo.preflight import validate_ppo_config, validate_sft_config
from verl.trainer.ppo.preflight_offline import validate_evaluation_config, validate_generation_config
from verl.trainer.ppo.preflight_values import with_values, without_followers
from verl.utils.config import compose_config

A = "actor_rollout_ref"
OPTIM = f"{A}.actor.optim"
CHECKS: dict[str, tuple[str, Callable[[DictConfig], None]]] = {
    "ppo": ("ppo_trainer", lambda config: validate_ppo_config(config, env={})),
    "sft": ("sft_trainer_engine", lambda config: validate_sft_config(config, env={})),
    "gen": ("generation", validate_generation_config),
    "eval": ("evaluation", validate_evaluation_config),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a right command, and wrong ones beside them."""
    root = tmp_path_factory.mktemp("values")
    written = write_files(root)
    (root / "number.json").write_text("5")
    (root / "object.json").write_text("{}")
    (root / "lists.jsonl").write_text("[1]\n[2]\n")
    (root / "half.jsonl").write_text(json.dumps(PROMPT) + '\n{"prompt"\n')
    (root / "bytes.jsonl").write_bytes(bytes(range(256)))
    (root / "empty.parquet").touch()
    (root / "folder.parquet").mkdir()
    whole = write_rows(root / "whole.parquet", [PROMPT] * 16).read_bytes()
    (root / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    write_rows(root / "null.jsonl", [PROMPT | {"data_source": None}] * 16)
    write_rows(root / "sources.jsonl", [PROMPT | {"data_source": ["a"]}] * 16)
    write_rows(root / "responses.jsonl", [PROMPT | {"responses": ["240"]}] * 4)
    write_rows(root / "chats.parquet", [CHAT] * 16)
    return written


@pytest.fixture(autouse=True)
def one_composition_of_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged of keys without effect composes the defaults anew for each configuration."""
    monkeypatch.setattr(preflight, "_critic_no_effect", lambda tree, defaults: {})
    monkeypatch.setattr(logging.getLogger("verl.trainer.ppo.preflight"), "level", logging.ERROR)


def problems(files: Files, kind: str, *changes: str) -> list[str]:
    right = {
        "ppo": files.ppo_arguments,
        "sft": files.sft_arguments,
        "gen": [
            f"data.path={files.prompts}",
            f"model.path={files.model}",
            f"data.output_path={files.root}/out.parquet",
        ],
        "eval": [f"data.path={files.root}/responses.jsonl"],
    }[kind]
    name, check = CHECKS[kind]
    config = compose_config(name, [*right, *(change.replace("FILES", str(files.root)) for change in changes)])
    try:
        check(config)
    except ValueError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("kind", CHECKS)
def test_the_commands_that_are_changed_here_are_right(files: Files, kind: str) -> None:
    assert problems(files, kind) == []


def test_sgd_goes_without_the_distributed_optimizer(files: Files) -> None:
    changes = [f"{OPTIM}.optimizer=sgd", f"{A}.actor.megatron.use_distributed_optimizer=False"]
    assert problems(files, "ppo", *changes) == []
    assert problems(files, "sft", "optim.optimizer=sgd", "engine.use_distributed_optimizer=False") == []


WRONG = [
    # numbers that are none, or of no sense
    ("ppo", [f"{A}.rollout.temperature=nan"], f"{A}.rollout.temperature=nan is not a finite number"),
    ("ppo", [f"{A}.rollout.temperature=inf"], f"{A}.rollout.temperature=inf is not a finite number"),
    ("ppo", [f"{A}.actor.clip_ratio=nan"], f"{A}.actor.clip_ratio=nan is not a finite number"),
    ("ppo", [f"{A}.actor.entropy_coeff=nan"], f"{A}.actor.entropy_coeff=nan is not a finite number"),
    ("ppo", ["algorithm.kl_ctrl.kl_coef=nan"], "algorithm.kl_ctrl.kl_coef=nan is not a finite number"),
    ("ppo", [f"{OPTIM}.clip_grad=nan"], f"{OPTIM}.clip_grad=nan is not a finite number"),
    ("ppo", [f"{OPTIM}.clip_grad=-1"], f"{OPTIM}.clip_grad=-1 must be 0 or more; 0 clips nothing"),
    ("ppo", [f"{OPTIM}.weight_decay=-0.1"], f"{OPTIM}.weight_decay=-0.1 must be 0 or more"),
    ("ppo", [f"{OPTIM}.lr_warmup_steps=-5"], f"{OPTIM}.lr_warmup_steps=-5 must be 0 or more, or -1"),
    ("ppo", [f"{OPTIM}.optimizer=sgd"], f"{OPTIM}.optimizer='sgd' does not go with {A}.actor.megatron.use_distributed"),
    ("sft", ["optim.optimizer=sgd"], "set engine.use_distributed_optimizer=False"),
    (
        "sft",
        ["+optim.override_optimizer_config.optimizer=sgd"],
        "optim.override_optimizer_config.optimizer='sgd' does not go with engine.use_distributed_optimizer=True",
    ),
    ("ppo", [f"{OPTIM}.lr_warmup_init=5"], f"{OPTIM}.lr_warmup_init=5 is above {OPTIM}.lr=1e-06"),
    ("ppo", [f"{OPTIM}.lr_decay_steps=0"], f"{OPTIM}.lr_decay_steps=0 must be null or a whole number"),
    ("ppo", [f"{OPTIM}.betas=[a,b]"], f"{OPTIM}.betas=['a', 'b'] must be two numbers"),
    ("ppo", [f"{A}.actor.loss_scale_factor=0"], f"{A}.actor.loss_scale_factor=0 must be above 0"),
    ("ppo", [f"{A}.actor.kl_loss_coef=-1"], f"{A}.actor.kl_loss_coef=-1 must be 0 or more"),
    ("ppo", [f"{A}.actor.megatron.dtype=float64"], f"{A}.actor.megatron.use_distributed_optimizer=True keeps"),
    ("ppo", ["trainer.num_cpus_per_worker=0"], "trainer.num_cpus_per_worker=0 must be above 0"),
    ("ppo", ["data.dataloader_num_workers=-3"], "data.dataloader_num_workers=-3 must be 0 or more"),
    ("ppo", ["data.seed=abc"], "data.seed='abc' must be null or a whole number"),
    ("ppo", ["data.seed=1.5"], "data.seed=1.5 must be null or a whole number"),
    ("ppo", ["data.val_max_samples=0"], "data.val_max_samples=0 keeps no row; use -1"),
    ("ppo", ["data.train_max_samples=0"], "data.train_max_samples=0 keeps no row; use -1"),
    ("ppo", ["data.train_batch_size=1e9"], "data.train_batch_size=1000000000.0 must be a whole number"),
    ("ppo", ["data.train_batch_size=[8]"], "data.train_batch_size=[8] must be a whole number"),
    ("ppo", ["data.max_response_length=-1"], "data.max_response_length=-1 must be a whole number of at least 1"),
    ("ppo", [f"{A}.rollout.n=0"], f"{A}.rollout.n=0 must be at least 1"),
    ("ppo", [f"{A}.rollout.n=1.5"], f"{A}.rollout.n=1.5 must be a whole number"),
    ("ppo", [f"{A}.rollout.top_p=nan"], f"{A}.rollout.top_p=nan must lie in"),
    ("sft", ["optim.clip_grad=nan"], "optim.clip_grad=nan is not a finite number"),
    ("sft", ["data.num_workers=-1"], "data.num_workers=-1 must be 0 or more"),
    ("sft", ["model.mtp.mtp_loss_scaling_factor=-1"], "model.mtp.mtp_loss_scaling_factor=-1 must be 0 or more"),
    ("sft", ["engine.virtual_pipeline_model_parallel_size=1"], "engine.virtual_pipeline_model_parallel_size=1"),
    ("eval", ["pass_score=nan"], "pass_score=nan is not a finite number"),
    ("ppo", ["algorithm.kl_ctrl.kl_coef=-1"], "algorithm.kl_ctrl.kl_coef=-1 must be 0 or more"),
    ("ppo", ["+reward.reward_kwargs.timeout=nan"], "reward.reward_kwargs.timeout=nan is not a finite number"),
    (
        "ppo",
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1,x]"],
        "algorithm.gdpo_reward_weights=[1, 'x'] must hold a number for each",
    ),
    ("sft", ["checkpoint.save_contents=[]", "trainer.save_freq=2"], "checkpoint.save_contents=[] makes checkpoints of"),
    # names left empty, lists and numbers in the place of a path
    ("ppo", ["data.prompt_key=null"], "data.prompt_key=None is empty; it must be text"),
    ("ppo", ["data.prompt_key=''"], "data.prompt_key='' is empty; it must be text"),
    ("ppo", ["trainer.default_local_dir=null"], "trainer.default_local_dir=None is empty"),
    ("ppo", ["data.train_files=''"], "data.train_files is empty"),
    ("ppo", ["data.train_files=[[a]]"], "data.train_files: ['a'] is not the path of a file"),
    ("ppo", ["data.val_files=[null]"], "data.val_files: None is not the path of a file"),
    ("ppo", [f"{A}.model.path=5"], f"{A}.model.path=5 is not a folder"),
    ("ppo", [f"{A}.model.path=FILES/train.parquet"], "train.parquet is not a folder"),
    ("sft", ["data.messages_key=null"], "data.messages_key=None is empty"),
    ("sft", ["model.tokenizer_path=FILES/train.parquet"], "model.tokenizer_path="),
    ("gen", ["data.output_path=null"], "data.output_path=None is empty"),
    ("gen", ["data.output_path=FILES/folder.parquet"], "is a folder; name a file that ends in .parquet"),
    ("gen", ["data.max_samples=0"], "data.max_samples=0 keeps no row"),
    ("gen", ["data.path=5"], "data.path: 5 does not exist"),
    ("eval", ["data.data_source_key=null"], "data.data_source_key=None is empty"),
    ("eval", ["data.output_path=FILES/train.parquet/x.json"], "train.parquet is no folder"),
    # files that are something else
    ("ppo", ["data.val_files=FILES/number.json"], "number.json could not be read: expected one object for each row"),
    ("ppo", ["data.val_files=FILES/object.json"], "object.json could not be read: expected one object for each row"),
    ("ppo", ["data.val_files=FILES/lists.jsonl"], "lists.jsonl could not be read: expected one object for each row"),
    ("ppo", ["data.val_files=FILES/half.jsonl"], "half.jsonl could not be read: "),
    ("ppo", ["data.val_files=FILES/bytes.jsonl"], "bytes.jsonl could not be read: "),
    ("ppo", ["data.val_files=FILES/empty.parquet"], "empty.parquet could not be read: "),
    ("ppo", ["data.val_files=FILES/cut.parquet"], "cut.parquet could not be read: "),
    ("ppo", ["data.val_files=FILES/folder.parquet"], "folder.parquet is a folder; name the files in it"),
    ("ppo", ["data.val_files=FILES/chats.parquet"], "has no column 'prompt'"),
    ("ppo", ["data.val_files=FILES/null.jsonl"], "there is no reward rule for data_source=None"),
    ("ppo", ["data.val_files=FILES/sources.jsonl"], "must hold text, the name of each row's data source"),
    ("sft", ["data.train_files=FILES/train.parquet"], "has no column 'messages'"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), WRONG, ids=lambda value: str(value)[-50:])
def test_a_value_of_no_sense_is_one_sentence(files: Files, kind: str, changes: list[str], words: str) -> None:
    found = problems(files, kind, *changes)
    assert len(found) == 1, found
    assert words in found[0], found[0]


def test_what_follows_a_wrong_key_is_not_said_again(files: Files) -> None:
    tree = {"data": {"max_response_length": -1}, A: {"rollout": {"response_length": -1, "n": 2}}}
    errors = ["data.max_response_length=-1 is wrong", f"{A}.rollout.response_length=-1 is wrong", "other=1 is wrong"]
    assert without_followers(errors, tree, "ppo_trainer") == [errors[0], errors[2]]
    tree[A]["rollout"]["response_length"] = -2  # set to something else: a fault of its own
    assert without_followers(errors, tree, "ppo_trainer") == errors


def test_a_key_that_has_its_sentence_gets_no_other() -> None:
    tree = {
        "pass_score": float("nan"),
        "data": dict.fromkeys(("response_key", "data_source_key", "reward_model_key"), "x"),
    }
    assert with_values(["pass_score=nan is odd"], tree, "evaluation") == ["pass_score=nan is odd"]
    assert with_values([], tree, "evaluation") == ["pass_score=nan is not a finite number"]


def test_the_critic_s_values_count_only_where_there_is_one(files: Files) -> None:
    assert problems(files, "ppo", "critic.optim.clip_grad=nan") == []
    (found,) = problems(files, "ppo", "algorithm.adv_estimator=gae", "critic.optim.clip_grad=nan")
    assert found == "critic.optim.clip_grad=nan is not a finite number"
