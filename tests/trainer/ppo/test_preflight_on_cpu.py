# SPDX-License-Identifier: Apache-2.0
"""Wrong configurations, each with the one clear sentence it must end in."""

import copy
import json
import logging
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tests.trainer.config.files import CHAT, PROMPT, Files, write_files, write_model, write_rows
from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight import validate_ppo_config, validate_sft_config
from verl.utils.config import compose_config, explain_hydra_error
from verl.workers.config import names

A = "actor_rollout_ref"
OTC = f"{A}.actor.megatron.override_transformer_config"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("preflight"))


@pytest.fixture(scope="module")
def right_ppo(files: Files) -> DictConfig:
    return compose_config("ppo_trainer", files.ppo_arguments)


@pytest.fixture(scope="module")
def right_sft(files: Files) -> DictConfig:
    return compose_config("sft_trainer_engine", files.sft_arguments)


def _problems(right: DictConfig, changes: dict, check=validate_ppo_config, env: dict | None = None) -> list[str]:
    config = copy.deepcopy(right)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        check(config, env=env or {})
    except ValueError as error:
        return str(error).splitlines()
    return []


def _only(problems: list[str], *parts: str) -> None:
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0], problems[0]


def test_a_right_configuration_passes(right_ppo: DictConfig, right_sft: DictConfig) -> None:
    assert _problems(right_ppo, {}) == []
    assert _problems(right_sft, {}, validate_sft_config) == []


FILTER = {"enable": True, "metric": "acc", "max_num_gen_batches": 0}
OVERLONG = {"enable": True, "len": 0}

WRONG_PPO = [
    # Batches: the key, its value, and the nearest right number.
    (
        {f"{A}.actor.ppo_mini_batch_size": 16},
        ["data.train_batch_size=8", "ppo_mini_batch_size=16", "use ppo_mini_batch_size=8"],
    ),
    ({f"{A}.actor.ppo_mini_batch_size": 3}, ["is not divisible", "ppo_mini_batch_size=2 or 4"]),
    ({"trainer.n_gpus_per_node": 16}, ["= 4 responses cannot be shared by 8", "use ppo_mini_batch_size=8"]),
    (
        {f"{A}.actor.use_dynamic_bsz": False, f"{A}.rollout.log_prob_use_dynamic_bsz": True},
        ["ppo_micro_batch_size_per_gpu is not set"],
    ),
    (
        {
            f"{A}.actor.use_dynamic_bsz": False,
            f"{A}.rollout.log_prob_use_dynamic_bsz": True,
            f"{A}.actor.ppo_micro_batch_size_per_gpu": 3,
        },
        ["ppo_micro_batch_size_per_gpu=3 does not divide 4", "use 2 or 4"],
    ),
    ({f"{A}.rollout.log_prob_use_dynamic_bsz": False}, ["rollout.log_prob_micro_batch_size_per_gpu is not set"]),
    (
        {f"{A}.actor.use_kl_loss": True, f"{A}.ref.log_prob_use_dynamic_bsz": False},
        ["ref.log_prob_micro_batch_size_per_gpu is not set"],
    ),
    (
        {f"{A}.actor.ppo_max_token_len_per_gpu": 511, f"{A}.rollout.log_prob_max_token_len_per_gpu": 512},
        ["=511 x context_parallel_size=2", "= 1024", "use at least 512"],
    ),
    (
        {"data.train_batch_size": 32, f"{A}.actor.ppo_mini_batch_size": 32},
        ["holds 16 rows, fewer than data.train_batch_size=32", "=16"],
    ),
    ({"data.train_max_samples": 6}, ["holds 6 rows"]),
    ({"data.train_batch_size": 0}, ["data.train_batch_size=0 must be a whole number of at least 1"]),
    ({"data.train_batch_size": "many"}, ["data.train_batch_size='many' must be a whole number"]),
    ({f"{A}.rollout.response_length": 64}, ["rollout.response_length=64 contradicts data.max_response_length=512"]),
    # Layout.
    (
        {"trainer.n_gpus_per_node": 3},
        [
            "trainer.nnodes x trainer.n_gpus_per_node=3",
            "context_parallel_size=2",
            "use context_parallel_size=1 or 3, or 2 or 4 ranks",
        ],
    ),
    (
        {f"{A}.actor.megatron.expert_model_parallel_size": 4},
        ["expert_model_parallel_size=4", "expert_model_parallel_size=2"],
    ),
    ({f"{A}.actor.megatron.virtual_pipeline_model_parallel_size": 2}, ["virtual_pipeline_model_parallel_size=2 needs"]),
    ({f"{A}.actor.megatron.context_parallel_size": 0}, ["context_parallel_size=0 must be at least 1"]),
    (
        {f"{A}.actor.use_kl_loss": True, f"{A}.ref.megatron.context_parallel_size": 1},
        ["ref.megatron.context_parallel_size=1 differs from"],
    ),
    ({f"{OTC}.context_parallel_size": 4}, ["override_transformer_config.context_parallel_size=4 contradicts"]),
    (
        {f"{A}.model.use_remove_padding": False},
        ["use_remove_padding=False is not supported with", "context_parallel_size=2"],
    ),
    # Names.
    ({"algorithm.adv_estimator": "gropo"}, ["adv_estimator='gropo' is not known", "Did you mean 'grpo'?"]),
    (
        {f"{A}.actor.loss_agg_mode": "token_mean"},
        [f"{A}.actor.loss_agg_mode='token_mean'", "Did you mean 'token-mean'?"],
    ),
    ({f"{A}.actor.kl_loss_type": "low_var"}, [f"{A}.actor.kl_loss_type='low_var'", "'low_var_kl'"]),
    ({f"{A}.actor.policy_loss.loss_mode": "vanila"}, ["policy_loss.loss_mode='vanila'", "Did you mean 'vanilla'?"]),
    ({f"{A}.rollout.name": "vllm"}, ["rollout.name='vllm' is not supported here", "rollout.name=hf"]),
    ({f"{A}.actor.megatron.dtype": "fp32"}, [f"{A}.actor.megatron.dtype='fp32'", "float32"]),
    ({f"{A}.actor.optim.lr_decay_style": "cos"}, ["actor.optim.lr_decay_style='cos'", "cosine"]),
    ({"data.truncation": "cut"}, ["data.truncation='cut'", "'error', 'left', 'right', 'middle'"]),
    ({"trainer.logger": ["consol"]}, ["trainer.logger='consol'", "Did you mean 'console'?"]),
    ({"trainer.device": "gpu"}, ["trainer.device='gpu'", "'cuda'"]),
    (
        {"reward.reward_manager.name": "dapoo"},
        [
            "reward.reward_manager.name='dapoo' is not known",
            "'naive', 'dapo', 'prime', 'batch'",
            "Did you mean 'dapo'?",
        ],
    ),
    (
        {"reward.reward_manager.name": "dapo", "reward.reward_kwargs.overlong_buffer_cfg": OVERLONG},
        ["reward.reward_kwargs.overlong_buffer_cfg.len=0 must be at least 1"],
    ),
    (
        {
            "reward.reward_manager.name": "dapo",
            "reward.reward_kwargs.overlong_buffer_cfg": {"enable": True, "len": 513},
        },
        ["overlong_buffer_cfg.len=513 is more than max_resp_len=512; use at most 512"],
    ),
    (
        {"reward.reward_kwargs.overlong_buffer_cfg": {"enable": True}},
        ["reward.reward_kwargs.overlong_buffer_cfg", "'naive' has no use for it"],
    ),
    # Dynamic sampling.
    ({"algorithm.filter_groups.enable": True, f"{A}.rollout.n": 2}, ["algorithm.filter_groups.metric must be set"]),
    ({"algorithm.filter_groups": FILTER}, ["algorithm.filter_groups.enable=True", "rollout.n=1 gives one"]),
    (
        {"algorithm.filter_groups": FILTER | {"metric": "seq_final_reward"}, "algorithm.use_kl_in_reward": True}
        | {f"{A}.rollout.n": 2},
        ["metric='seq_final_reward' is not supported", "use seq_reward"],
    ),
    ({"data.gen_batch_size": 16}, ["data.gen_batch_size=16 differs", "algorithm.filter_groups.enable=True"]),
    (
        {"algorithm.filter_groups": FILTER, f"{A}.rollout.n": 2, "data.gen_batch_size": 24},
        ["holds 16 rows, fewer than data.gen_batch_size=24"],
    ),
    ({"reward.reward_kwargs.timeout": -1}, ["reward.reward_kwargs.timeout=-1 must be above 0 seconds"]),
    ({"trainer.resume_mode": "resume_path"}, ["trainer.resume_from_path is not set"]),
    ({f"{A}.rollout.temperature": 0}, [f"{A}.rollout.temperature=0", "do_sample=False"]),
    # Guards and router losses.
    (
        {f"{OTC}.calculate_per_token_loss": True, f"{A}.actor.loss_agg_mode": "seq-mean-token-mean"},
        ["seq-mean-token-mean", "per_token_loss_guards=False"],
    ),
    (
        {
            f"{OTC}.calculate_per_token_loss": True,
            f"{A}.model.use_remove_padding": False,
            f"{A}.actor.megatron.context_parallel_size": 1,
        },
        ["use_remove_padding=False is refused", "per_token_loss_guards=False"],
    ),
    (
        {f"{OTC}.moe_aux_loss_coeff": 0.01},
        ["moe_aux_loss_coeff=0.01 has no effect", "moe_router_load_balancing_type=aux_loss"],
    ),
    # Keys that are there and not supported.
    (
        {f"{A}.actor.megatron.use_dist_checkpointing": True},
        [f"{A}.actor.megatron.use_dist_checkpointing=True needs dist_checkpointing_path"],
    ),
    (
        {
            f"{A}.actor.megatron.use_dist_checkpointing": True,
            f"{A}.actor.megatron.dist_checkpointing_path": "/no/such/folder",
        },
        [f"{A}.actor.megatron.dist_checkpointing_path=/no/such/folder: no such folder"],
    ),
    ({f"{A}.actor.megatron.router_replay.mode": "record"}, ["router_replay.mode='record' is not supported"]),
    ({f"{A}.model.mtp.enable_rollout": True}, ["model.mtp.enable_rollout=True is not supported"]),
    ({f"{A}.model.mtp.enable_train": True}, ["enable_train=True trains layers that are not built", "enable=True"]),
    ({f"{A}.model.lora.rank": 8}, ["model.lora.rank=8 is not supported"]),
    ({f"{A}.rollout.enable_rollout_routing_replay": True}, ["enable_rollout_routing_replay=True is not supported"]),
    ({"reward_model.reward_manager": "naive"}, ["reward_model.reward_manager='naive'", "reward.reward_manager.name"]),
    ({"reward_model.reward_kwargs.max_resp_len": 4}, ["reward_model.reward_kwargs", "reward.reward_kwargs"]),
    ({"custom_reward_function.path": "x.py"}, ["the key is reward.custom_reward_function.path"]),
    ({"reward.reward_kwargs.max_resp_len": 4}, ["reward.reward_kwargs.max_resp_len", "no use for it"]),
    # Keys that are not there.
    ({f"{A}.actor.foo": 1}, [f"{A}.actor.foo is not a key of ppo_trainer"]),
    ({f"{A}.actor.model_engine": "megatron"}, [f"{A}.actor.model_engine is not a key", "use model_engine, at the top"]),
    ({"trainer.max_ckpt_to_keep": 1}, ["trainer.max_actor_ckpt_to_keep and trainer.max_critic_ckpt_to_keep"]),
    ({"trainer.experiment_name.a": 1}, ["trainer.experiment_name.a is not possible"]),
    ({"trainer": 7}, ["trainer=7 must be a group of keys"]),
    ({f"{A}.rollout.name": "???"}, [f"{A}.rollout.name must be set", f"{A}.rollout.name=hf"]),
    (
        {"trainer.project_name": "${nowhere.at_all}"},
        ["trainer.project_name: Interpolation key 'nowhere.at_all' not found"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "parts"), WRONG_PPO, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_wrong_ppo_configuration_is_refused_in_one_sentence(
    right_ppo: DictConfig, changes: dict, parts: list
) -> None:
    _only(_problems(right_ppo, changes), *parts)


WRONG_SFT = [
    ({"data.train_batch_size": 6}, ["data.train_batch_size=6 cannot be shared by 4", "use 4 or 8"]),
    (
        {"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 3},
        ["micro_batch_size_per_gpu=3 does not divide 2", "use 2"],
    ),
    ({"data.max_length": 9000}, ["data.max_token_len_per_gpu=8192", "data.max_length=9000", "use at least 9000"]),
    (
        {"engine.tensor_model_parallel_size": 3},
        ["WORLD_SIZE=4", "tensor_model_parallel_size=3", "use tensor_model_parallel_size=2 or 4, or 3 or 6 ranks"],
    ),
    ({"data.pad_mode": "right"}, ["data.pad_mode='right' is not supported"]),
    ({"data.messages_key": "turns"}, ["has no column 'turns'", "its columns are messages", "a row must look like"]),
    ({"data.train_batch_size": 32}, ["holds 16 rows, fewer than data.train_batch_size=32"]),
    ({"optim.betas": [0.9]}, ["optim.betas=[0.9] must be two numbers"]),
    ({"optim.lr": "fast"}, ["optim.lr='fast' must be a number"]),
    ({"engine.use_megatron_fsdp": True}, ["engine.use_megatron_fsdp=True is not supported"]),
    ({"trainer.max_actor_ckpt_to_keep": 1}, ["use trainer.max_ckpt_to_keep"]),
]


@pytest.mark.parametrize(
    ("changes", "parts"), WRONG_SFT, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_wrong_sft_configuration_is_refused_in_one_sentence(
    right_sft: DictConfig, changes: dict, parts: list
) -> None:
    _only(_problems(right_sft, changes, validate_sft_config, {"WORLD_SIZE": "4"}), *parts)


def test_wrong_data_files_are_refused_by_name(right_ppo: DictConfig, tmp_path: Path) -> None:
    def problems(name: str, *rows: dict) -> list[str]:
        return _problems(right_ppo, {"data.val_files": str(write_rows(tmp_path / name, list(rows)))})

    _only(
        _problems(right_ppo, {"data.val_files": f"{tmp_path}/none.parquet"}),
        "data.val_files",
        "none.parquet does not exist",
    )
    write_rows(tmp_path / "test.jsonl", [PROMPT])
    _only(_problems(right_ppo, {"data.val_files": f"{tmp_path}/tets.jsonl"}), "Did you mean test.jsonl?")
    raw = {"question": "17+25=", "answer": "42"}
    for name in ("raw.parquet", "raw.jsonl"):
        _only(
            problems(name, raw),
            name,
            "has no column 'prompt', 'data_source', 'reward_model'",
            "question, answer",
            "ground_truth",
        )
    _only(
        problems("style.parquet", PROMPT | {"reward_model": {"style": "rule"}}), "'reward_model' must hold ground_truth"
    )
    _only(problems("text.jsonl", PROMPT | {"prompt": "17+25="}), "'prompt' must hold content, role")
    _only(
        problems("source.parquet", PROMPT, PROMPT | {"data_source": "arithmetics"}),
        "data_source='arithmetics'",
        "Did you mean arithmetic?",
        "reward.custom_reward_function.path",
    )
    _only(problems("empty.jsonl"), "holds no rows")
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    _only(_problems(right_ppo, {"data.val_files": f"{tmp_path}/broken.parquet"}), "broken.parquet could not be read")
    (tmp_path / "rows.csv").write_text("prompt\n")
    _only(_problems(right_ppo, {"data.val_files": f"{tmp_path}/rows.csv"}), "rows.csv is of an unknown kind")
    assert problems("one.jsonl", PROMPT) == []


def test_chat_files_may_be_parquet(right_sft: DictConfig, tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.parquet", [CHAT] * 8)
    assert _problems(right_sft, {"data.train_files": [str(good)]}, validate_sft_config) == []
    bad = write_rows(tmp_path / "bad.parquet", [{"messages": "hello"}] * 8)
    _only(
        _problems(right_sft, {"data.train_files": str(bad)}, validate_sft_config), "'messages' must hold content, role"
    )


def test_wrong_model_folders_are_refused_by_name(right_ppo: DictConfig, tmp_path: Path) -> None:
    def problems(folder: Path) -> list[str]:
        return _problems(right_ppo, {f"{A}.model.path": str(folder)})

    _only(problems(tmp_path / "nowhere"), f"{A}.model.path={tmp_path}/nowhere is not a folder")
    for file, words in (
        ("config.json", "it has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ):
        folder = write_model(tmp_path / f"without_{file}")
        (folder / file).unlink()
        _only(problems(folder), words)
    sharded = write_model(tmp_path / "sharded")
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(shards))
    _only(problems(sharded), "lacks 1 of the files", "model-2.safetensors")
    other = write_model(tmp_path / "other", architectures=["Qwen3MoForCausalLM"])
    _only(problems(other), "Qwen3MoForCausalLM", "Did you mean Qwen3MoeForCausalLM?", "LlamaForCausalLM")


def test_custom_reward_function_is_looked_up_without_running_it(right_ppo: DictConfig, tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text("raise SystemExit\ndef compute_score(**kwargs):\n    return 1.0\n")
    rows = write_rows(tmp_path / "own.jsonl", [PROMPT | {"data_source": "mine"}] * 8)
    key = "reward.custom_reward_function"
    own = {"data.train_files": str(rows), f"{key}.path": str(file)}
    assert _problems(right_ppo, own) == []
    _only(_problems(right_ppo, own | {f"{key}.name": "compute_scores"}), "Did you mean compute_score?")
    _only(_problems(right_ppo, own | {f"{key}.path": f"{tmp_path}/scores.py"}), "scores.py does not exist", "score.py")


def test_all_problems_are_listed_at_once(right_ppo: DictConfig) -> None:
    changes = {
        "trainer.n_gpus_per_node": 3,
        "algorithm.adv_estimator": "gea",
        "data.val_files": "none.jsonl",
        f"{A}.model.lora.rank": 1,
    }
    assert len(_problems(right_ppo, changes)) == 4


def test_the_guards_can_be_lifted_and_do_not_fire_without_the_flag(right_ppo: DictConfig) -> None:
    mode = {f"{A}.actor.loss_agg_mode": "seq-mean-token-mean"}
    lifted = {f"{A}.actor.megatron.per_token_loss_guards": False, f"{OTC}.calculate_per_token_loss": True}
    assert _problems(right_ppo, mode) == []
    assert _problems(right_ppo, mode | lifted) == []


def test_torchrun_is_refused_for_ppo_only(right_ppo: DictConfig, right_sft: DictConfig) -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    _only(_problems(right_ppo, {}, env=env), "cannot run under torchrun", "python3 -m verl.trainer.main_ppo")
    _only(_problems(right_ppo, {}, env={"TORCHELASTIC_RUN_ID": "x"}), "cannot run under torchrun")
    assert _problems(right_ppo, {}, env={"RANK": "0", "WORLD_SIZE": "1"}) == []
    assert _problems(right_sft, {}, validate_sft_config, env) == []


def test_keys_without_effect_are_named_in_one_log_line(right_ppo: DictConfig, caplog: pytest.LogCaptureFixture) -> None:
    changes = {
        f"{A}.rollout.gpu_memory_utilization": 0.8,
        f"{A}.actor.megatron.vanilla_mbridge": True,
        "critic.optim.lr": 1,
    }
    with caplog.at_level(logging.WARNING, logger="verl.trainer.ppo.preflight"):
        assert _problems(right_ppo, {f"{A}.rollout.n": 2}) == []
        assert not caplog.records
        assert _problems(right_ppo, changes | {f"{A}.rollout.n": 2}) == []
    (record,) = caplog.records
    for key in changes:
        assert key in record.getMessage()


def test_a_key_taken_out_is_named(right_ppo: DictConfig) -> None:
    config = copy.deepcopy(right_ppo)
    OmegaConf.set_struct(config, False)
    del config.trainer["logger"]
    with pytest.raises(ValueError, match="trainer.logger was taken out"):
        validate_ppo_config(config, env={})


HYDRA_ERRORS = [
    (f"{A}.actor.ppo_mini_batchsize=3", f"Did you mean {A}.actor.ppo_mini_batch_size?"),
    (f"{A}.actor.megatron.context_parallelsize=2", f"Did you mean {A}.actor.megatron.context_parallel_size?"),
    (f"{A}.actor.lr=1", f"Did you mean {A}.actor.optim.lr?"),
    (f"{A}.actor.optim.grad_clip=1", f"{A}.actor.optim.grad_clip is not a key"),
    (f"{A}.actor.ppo_micro_batch_size=1", f"use {A}.actor.ppo_micro_batch_size_per_gpu"),
    (f"{OTC}.moe_router_dtype=fp32", f"write +{OTC}.moe_router_dtype=..."),
    ("+trainer.total_epochs=1", "+trainer.total_epochs adds a key that is already there"),
    ("model_engine=dp", "model_engine=dp is not available; choose one of: megatron"),
    ("trainer.total_epochs", "missing EQUAL"),
    ("trainer.logger=[console", "no viable alternative"),
    ("data.train_files=/x/ünï.parquet", "needs quotes: \"data.train_files='/x/ünï.parquet'\""),
    ("trainer.project_name=a=b", "the argument trainer.project_name=a=b cannot be read: mismatched input"),
    ("trainer={a: 1}", "trainer is a group of keys and takes no value; set one of them, such as trainer."),
    ("data.apply_chat_template_kwargs=[1]", "data.apply_chat_template_kwargs is a group of keys and cannot be [1]"),
]


@pytest.mark.parametrize(("argument", "sentence"), HYDRA_ERRORS, ids=lambda value: value)
def test_what_hydra_refuses_is_said_in_one_sentence(argument: str, sentence: str) -> None:
    with pytest.raises(HydraException) as caught:
        compose_config("ppo_trainer", [argument])
    text = explain_hydra_error(caught.value, "ppo_trainer", tables.MOVED)
    assert sentence in text
    assert "\n" not in text


def test_the_known_names_are_those_of_the_code() -> None:
    from verl.algos.aggregation import LOSS_AGG_MODES

    assert set(names.LOSS_AGG_MODES) == set(LOSS_AGG_MODES)
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    for name in names.ADV_ESTIMATORS:
        assert callable(get_adv_estimator_fn(name))
    for name in names.POLICY_LOSSES:
        assert callable(get_policy_loss_fn(name))


def test_a_data_source_whose_package_is_missing_is_named(right_ppo: DictConfig, files: Files, monkeypatch) -> None:
    from verl.utils.reward_score import math_verify

    path = write_rows(files.root / "math.parquet", [PROMPT | {"data_source": "lighteval/MATH"}] * 16)
    assert _problems(right_ppo, {"data.train_files": str(path)}) == []
    monkeypatch.setattr(math_verify, "is_installed", lambda: False)
    _only(_problems(right_ppo, {"data.train_files": str(path)}), "lighteval/MATH", "pip install math-verify")
