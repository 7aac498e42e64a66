# SPDX-License-Identifier: Apache-2.0
"""The whole report: everything wrong at once, what is told in spite of that, and both of its forms."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.files import Files, write_files, write_model
from verl.trainer.dry_run.command import guilty_argument, read_request
from verl.trainer.dry_run.render import as_json, as_text, bytes_in_words
from verl.trainer.dry_run.report import Report, build_report, world_of
from verl.trainer.ppo.preflight_repair import is_consequence, with_defaults_at
from verl.utils.config import compose_config, did_you_mean, explain_unknown_key, suggested_keys
from verl.utils.memory_estimate import Layout, RolloutLoad, estimate_memory
from verl.utils.model_size import read_model_shape

A = "actor_rollout_ref"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "model_configs" / "Qwen3-30B-A3B" / "config.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = write_files(tmp_path_factory.mktemp("files"))
    (made.model / "config.json").write_bytes(FIXTURE.read_bytes())
    return made


def ppo(files: Files, *changes: str) -> Report:
    return build_report(
        compose_config("ppo_trainer", [*files.ppo_arguments, "trainer.dry_run=True", *changes]), "ppo_trainer"
    )


def sft(files: Files, *changes: str) -> Report:
    return build_report(compose_config("sft_trainer_engine", [*files.sft_arguments, *changes]), "sft_trainer_engine")


def test_a_sound_command(files: Files) -> None:
    report = ppo(files)
    assert (report.errors, report.exit_code, report.command) == ((), 0, "verl.trainer.main_ppo")
    assert (report.layout.data, report.layout.context, report.layout.experts, report.layout.stages) == (
        1,
        2,
        128,
        (48,),
    )
    assert report.batches.steps.total_steps == 60
    text = as_text(report)
    assert text.endswith("Nothing is wrong.")
    told = " ".join(text.split())
    assert "2 ranks (trainer.nnodes 1 x trainer.n_gpus_per_node 2) = tensor 1 x pipeline 1 x context 2 x data 1" in told
    assert "8 / 4 (ppo_mini_batch_size) = 2 mini-batches x 1 (ppo_epochs) = 2 updates" in told
    assert all(len(line) <= 120 for line in text.splitlines())


def test_everything_wrong_is_told_at_once_and_the_rest_too(files: Files) -> None:
    changes = ["trainer.n_gpus_per_node=6", f"{A}.actor.megatron.tensor_model_parallel_size=4", f"{A}.rollout.n=0"]
    changes += ["trainer.logger=[tracker]", "algorithm.adv_estimator=gpro", "data.train_files=/no/such.parquet"]
    changes += ["data.max_prompt_length=long", "trainer.total_epochs=0"]
    report = ppo(files, *changes)
    wrong = [
        "data.max_prompt_length='long' must be a whole number",
        "trainer.logger='tracker' is not known",
        "actor_rollout_ref.rollout.n=0 must be at least 1",
        "algorithm.adv_estimator='gpro' is not known",
        "trainer.nnodes x trainer.n_gpus_per_node=6 ranks cannot be divided",
        "data.train_files: /no/such.parquet does not exist",
        "trainer.total_epochs=0 must be a whole number of at least 1",
    ]
    assert [start for start in wrong if not any(error.startswith(start) for error in report.errors)] == []
    assert report.exit_code == 2
    assert (report.layout.world_size, report.layout.data) == (6, None)
    assert report.batches.items_per_step == 8
    assert report.batches.longest == 1024, "the default prompt length stands in"
    assert any("data.max_prompt_length=512, the default" in note for note in report.notes)
    text = as_text(report)
    assert f"{len(report.errors)} errors" in text and "do not divide into tensor 4" in text
    assert report.memory.estimate is None and "do not divide" in report.memory.unknown


def test_what_hydra_refused_is_among_the_errors_without_what_follows(files: Files) -> None:
    config = compose_config("ppo_trainer", [argument for argument in files.ppo_arguments if "mini" not in argument])
    # Consequences are told by the sentence, so it is the one that a user gets.
    refused = explain_unknown_key(f"{A}.actor.ppo_mini_batchsize", "ppo_trainer")
    assert refused.endswith(f" Did you mean {A}.actor.ppo_mini_batch_size?")
    report = build_report(config, "ppo_trainer", [refused])
    assert report.errors == (refused,)
    assert any(note.startswith("perhaps only") and "ppo_mini_batch_size=256" in note for note in report.notes)
    # The default of the key that was meant is larger than the batch, which is nobody's mistake.
    assert any("ppo_mini_batch_size=256" in error for error in build_report(config, "ppo_trainer").errors)
    assert build_report(None, "ppo_trainer", ["no"]).errors == ("no",)


def test_what_follows_from_a_value_of_another_type_is_no_error(files: Files) -> None:
    report = ppo(files, f"{A}.actor.ppo_mini_batch_size=many")
    (error,) = report.errors
    assert error.startswith(f"{A}.actor.ppo_mini_batch_size='many' must be a whole number")
    assert any(note.startswith("perhaps only") and "ppo_mini_batch_size=256" in note for note in report.notes)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="nothing is missing here")
def test_what_is_missing_on_this_machine_is_a_note_of_a_dry_run(files: Files, tmp_path: Path) -> None:
    model = write_model(tmp_path / "gemma", architectures=["Gemma3ForCausalLM"])
    report = ppo(files, f"{A}.model.path={model}")
    assert report.errors == ()
    assert any("needs the package transformer_engine, which is not installed here" in note for note in report.notes)


@pytest.mark.parametrize(
    ("layers", "size", "overrides", "stages"),
    [
        (48, "tensor", {"should_pad_vocab": True}, (48,)),
        (47, "pipeline", {"account_for_loss_in_pipeline_split": True}, (24, 23)),
        (48, "pipeline", {"num_layers": 4}, (2, 2)),
        (48, "pipeline", {"num_layers_in_first_pipeline_stage": 30}, (30, 18)),
    ],
)
def test_checks_layout_and_memory_divide_the_model_alike(
    files: Files, tmp_path: Path, layers: int, size: str, overrides: dict[str, Any], stages: tuple[int, ...]
) -> None:
    odd = json.loads(FIXTURE.read_text()) | {"num_hidden_layers": layers, "vocab_size": 151_935}
    model, engine = write_model(tmp_path / "odd", **odd), f"{A}.actor.megatron"
    changes = [f"{A}.model.path={model}", f"{engine}.context_parallel_size=1", f"{engine}.{size}_model_parallel_size=2"]
    report = ppo(files, *changes, *(f"+{engine}.override_transformer_config.{k}={v}" for k, v in overrides.items()))
    assert report.errors == () and report.layout.stages == stages
    assert report.memory.estimate is not None, report.memory.unknown


def test_a_consequence_is_about_the_key_or_one_of_its_name() -> None:
    cause = [f"{A}.actor.ppo_mini_batch_size='many' must be a whole number, such as 256"]
    assert is_consequence(f"{A}.actor.ppo_mini_batch_size=256 is more than data.train_batch_size=8", cause)
    assert is_consequence("critic.ppo_mini_batch_size=256 does not divide", cause)
    assert not is_consequence("data.train_batch_size=8 is not enough", cause)
    meant = did_you_mean("data.train_batchsize", ["data.train_batch_size", "data.seed"])
    assert suggested_keys(f"No such key.{meant} Well.") == ["data.train_batch_size"] and suggested_keys("no") == []
    assert not is_consequence("reward.custom_reward_function.path=x does not exist", [f"{A}.model.path=3 must be text"])


def test_defaults_at_bad_keys() -> None:
    defaults = {"a": {"b": 1, "c": None}, "d": [1]}
    tree = {"a": {"b": "x", "new": 2}, "d": [1]}
    assert with_defaults_at(tree, defaults, ["a.b", "a.new", "a.c"]) == {"a": {"b": 1, "c": None}, "d": [1]}
    assert with_defaults_at({"a": 5}, defaults, ["a"]) == {"a": {"b": 1, "c": None}}
    assert with_defaults_at({"a": {"b": {"q": {"r": 1}}}}, defaults, ["a.b.q.r"]) == {"a": {"b": 1}}
    assert with_defaults_at({"z": {"b": 1}}, defaults, ["z.b"]) == {"z": {}}
    assert tree["a"]["b"] == "x"


def test_weights_and_machine_do_not_matter(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = files.model / "model.safetensors"
    weights.rename(files.root / "weights")
    try:
        report = ppo(files, "trainer.n_gpus_per_node=8", "trainer.default_local_dir=/proc/none")
    finally:
        (files.root / "weights").rename(weights)
    assert report.errors == ()
    assert any("has no weights" in note for note in report.notes)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = ppo(files, f"{A}.model.path=Nobody/No-Such-Model")
    assert len(report.errors) == 1 and "HF_HUB_OFFLINE is set" in report.errors[0]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    report = ppo(files, f"{A}.model.path=Nobody/No-Such-Model")
    assert report.errors == ()
    assert any("not checked: the model Nobody/No-Such-Model is not on this machine" in note for note in report.notes)
    assert report.memory.unknown == "Nobody/No-Such-Model is neither a folder nor in the local Hugging Face cache"
    assert report.regimes[0].regime.source == "unknown"


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="the package is here")
def test_a_package_of_accelerators_is_a_note(files: Files, tmp_path: Path) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = ppo(files, f"{A}.model.hf_config_path={tmp_path}")
    assert report.errors == ()
    assert any("transformer_engine" in note for note in report.notes)
    assert "sizes of architecture Gemma2ForCausalLM are not known" in report.memory.unknown


def test_memory_is_that_of_the_estimate(files: Files) -> None:
    changes = [f"{A}.actor.use_kl_loss=True", f"{A}.actor.megatron.expert_model_parallel_size=4", f"{A}.rollout.n=4"]
    changes += ["trainer.n_gpus_per_node=8", f"{A}.actor.megatron.expert_tensor_parallel_size=1"]
    report = ppo(files, *changes)
    assert report.errors == ()
    # 8 prompts x 4 = 32 responses on 8 ranks for the rollout; 4 ranks of data, so a rank updates on 4 x 4 / 4 = 4
    # responses of 1024 tokens, half of each: fewer tokens than the budget of 16384. Log-probs take all 8 of the rank.
    expected = estimate_memory(
        read_model_shape(json.loads(FIXTURE.read_text())),
        Layout(cp=2, ep=4, etp=1, world_size=8),
        max_tokens_per_rank=2048,
        max_tokens_without_grad=4096,
        num_micro_batches=1,
        reference=True,
        saves=False,
        rollout=RolloutLoad(rows=4, tokens=1024),
    )
    assert report.memory.estimate == expected.to_dict()
    assert f"at most {bytes_in_words(expected.total)}" in " ".join(as_text(report).split())


def test_what_is_offloaded_is_told_as_host_memory_of_a_machine(files: Files) -> None:
    changes = ["trainer.nnodes=2", f"{A}.actor.megatron.param_offload=True", f"{A}.rollout.n=4"]
    changes += ["trainer.n_gpus_per_node=4", f"{A}.actor.megatron.optimizer_offload=True"]
    memory = ppo(files, *changes).memory
    parts = {part["name"]: part["bytes"] for part in memory.estimate["parts"]}
    moved = ("weights", "optimizer state", "rollout's copy of the model")
    assert memory.estimate["host_bytes"] == sum(parts[name] for name in moved)
    assert (memory.ranks_per_machine, memory.host_bytes_of_a_machine) == (4, 4 * memory.estimate["host_bytes"])
    said = " ".join(as_text(ppo(files, *changes)).split())
    assert f"host memory {bytes_in_words(memory.host_bytes_of_a_machine)} of a machine's" in said
    stays = ppo(files, *changes, f"{A}.rollout.free_cache_engine=False").memory
    assert stays.estimate["host_bytes"] == parts["weights"] + parts["optimizer state"]
    assert stays.estimate["phases"]["update"] == memory.estimate["phases"]["update"] + parts[moved[2]]


def test_a_cpu_has_no_memory_to_move_anything_to(files: Files) -> None:
    changes = [f"{A}.actor.megatron.param_offload=True", f"{A}.actor.megatron.optimizer_offload=True"]
    changes += ["trainer.device=cpu", f"{A}.actor.use_kl_loss=True"]
    memory = ppo(files, *changes).memory
    assert memory.host_bytes_of_a_machine == memory.estimate["host_bytes"] == 0
    always = {part["name"] for part in memory.estimate["parts"] if not part["phases"]}
    assert {"weights", "gradients", "optimizer state", "reference model's weights"} < always
    assert "rollout's copy of the model" in always
    assert "host memory " not in as_text(ppo(files, *changes)).partition("not counted")[0]


def test_memory_with_a_critic_adds_both(files: Files) -> None:
    estimate = ppo(files, "algorithm.adv_estimator=gae").memory.estimate
    names = [part["name"] for part in estimate["parts"]]
    assert {"actor: weights", "critic: weights", "actor: rollout's copy of the model"} <= set(names)
    assert {"actor update", "critic update"} <= set(estimate["phases"])


def test_fixed_micro_batches_need_the_memory_of_their_longest_rows(files: Files) -> None:
    changes = ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2", "data.max_length=101"]
    changes += ["engine.context_parallel_size=2", "trainer.n_gpus_per_node=2"]
    # 2 rows of 101 tokens, padded to 104, on 2 context ranks: 104 tokens on each.
    parts = {part["name"]: part["formula"] for part in sft(files, *changes).memory.estimate["parts"]}
    assert parts["activations"].startswith("104 tokens x ")


def test_generation_and_evaluation(files: Files) -> None:
    arguments = [f"data.path={files.prompts}", f"model.path={files.model}", "data.n_samples=3", "data.batch_size=5"]
    report = build_report(compose_config("generation", arguments), "generation")
    assert report.errors == ()
    work = report.offline
    assert (work.workers, work.rows, work.responses, work.batches, work.rows_per_worker) == (8, 16, 48, 4, 2)
    assert report.memory.estimate["worst_phase"] == "generate"
    assert "16 x 3 (data.n_samples) = 48" in as_text(report)
    report = build_report(compose_config("evaluation", [f"data.path={files.prompts}"]), "evaluation")
    assert report.offline.rows == 16
    assert "has no column 'responses'" in report.errors[0]
    assert json.loads(as_json(report))["exit_code"] == 2


def test_keys_that_differ_are_those_that_were_written(files: Files) -> None:
    report = ppo(files, f"{A}.rollout.n=2", f"+{A}.actor.megatron.override_transformer_config.moe_z_loss_coeff=0.1")
    changed = {key.key: (key.value, key.default) for key in report.changed}
    assert changed[f"{A}.rollout.n"] == (2, 1)
    assert changed[f"{A}.actor.megatron.override_transformer_config.moe_z_loss_coeff"] == (0.1, None)
    assert not [key for key in changed if key.startswith("critic") or "rollout_n" in key or key == "trainer.dry_run"]
    report = ppo(files, "algorithm.gamma=0.9", "critic.cliprange_value=0.1")
    unread = {key.key: key.reason for key in report.unread}
    assert "read by gae" in unread["algorithm.gamma"]
    assert unread["critic.cliprange_value"] == "there is no critic"


def test_the_world_under_torchrun_is_the_launchers(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"nnodes": 2, "n_gpus_per_node": 4}
    env = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    world = world_of(trainer, "sft_trainer_engine", env)
    assert (world.size, world.ranks_per_node) == (16, 8)
    world = world_of(trainer, "ppo_trainer", env)
    assert (world.size, world.ranks_per_node) == (8, 4)
    assert world_of(trainer, "sft_trainer_engine", {}).size == 8
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    report = sft(files, "trainer.nnodes=2")
    assert report.errors == () and any("needs torchrun on every node" in note for note in report.notes)


@pytest.mark.parametrize(
    ("arguments", "is_dry_run", "as_json"),
    [
        (["a=1"], False, False),
        (["trainer.dry_run=True"], True, False),
        (["+trainer.dry_run=true", "--json"], True, True),
        (["--json", "++trainer.dry_run=1"], True, True),
        (["trainer.dry_run=json"], True, True),
        (["trainer.dry_run=True", "trainer.dry_run=False"], False, False),
        (["trainer.dry_run=False"], False, False),
    ],
)
def test_requests(arguments: list[str], is_dry_run: bool, as_json: bool) -> None:
    request = read_request(arguments)
    assert (request.is_dry_run, request.as_json) == (is_dry_run, as_json)


def test_a_request_writes_nothing_whatever_hydra_is_told() -> None:
    given = ["a=1", "hydra.run.dir=/x", "hydra/job_logging=default", "trainer.dry_run=True", "b=2", "--json"]
    arguments = read_request([*given, "hydra.searchpath=[y]"]).arguments
    assert arguments[:2] == ["a=1", "trainer.dry_run=True"] and arguments[-2:] == ["b=2", "hydra.searchpath=[y]"]
    assert "hydra.run.dir=." in arguments and "hydra.output_subdir=null" in arguments
    assert not {"--json", "hydra.run.dir=/x", "hydra/job_logging=default"} & set(arguments)
    with pytest.raises(ValueError, match="add trainer.dry_run=True, or leave out --json"):
        read_request(["--json", "a=1"])
    with pytest.raises(ValueError, match="leave out --multirun"):
        read_request(["trainer.dry_run=True", "--multirun"])


def test_the_argument_that_hydra_refuses() -> None:
    class Unread(Exception):
        override = "b=[1"

    arguments = ["trainer.x=1", "+c.d=2", "b=[1", "model_engine=dp", "data=3", "trainer.dry_run=True"]
    cases: list[tuple[Exception, Any]] = [
        (Exception("Could not override 'trainer.x'.\nKey 'x' is not in struct"), "trainer.x=1"),
        (Exception("Could not append to config. An item is already at 'c.d'."), "+c.d=2"),
        (Exception("In 'ppo_trainer': Could not find 'model_engine/dp'"), "model_engine=dp"),
        (Unread("no viable alternative"), "b=[1"),
        (Exception("data=3 trainer=4: a whole group of keys takes no number"), "data=3"),
        (Exception("something else"), None),
    ]
    assert [guilty_argument(error, arguments) for error, _ in cases] == [argument for _, argument in cases]


def test_sizes_in_words() -> None:
    assert [bytes_in_words(n) for n in (3, 2048, 3 << 20, 5 << 29)] == ["3 bytes", "2.00 KiB", "3.00 MiB", "2.50 GiB"]
