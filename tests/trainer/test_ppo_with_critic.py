# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic end to end: the command line, two Ray workers, context parallel size 2, two steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.config.files import PROMPT, write_rows

REPO_ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def run(folder: Path) -> None:
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=gae", "algorithm.lam=0.9"),
        *(f"data.train_files={folder / 'prompts.jsonl'}", "data.val_files=null", "data.train_batch_size=8"),
        *("data.max_prompt_length=6", "data.max_response_length=4", "data.dataloader_num_workers=0"),
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        *("actor_rollout_ref.actor.megatron.dtype=float32", "critic.megatron.dtype=float32"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"),
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2"),
        "actor_rollout_ref.rollout.dtype=float32",
        *("critic.ppo_mini_batch_size=4", "critic.ppo_epochs=2", "critic.use_dynamic_bsz=False"),
        *("critic.ppo_micro_batch_size_per_gpu=4", "critic.optim.lr=1e-3"),
        "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *("trainer.critic_warmup=1", "trainer.n_gpus_per_node=2", "trainer.save_freq=2"),
        *(
            "trainer.total_training_steps=2",
            "trainer.total_epochs=1",
            "trainer.logger=[file]",
            "trainer.project_name=p",
            "trainer.experiment_name=e",
        ),
        *(f"trainer.default_local_dir={folder / 'run'}", f"hydra.run.dir={folder / 'hydra'}"),
    ]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_two_steps_of_ppo_with_a_critic_on_two_context_parallel_workers(tmp_path: Path) -> None:
    from verl.utils.tiny_model import save_tiny_qwen3_moe

    save_tiny_qwen3_moe(str(tmp_path / "model"))
    write_rows(tmp_path / "prompts.jsonl", [PROMPT] * 16)
    run(tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["critic/vf_loss"] > 0 and step["critic/grad_norm"] > 0 and step["critic/lr"] == 1e-3
        assert step["timing_s/values"] > 0 and step["timing_s/update_critic"] > 0
        assert {"critic/vf_clipfrac", "critic/vpred_mean", "critic/vf_explained_var", "critic/values/mean"} <= set(step)
    assert "actor/grad_norm" not in steps[0] and "timing_s/update_actor" not in steps[0]  # the critic's warm-up
    assert steps[1]["actor/grad_norm"] > 0 and abs(steps[1]["actor/ppo_kl"]) < 1e-6
    assert steps[0]["critic/values/mean"] != steps[1]["critic/values/mean"]
    saved = tmp_path / "run" / "global_step_2"
    assert (saved / "critic" / "dist_ckpt").is_dir() and (saved / "actor" / "dist_ckpt").is_dir()
    assert (saved / "critic" / "huggingface" / "model.safetensors").is_file()
