#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DAPO (arXiv 2503.14476) on two CPU cores: clip-higher, dynamic sampling, token-mean loss, overlong penalty, no KL. The
# model and the data are the quickstart's.
#
#   bash scripts/quickstart.sh                               once: makes the data and the model that is trained here
#   bash recipe/dapo/run_tiny_qwen3_moe_megatron.sh          40 steps, about two minutes
#   bash recipe/dapo/run_tiny_qwen3_moe_megatron.sh trainer.dry_run=True   what it would do
#
# GPUs:   none; 2 CPU processes
# Layout: TP=1 x CP=2 x DP=1
# Regime: calculate_per_token_loss off, as by default; with it on the gradient is the same
# Memory: 0.1 GiB a process at most, for the model; Python and its libraries need more
# Curve:  held-out accuracy 0.41 to 0.82 in 40 steps
#
# Environment, with its default (paths are relative to the repository); further key=value arguments win:
#   MODEL_PATH       folder of the model (outputs/quickstart/sft/global_step_400/huggingface)
#   TRAIN_FILES      training rows (outputs/quickstart/data/train.parquet)
#   VAL_FILES        held-out rows (outputs/quickstart/data/test.parquet)
#   NNODES           machines (1)
#   N_GPUS_PER_NODE  processes (2)
#   OUT              checkpoints and metrics (outputs/dapo)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/common.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

MODEL_PATH="${MODEL_PATH:-outputs/quickstart/sft/global_step_400/huggingface}"
TRAIN_FILES="${TRAIN_FILES:-outputs/quickstart/data/train.parquet}"
VAL_FILES="${VAL_FILES:-outputs/quickstart/data/test.parquet}"
NNODES="${NNODES:-1}"
N_GPUS_PER_NODE="${N_GPUS_PER_NODE:-2}"
OUT="${OUT:-outputs/dapo}"

exec "$python" -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=16 \
    data.gen_batch_size=24 \
    data.max_prompt_length=8 \
    data.max_response_length=8 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    actor_rollout_ref.actor.megatron.dtype=float32 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.actor.optim.lr=4e-4 \
    actor_rollout_ref.actor.optim.betas='[0.9,0.99]' \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.optim.lr_decay_style=linear \
    actor_rollout_ref.actor.optim.min_lr=4e-5 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.dtype=float32 \
    reward.reward_manager.name=dapo \
    +reward.reward_kwargs.max_resp_len=8 \
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward.reward_kwargs.overlong_buffer_cfg.len=2 \
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \
    +reward.reward_kwargs.overlong_buffer_cfg.log=True \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$N_GPUS_PER_NODE" \
    trainer.total_training_steps=40 \
    trainer.total_epochs=1 \
    trainer.test_freq=20 \
    trainer.logger='[file]' \
    trainer.project_name=dapo \
    trainer.experiment_name=tiny \
    trainer.resume_mode=disable \
    trainer.default_local_dir="$OUT" \
    "$@"
