# SPDX-License-Identifier: Apache-2.0
"""The critic's keys: what a right command may say, and what is refused in one sentence."""

import logging
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.trainer.config.files import write_files, write_model
from verl.trainer.ppo.preflight import validate_ppo_config
from verl.utils.config import compose_config, omega_conf_to_dataclass

A = "actor_rollout_ref"


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    files = write_files(Path(tmp_path_factory.mktemp("critic")))
    return compose_config("ppo_trainer", [*files.ppo_arguments, "algorithm.adv_estimator=gae"])


def problems(config: DictConfig, changes: dict) -> list[str]:
    config = OmegaConf.create(OmegaConf.to_yaml(config))
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_ppo_config(config, env={})
    except ValueError as error:
        return str(error).splitlines()
    return []


RIGHT = [
    {},
    {"critic.enable": True, "algorithm.adv_estimator": "grpo", f"{A}.rollout.n": 2, "trainer.critic_warmup": 3},
    {"critic.ppo_mini_batch_size": 8, "critic.optim.lr": 1e-3, "critic.ppo_epochs": 2, "trainer.critic_warmup": 3},
    {"critic.use_dynamic_bsz": False, "critic.ppo_micro_batch_size_per_gpu": 2},
    {"critic.ppo_max_token_len_per_gpu": 512, "critic.megatron.dtype": "float32"},
    {f"{A}.actor.megatron.tensor_model_parallel_size": 2, f"{A}.actor.megatron.context_parallel_size": 1},
]


@pytest.mark.parametrize("changes", RIGHT, ids=lambda changes: ",".join(changes))
def test_right_settings_pass_and_none_is_called_without_effect(
    right: DictConfig, changes: dict, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="verl.trainer.ppo.preflight"):
        assert problems(right, changes) == []
    assert not caplog.records


WRONG = [
    ({"critic.enable": False}, ["critic.enable=False leaves", "adv_estimator=grpo"]),
    ({"algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 5}, ["critic_warmup=5 needs a critic", "gae"]),
    (
        {"critic.ppo_mini_batch_size": 3},
        ["divisible by critic.ppo_mini_batch_size=3", "use ppo_mini_batch_size=2 or 4"],
    ),
    ({"critic.ppo_mini_batch_size": 0}, ["critic.ppo_mini_batch_size=0 must be at least 1"]),
    ({"critic.use_dynamic_bsz": False}, ["critic.ppo_micro_batch_size_per_gpu is not set", "a divisor of 4"]),
    (
        {"critic.use_dynamic_bsz": False, "critic.ppo_micro_batch_size_per_gpu": 3},
        ["critic.ppo_micro_batch_size_per_gpu=3 does not divide 4", "use 2 or 4"],
    ),
    (
        {"critic.ppo_infer_max_token_len_per_gpu": 511},
        ["critic.ppo_infer_max_token_len_per_gpu=511 x context_parallel_size=2", "use at least 512"],
    ),
    ({"critic.megatron.context_parallel_size": 1}, ["critic.megatron.context_parallel_size=1 differs", "leave it out"]),
    ({"critic.cliprange_value": 0.0}, ["critic.cliprange_value=0.0 must be positive"]),
    ({"critic.loss_agg_mode": "token_mean"}, ["critic.loss_agg_mode='token_mean'", "'token-mean'"]),
    ({"critic.rollout_n": 5}, ["critic.rollout_n=5 contradicts"]),
    ({"critic.model.mtp.enable": True}, ["critic.model.mtp.enable=True is not supported"]),
    ({"critic.model.lora.rank": 4}, ["critic.model.lora.rank=4 is not supported"]),
    ({"critic.model.path": "/nowhere"}, ["critic.model.path=/nowhere is not a folder"]),
    (
        {"critic.megatron.router_replay.mode": "record"},
        ["critic.megatron.router_replay.mode='record' is not supported"],
    ),
    (
        {
            "critic.megatron.override_transformer_config.calculate_per_token_loss": True,
            "critic.loss_agg_mode": "seq-mean-token-mean",
        },
        ["seq-mean-token-mean", "critic.megatron.override_transformer_config.calculate_per_token_loss=True"],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), WRONG, ids=lambda value: ",".join(value)[:60])
def test_a_wrong_critic_is_refused_in_one_sentence(right: DictConfig, changes: dict, parts: list[str]) -> None:
    found = problems(right, changes)
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


def test_another_folder_for_the_critic_is_looked_into(right: DictConfig, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "critic")
    assert problems(right, {"critic.model.path": str(folder)}) == []
    (folder / "config.json").unlink()
    assert "no config.json" in problems(right, {"critic.model.path": str(folder)})[0]


def test_the_keys_of_a_critic_that_is_not_there_are_named_but_not_those_that_follow_the_actor(
    right: DictConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="verl.trainer.ppo.preflight"):
        changes = {"algorithm.adv_estimator": "grpo", "critic.optim.lr": 1.0, "actor_rollout_ref.rollout.n": 2}
        assert problems(right, changes) == []
    (record,) = caplog.records
    assert record.getMessage() == "without effect here: critic.optim.lr=1.0 (there is no critic)"


def test_the_critic_follows_the_actor_and_becomes_its_class(right: DictConfig) -> None:
    critic = omega_conf_to_dataclass(right.critic)
    assert type(critic).__name__ == "McoreCriticConfig"
    assert critic.megatron.context_parallel_size == 2 and critic.megatron.dtype == "bfloat16"
    assert critic.model.path == right.actor_rollout_ref.model.path
    assert critic.max_response_length == 512 and critic.optim.lr == 1e-5
