# SPDX-License-Identifier: Apache-2.0
"""The hydra tree: it composes, it is frozen, and verl's command lines fit it."""

import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.trainer.config.files import Files, write_files
from verl.algos.policy_loss_base import clip_range
from verl.trainer.ppo.preflight import validate_ppo_config, validate_sft_config
from verl.utils.config import CONFIG_DIR, compose_config, flatten, omega_conf_to_dataclass

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
YAML_FILES = sorted(path for path in CONFIG_DIR.rglob("*.yaml") if not path.name.startswith("_"))
CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine", "generation", "evaluation")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("tree"))


def _arguments(name: str, files: Files) -> list[str]:
    lines = (HERE / name).read_text().splitlines()
    return [files.insert(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_composes_and_every_interpolation_resolves(name: str) -> None:
    config = compose_config(name)
    missing = OmegaConf.missing_keys(config)
    assert missing == ({"actor_rollout_ref.rollout.name"} if name.startswith("ppo") else set())
    OmegaConf.to_container(config, resolve=True)


def test_every_typed_node_builds_its_class_with_the_same_defaults() -> None:
    config = compose_config("ppo_trainer", ["actor_rollout_ref.rollout.name=hf"])
    nodes = [
        key.removesuffix("._target_")
        for key in flatten(OmegaConf.to_container(config, resolve=True))
        if key.endswith("._target_")
    ]
    assert len(nodes) > 12
    for key in nodes:
        node = OmegaConf.select(config, key)
        built = omega_conf_to_dataclass(node)
        assert type(built).__name__ == node._target_.rpartition(".")[2]
        # The tree's default is the class's, except where the tree sets a rate or a path, or follows another key.
        differing = {name for name in node if name in built and built[name] != getattr(type(built), name, built[name])}
        follows = {"max_response_length", "clip_ratio_low", "clip_ratio_high"}
        assert differing <= {"lr", "path", "name", "model"} | follows, key


def test_the_alias_of_the_megatron_tree_is_the_same_tree() -> None:
    trees = [OmegaConf.to_container(compose_config(name)) for name in ("ppo_trainer", "ppo_megatron_trainer")]
    assert trees[0] == trees[1]


def test_the_reference_model_and_the_critic_follow_the_actor() -> None:
    config = compose_config(
        "ppo_trainer",
        [
            "actor_rollout_ref.actor.megatron.context_parallel_size=4",
            "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=99",
            "actor_rollout_ref.model.use_remove_padding=False",
        ],
    )
    ref = config.actor_rollout_ref.ref
    assert ref.megatron.context_parallel_size == 4
    assert ref.megatron.override_transformer_config.moe_router_dtype == "fp32"
    assert ref.megatron.use_remove_padding is False
    assert (ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu) == (True, 99)
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 99
    assert config.critic.use_dynamic_bsz is True


def test_the_reference_keeps_the_weights_of_the_model_when_the_actor_starts_from_others() -> None:
    actor = "actor_rollout_ref.actor.megatron"
    config = compose_config(
        "ppo_trainer", [f"{actor}.use_dist_checkpointing=True", f"{actor}.dist_checkpointing_path=/old/run/dist_ckpt"]
    )
    engine = config.actor_rollout_ref.ref.megatron
    assert (engine.use_dist_checkpointing, engine.dist_checkpointing_path) == (False, None)


def test_both_sides_of_the_clip_follow_clip_ratio() -> None:
    given = {"clip_ratio=0.1": (0.1, 0.1), "clip_ratio_high=0.28": (0.2, 0.28), "clip_ratio_low=null": (0.2, 0.2)}
    for argument, bounds in given.items():
        node = compose_config("ppo_trainer", [f"actor_rollout_ref.actor.{argument}"]).actor_rollout_ref.actor
        assert clip_range(omega_conf_to_dataclass(node)) == bounds


def test_a_null_placeholder_takes_a_value_with_and_without_plus() -> None:
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity"
    for prefix in ("", "+", "++"):
        assert OmegaConf.select(compose_config("ppo_trainer", [f"{prefix}{key}=full"]), key) == "full"


def test_learning_rates_of_actor_critic_and_sft() -> None:
    config = compose_config("ppo_trainer")
    assert (config.actor_rollout_ref.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert compose_config("sft_trainer_engine").optim.lr == 1e-3


def test_the_keys_of_verls_ppo_scripts_compose_and_pass_the_checks(files: Files) -> None:
    arguments = _arguments("surface_keys.txt", files)
    assert len(arguments) > 150
    validate_ppo_config(compose_config("ppo_trainer", arguments), env={})


def test_the_keys_of_verls_sft_scripts_compose_and_pass_the_checks(files: Files) -> None:
    arguments = _arguments("sft_surface_keys.txt", files)
    assert len(arguments) > 30
    validate_sft_config(compose_config("sft_trainer_engine", arguments), env={"WORLD_SIZE": "8", "RANK": "0"})


def test_accepted_keys_are_frozen() -> None:
    spec = importlib.util.spec_from_file_location("print_cfg", ROOT / "scripts" / "print_cfg.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    advice = "the hydra tree changed; if that is meant, run: bash scripts/generate_trainer_config.sh"
    assert module.accepted_keys() == (HERE / "accepted_keys.txt").read_text(), advice
    generated = OmegaConf.load(CONFIG_DIR / "_generated_ppo_megatron_trainer.yaml")
    assert generated == compose_config("ppo_trainer", ["model_engine=megatron"]), advice


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(CONFIG_DIR)))
def test_each_field_has_a_comment_above_a_blank_line_before_and_none_behind(path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{path.name}:{number + 1}: {line}"
        assert re.match(r" *(- \S+(: \S+)?|[\w]+:( .*)?)$", line), where
        assert " #" not in line, where
        start = number - 1
        assert lines[start].lstrip().startswith("#"), where
        while start >= 0 and lines[start].lstrip().startswith("#"):
            start -= 1
        assert start < 0 or not lines[start].strip(), where


def test_composing_and_checking_needs_neither_torch_nor_ray(files: Files) -> None:
    program = (
        "import sys, verl.workers.config, verl.trainer.config\n"
        "from verl.trainer.ppo.preflight import validate_ppo_config\n"
        "from verl.utils.config import compose_config\n"
        "validate_ppo_config(compose_config('ppo_trainer', sys.argv[1:]), env={})\n"
        "print(sorted({'torch', 'ray', 'transformers', 'megatron.core'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, *files.ppo_arguments]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_a_part_sent_to_a_worker_still_follows_the_whole() -> None:
    arguments = ["data.max_response_length=77", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=3"]
    part = pickle.loads(pickle.dumps(compose_config("ppo_trainer", arguments).actor_rollout_ref))
    actor = omega_conf_to_dataclass(part.actor)
    assert (actor.max_response_length, actor.rollout_n) == (77, 3)
