# SPDX-License-Identifier: Apache-2.0
"""Command lines in the style of verl's Megatron scripts train two steps on a tiny model, on two workers.

Between them they set the keys that concern objective, batches, optimizer, router and rewards (docs/algorithms.md and
tests/trainer/config/surface_keys.txt name them), each away from its default.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.config.files import PROMPT, write_rows
from verl.utils.tiny_model import save_tiny_qwen3_moe

REPO_ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

A, T = "actor_rollout_ref", "actor_rollout_ref.actor.megatron.override_transformer_config"

RUNS = {
    "grpo with KL and entropy, CP=2, z-loss, the flag": [
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{A}.actor.megatron.context_parallel_size=2",
        f"+{T}.calculate_per_token_loss=True",
        f"+{T}.moe_z_loss_coeff=0.001",
        f"{A}.actor.use_kl_loss=True",
        f"{A}.actor.kl_loss_coef=0.01",
        f"{A}.actor.kl_loss_type=low_var_kl",
        f"{A}.actor.entropy_coeff=0.001",
        f"{A}.actor.use_dynamic_bsz=True",
        f"{A}.actor.ppo_max_token_len_per_gpu=64",
        f"{A}.rollout.log_prob_max_token_len_per_gpu=48",
        f"{A}.ref.log_prob_max_token_len_per_gpu=80",
        f"{A}.actor.clip_ratio_low=0.1",
        f"{A}.actor.clip_ratio_high=0.28",
        f"{A}.actor.clip_ratio_c=10.0",
        f"{A}.rollout.temperature=0.9",
        f"{A}.rollout.top_p=0.95",
        f"{A}.rollout.top_k=20",
    ],
    "PPO with a critic, KL in the reward, two epochs of mini-batches, TP=2, recomputation": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.01",
        f"{A}.actor.megatron.tensor_model_parallel_size=2",
        f"{A}.actor.megatron.use_distributed_optimizer=False",
        f"{T}.recompute_granularity=full",
        f"+{T}.recompute_method=uniform",
        f"+{T}.recompute_num_layers=1",
        f"{A}.actor.ppo_mini_batch_size=4",
        f"{A}.actor.ppo_epochs=2",
        f"{A}.actor.shuffle=True",
        f"{A}.actor.ppo_micro_batch_size_per_gpu=2",
        f"{A}.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"{A}.ref.log_prob_micro_batch_size_per_gpu=3",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.megatron.dtype=float32",
        "critic.megatron.use_distributed_optimizer=False",
        f"{A}.actor.loss_agg_mode=seq-mean-token-sum-norm",
        f"{A}.actor.optim.clip_grad=0.5",
        f"{A}.actor.optim.weight_decay=0.1",
        f"{A}.actor.optim.lr_warmup_steps=1",
        f"{A}.actor.optim.lr_warmup_init=5e-4",
        f"{A}.actor.optim.lr_decay_style=cosine",
        f"{A}.actor.megatron.param_offload=True",
        f"{A}.actor.megatron.optimizer_offload=True",
    ],
    "rloo with GSPO, EP=2, the balancing loss, balanced data-parallel ranks": [
        "algorithm.adv_estimator=rloo",
        f"{A}.actor.policy_loss.loss_mode=gspo",
        f"{A}.actor.megatron.expert_model_parallel_size=2",
        f"{A}.actor.megatron.expert_tensor_parallel_size=1",
        f"+{T}.moe_router_load_balancing_type=aux_loss",
        f"+{T}.moe_aux_loss_coeff=0.01",
        f"+{T}.moe_router_dtype=fp32",
        f"+{T}.moe_token_dispatcher_type=alltoall",
        f"+{T}.moe_permute_fusion=True",
        f"{A}.actor.use_dynamic_bsz=True",
        "trainer.balance_batch=True",
        f"{A}.actor.calculate_entropy=True",
    ],
    "DAPO's rewards and clipping, bfloat16, PP=2": [
        "algorithm.adv_estimator=grpo",
        f"{A}.actor.megatron.pipeline_model_parallel_size=2",
        f"{A}.actor.megatron.dtype=bfloat16",
        f"{A}.rollout.dtype=bfloat16",
        f"{A}.actor.clip_ratio_high=0.28",
        f"{A}.actor.use_dynamic_bsz=True",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.max_resp_len=4",
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward.reward_kwargs.overlong_buffer_cfg.len=2",
        "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
        "+reward.reward_kwargs.overlong_buffer_cfg.log=True",
    ],
    "dynamic sampling, rewards for the whole batch in one call": [
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=4",
        f"{A}.actor.use_dynamic_bsz=True",
        f"{A}.actor.policy_loss.loss_mode=cispo",
        "reward.reward_manager.name=batch",
        "reward.custom_reward_function.name=score_all",
    ],
    "remax, rollout correction, scores from processes": [
        "algorithm.adv_estimator=remax",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        f"{A}.actor.use_dynamic_bsz=True",
        f"{A}.actor.megatron.context_parallel_size=2",
        "reward.reward_manager.name=prime",
    ],
}


def command(folder: Path, changes: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "model_engine=megatron"),
        *(f"data.train_files={folder / 'prompts.jsonl'}", f"data.val_files={folder / 'prompts.jsonl'}"),
        *("data.train_batch_size=8", "data.max_prompt_length=6", "data.max_response_length=4"),
        *("data.dataloader_num_workers=0", "data.truncation=left", "data.filter_overlong_prompts=True"),
        *(f"{A}.model.path={folder / 'model'}", f"{A}.actor.megatron.dtype=float32", f"{A}.actor.optim.lr=1e-3"),
        *(f"{A}.actor.ppo_mini_batch_size=8", f"{A}.rollout.name=hf", f"{A}.rollout.n=2", f"{A}.rollout.dtype=float32"),
        *("trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.logger=[file]"),
        *("trainer.val_before_train=False", "trainer.test_freq=2", f"trainer.default_local_dir={folder / 'run'}"),
        *("reward.custom_reward_function.name=score", f"reward.custom_reward_function.path={folder / 'score.py'}"),
        f"hydra.run.dir={folder / 'hydra'}",
        *changes,
    ]


@pytest.mark.parametrize("name", RUNS)
def test_a_verl_style_command_trains_two_steps(tmp_path: Path, name: str) -> None:
    save_tiny_qwen3_moe(str(tmp_path / "model"), hidden=32, head_dim=32, heads=2, experts=4, moe_intermediate=32)
    write_rows(tmp_path / "prompts.jsonl", [PROMPT] * 16)
    (tmp_path / "score.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return (sum(map(ord, solution_str)) % 7) / 7.0  # differs inside a group, so that something is learnt\n"
        "def score_all(data_sources, solution_strs, ground_truths, extra_infos=None, **kwargs):\n"
        "    return [score(*row) for row in zip(data_sources, solution_strs, ground_truths)]\n"
    )
    # The last value of a key counts, so that a run may set what the common part sets.
    done = subprocess.run(
        command(tmp_path, RUNS[name]),
        cwd=REPO_ROOT,
        env=os.environ | {"PYTHONPATH": f"{REPO_ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    for step in steps:
        # A full group of equal rewards is all but impossible with 8 groups, so there is a gradient.
        assert math.isfinite(step["actor/grad_norm"]) and step["actor/grad_norm"] > 0, step
    if "KL in the reward" in name:
        assert steps[1]["actor/reward_kl_penalty"] != 0
        assert steps[0]["critic/vf_loss"] > 0
    if "KL and entropy" in name:
        assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and steps[1]["actor/kl_loss"] > 0
    if "dynamic sampling" in name:
        assert steps[0]["train/num_gen_batches"] >= 2  # a batch of 8 prompts from draws of 4
    if "rollout correction" in name:
        assert any(key.startswith("rollout_corr") for key in steps[0]), sorted(steps[0])
    assert any(key.startswith("val-") for key in steps[1]), sorted(steps[1])
