# SPDX-License-Identifier: Apache-2.0
"""What is allowed and said: settings without effect, models that the engine refuses, names that are not checked."""

import copy
import json
import logging
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.trainer.config.files import PROMPT, Files, write_files, write_rows
from verl.trainer.dry_run.command import read_request
from verl.trainer.ppo.preflight import check_ppo_config, validate_ppo_config
from verl.trainer.ppo.preflight_files import check_model_folder, open_data_files
from verl.trainer.ppo.preflight_tables import MOVED
from verl.trainer.ppo.preflight_warnings import model_code_warnings, ppo_warnings, save_warnings
from verl.utils.config import compose_config, explain_unknown_key, omega_conf_to_dataclass, to_tree
from verl.workers.config import McoreActorConfig, RolloutConfig

A = "actor_rollout_ref"
FIXTURES = Path(__file__).resolve().parents[3] / "tests/fixtures/model_configs"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("warnings"))


@pytest.fixture(scope="module")
def right(files: Files) -> DictConfig:
    return compose_config("ppo_trainer", files.ppo_arguments)


def changed(right: DictConfig, **changes) -> DictConfig:
    config = copy.deepcopy(right)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def write_config(folder: Path, **entries) -> dict:
    """A folder with a config.json, as a model node."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return {"path": str(folder), "hf_config_path": None, "trust_remote_code": True, "override_config": {}}


def test_a_model_that_the_engine_refuses_is_a_note_of_a_dry_run_and_an_error_of_a_run(right, tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    write_config(tmp_path / "vl", architectures=["Qwen3VLMoeForConditionalGeneration"], text_config=text)
    config = changed(right, **{f"{A}__model__hf_config_path": str(tmp_path / "vl")})
    words = "the engine refuses this model at the start, Qwen3VLMoeForConditionalGeneration"
    found = check_ppo_config(config, {}, is_dry_run=True)
    assert sum(words in note for note in found.notes) == 1 and not any(words in error for error in found.errors)
    with pytest.raises(ValueError, match=words):
        validate_ppo_config(config, {})


def test_a_name_on_the_hub_is_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"path": "Nobody/No-Such-Model", "hf_config_path": None, "override_config": {}}
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    notes: list[str] = []
    assert check_model_folder("model", model, notes) == check_model_folder("model", model) == []
    assert len(notes) == 1 and "not checked: the model Nobody/No-Such-Model is not on this machine" in notes[0]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for given in (None, notes):
        (error,) = check_model_folder("model", model, given)
        assert "neither a folder nor a model in the local Hugging Face cache, and HF_HUB_OFFLINE is set" in error
    assert len(notes) == 1


def test_groups_of_one_and_router_losses_of_a_dense_model_are_said(right, tmp_path: Path, caplog) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 64}
    dense = write_config(tmp_path / "dense", architectures=["Qwen3ForCausalLM"], **sizes)["path"]
    settings = {
        f"{A}__rollout__n": 1,
        "algorithm__adv_estimator": "grpo",
        f"{A}__model__hf_config_path": dense,
        f"{A}__actor__megatron__override_transformer_config__moe_z_loss_coeff": 0.001,
    }
    tree = to_tree(changed(right, **settings))
    loss, group = ppo_warnings(tree)
    assert "moe_z_loss_coeff=0.001 has no effect" in loss and "of a dense model" in loss
    assert f"{A}.rollout.n=1 leaves nothing to compare" in group
    tree = to_tree(changed(right, **settings | {f"{A}__model__hf_config_path": None, f"{A}__rollout__n": 2}))
    assert ppo_warnings(tree) == []
    one = changed(right, **{f"{A}__rollout__n": 1, f"{A}__actor__ppo_mini_batch_size": 8, "trainer__save_freq": 999})
    with caplog.at_level(logging.WARNING, logger="verl.trainer.ppo.preflight"):
        validate_ppo_config(one, {})
    assert "leaves nothing to compare" in caplog.text and "trainer.save_freq=999 is more than the" in caplog.text


def test_a_checkpoint_beyond_the_end_is_said() -> None:
    def said(most: int = -1, **trainer) -> list[str]:
        node = {"save_freq": 7, "total_epochs": 2, "total_training_steps": None} | trainer
        return save_warnings({"trainer": node, "data": {"train_max_samples": most}}, [10, 20], 10)

    assert "the 6 steps of the run" in said()[0]
    assert "the 2 steps of the run" in said(10, save_freq=6)[0]
    for right in ({"save_freq": 6}, {"total_training_steps": 7}, {"save_freq": -1}, {"total_epochs": "x"}):
        assert said(**right) == []


def test_code_of_the_folder_in_place_of_transformers_own_is_said(tmp_path: Path) -> None:
    own = {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}
    node = write_config(tmp_path, model_type="deepseek_v3", auto_map=own)
    (said,) = model_code_warnings("model", node)
    assert "auto_map" in said and "model_type='deepseek_v3'" in said
    assert model_code_warnings("model", node | {"trust_remote_code": False}) == []
    for entries in ({"model_type": "nobodys", "auto_map": own}, {"model_type": "deepseek_v3"}):
        assert model_code_warnings("model", write_config(tmp_path, **entries)) == []


def test_every_fault_of_a_section_is_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        omega_conf_to_dataclass(
            {"loss_agg_mode": "mean", "kl_loss_type": "k9", "policy_loss": {"loss_mode": "dro"}, "ppo_epochs": "x"},
            McoreActorConfig,
            path="actor",
        )
    begun = [line.partition("=")[0] for line in str(caught.value).splitlines()]
    assert begun == ["actor.policy_loss.dro_beta", "actor.ppo_epochs", "actor.loss_agg_mode", "actor.kl_loss_type"]
    with pytest.raises(ValueError, match=r"top_p=1.5 .*\n.*temperature=0 is greedy"):
        RolloutConfig(temperature=0, top_p=1.5)


def test_a_batch_is_checked_beside_a_layout_that_does_not_fit(right) -> None:
    settings = {"data__train_batch_size": 9, f"{A}__actor__megatron__context_parallel_size": 3}
    errors = check_ppo_config(changed(right, **settings), {}).errors
    assert any("data.train_batch_size=9" in error for error in errors), errors
    assert any("context_parallel_size=3" in error for error in errors), errors


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (f"{A}.actor.fsdp_config.fsdp_size", f"takes its layout from {A}.actor.megatron"),
        ("critic.model.fsdp_config.param_offload", "takes its layout from critic.megatron"),
        ("reward_model.overlong_buffer.enable", "overlong_buffer_cfg.enable=True"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "use reward.reward_kwargs."),
        ("reward_model.model.path", "no model-based rewards"),
        (f"{A}.rollout.multi_turn.max_assistant_turns", "leave it out"),
        (f"{A}.actor.optim.warmup_style", f"use {A}.actor.optim.lr_decay_style"),
        ("ray_init.num_cpus", "Did you mean ray_kwargs.ray_init.num_cpus?"),
        ("trainer.total_epoch", "Did you mean trainer.total_epochs?"),
        (f"{A}.actor.lr", f"Did you mean {A}.actor.optim.lr?"),
    ],
)
def test_an_unknown_key_gets_an_advice_of_its_own(key: str, words: str) -> None:
    assert words in explain_unknown_key(key, "ppo_trainer", MOVED)


def test_no_group_is_guessed_from_a_word_that_many_have() -> None:
    assert explain_unknown_key("trainer.enable", "ppo_trainer", MOVED) == "trainer.enable is not a key of ppo_trainer."


def test_keys_of_verl_s_scripts_that_mean_nothing_here_are_accepted(files: Files) -> None:
    inert = ["reward_model.enable=False", f"{A}.rollout.load_format=dummy", "trainer.use_legacy_worker_impl=disable"]
    found = check_ppo_config(compose_config("ppo_trainer", [*files.ppo_arguments, *inert]), {})
    assert found.errors == found.key_errors == []
    assert {f"{A}.rollout.load_format", "trainer.use_legacy_worker_impl"} <= {key for key, _, _ in found.no_effect}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json=1"], "--json takes no value"),
        (["trainer.total_epochs", "=", "3"], "no spaces around =; write trainer.total_epochs=3"),
        (["trainer.total_epochs", "=3"], "no spaces around =; write trainer.total_epochs=3"),
        (["trainer.total_epochs=", "3"], "no spaces around =; write trainer.total_epochs=3"),
        (["trainer.dry_run=maybe"], "trainer.dry_run=maybe must be True, False or json"),
    ],
)
def test_a_command_line_that_means_something_else_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_request(arguments)


def test_the_example_of_a_row_is_shown_once(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{i}.parquet") for i in range(3)]
    for name in names:
        write_rows(Path(name), [{"question": "1+1"}])
    errors: list[str] = []
    open_data_files("data.train_files", names, {"prompt": PROMPT["prompt"]}, errors)
    assert len(errors) == 3
    assert [("a row must look like" in error) for error in errors] == [True, False, False]
