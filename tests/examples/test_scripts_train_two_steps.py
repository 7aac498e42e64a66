# SPDX-License-Identifier: Apache-2.0
"""The twin of a script: the same script on a tiny random model of the same architecture trains two steps at CP=2.

Only sizes are changed: the layout to two processes, batches, answers, the learning rate, and float32. Of the objective
nothing is, so that regime, router losses and multi-token prediction are those of the script.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.scripts import Script, all_scripts
from verl.utils import tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = {script.name: script for script in all_scripts()}
ENGINE = "actor_rollout_ref.actor.megatron"
LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 1,
    "dtype": "float32",
}
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.logger=[file]"]
# A reward that differs inside a group: random answers are never right.
SCORE = "def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return {score}\n"

RL = [
    *(f"{ENGINE}.{key}={value}" for key, value in LAYOUT.items()),
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.train_batch_size=8",
    "data.max_response_length=8",
    "data.dataloader_num_workers=0",
    *SHORT,
]
SFT = [
    *(f"engine.{key}={value}" for key, value in LAYOUT.items()),
    "optim.lr=1e-3",
    "data.train_batch_size=8",
    "data.num_workers=0",
    *SHORT,
]

TWINS: dict[str, Callable[[str], str]] = {
    "examples/grpo_trainer/run_qwen2_5_7b_megatron.sh": tiny_model.save_tiny_qwen2,
    "examples/grpo_trainer/run_qwen3_8b_megatron.sh": tiny_model.save_tiny_qwen3,
    "recipe/moe_cp/run_qwen3_30b_a3b_cp4_megatron.sh": tiny_model.save_tiny_qwen3_moe,
    "examples/mtp_trainer/run_mimo_7b_grpo_megatron.sh": tiny_model.save_tiny_mimo,
    "examples/mtp_trainer/run_mimo_7b_sft_megatron.sh": tiny_model.save_tiny_mimo,
    "examples/sft/run_moonlight_16b_a3b_megatron.sh": tiny_model.save_tiny_deepseek_v3,
}


def train(script: Script, gsm8k: Path, folder: Path) -> list[dict[str, float]]:
    """The metrics of the two steps."""
    model, out = Path(TWINS[script.name](str(folder / "model"))), folder / "out"
    out.mkdir()
    arguments = [*(SFT if script.is_sft else RL), f"hydra.run.dir={folder / 'hydra'}"]
    if not script.is_sft:
        (folder / "score.py").write_text(SCORE.format(score="(sum(map(ord, solution_str)) % 7) / 7.0"))
        own = "reward.custom_reward_function"
        arguments += [f"{own}.name=score", f"{own}.path={folder / 'score.py'}"]
    # The layout goes to the world through the script's own variables.
    done = script.run(model, gsm8k, out, *arguments, timeout=280, NNODES="1", N_GPUS_PER_NODE="2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", TWINS)
def test_its_twin_trains_two_steps_at_cp_2(name: str, gsm8k: Path, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    steps = train(script, gsm8k, tmp_path)
    assert len(steps) == 2
    prefix = "train" if script.is_sft else "actor"
    for step in steps:
        wrong = {key: value for key, value in step.items() if not math.isfinite(value)}
        assert not wrong, wrong
        assert step[f"{prefix}/grad_norm"] > 0
    text = script.text
    if not script.is_sft:
        # The rollout's copy and the trained model are one policy, after an update too.
        assert all(abs(step["rollout_corr/kl"]) < 1e-5 for step in steps)
    if "use_kl_loss=True" in text:
        assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and steps[1]["actor/kl_loss"] > 0
    if "mtp.enable_train=True" in text:
        # A random model's cross entropy is near that of a uniform guess over 64 tokens.
        assert all(step["mtp/loss"] == pytest.approx(math.log(64), rel=0.2) for step in steps)
        assert steps[0]["mtp/loss"] != steps[1]["mtp/loss"]
    if "/moe_cp/" in name:  # what this twin is for
        assert all(key in text for key in ("moe_z_loss_coeff=0.001", "moe_aux_loss_coeff=0.001", "per_token_loss=True"))
    if script.is_sft:
        assert steps[0]["train/loss"] == pytest.approx(math.log(64), rel=0.2)
        assert steps[1]["train/loss"] < steps[0]["train/loss"]
