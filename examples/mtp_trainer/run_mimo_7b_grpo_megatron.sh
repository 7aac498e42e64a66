#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# GRPO with multi-token prediction: MiMo-7B-RL on GSM8K. The one prediction layer learns from the sampled answers;
# detach_encoder keeps its gradient out of the main model, so that the policy is trained by the policy loss alone. The
# rollout does not draft with it.
#
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/mtp_trainer/run_mimo_7b_grpo_megatron.sh
#   bash examples/mtp_trainer/run_mimo_7b_grpo_megatron.sh trainer.dry_run=True   what it would do, without a GPU
#
# GPUs:   8 of 80 GB (one machine)
# Layout: TP=2 x CP=2 x DP=2; a micro-batch holds up to 2 x 8192 tokens, half of each sequence on either context rank
# Regime: calculate_per_token_loss on: Megatron divides by the routed tokens of the whole step
# Memory: 37.4 GiB a GPU at most, in generation, 14.2 GiB of it the rollout's copy of the model: an estimate of the
#         dry run, not measured on a GPU. Without the CUDA context, NCCL's buffers and fragmentation
# Host:   260 GiB of a machine's memory hold what is offloaded: the rollout's copy while the others work, weights and
#         optimizer state while they do not
# Curve:  not measured
#
# Rollout: hf, the only one here: every GPU holds a whole bfloat16 copy of the model and generates with transformers,
# token by token. It is slow, and the copy waits in host memory while the others train.
# MiMo's architecture is Python code in its folder, hence trust_remote_code; the rollout generates with that code.
#
# Environment, with its default (paths are relative to the repository); further key=value arguments win:
#   MODEL_PATH       folder of the model, or its name on the Hugging Face hub (XiaomiMiMo/MiMo-7B-RL)
#   TRAIN_FILES      training rows ($HOME/data/gsm8k/train.parquet)
#   VAL_FILES        held-out rows ($HOME/data/gsm8k/test.parquet)
#   NNODES           machines of the Ray cluster (1)
#   N_GPUS_PER_NODE  GPUs of each machine (8)
#   OUT              checkpoints and metrics (checkpoints/mtp_grpo_mimo_7b)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_PATH="${MODEL_PATH:-XiaomiMiMo/MiMo-7B-RL}"
TRAIN_FILES="${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}"
VAL_FILES="${VAL_FILES:-$HOME/data/gsm8k/test.parquet}"
NNODES="${NNODES:-1}"
N_GPUS_PER_NODE="${N_GPUS_PER_NODE:-8}"
OUT="${OUT:-checkpoints/mtp_grpo_mimo_7b}"

exec "$python" -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=128 \
    data.max_prompt_length=512 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.trust_remote_code=True \
    actor_rollout_ref.model.mtp.enable=True \
    actor_rollout_ref.model.mtp.enable_train=True \
    actor_rollout_ref.model.mtp.detach_encoder=True \
    actor_rollout_ref.model.mtp.mtp_loss_scaling_factor=0.1 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    actor_rollout_ref.actor.megatron.param_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.optim.clip_grad=1.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=64 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=1.0 \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$N_GPUS_PER_NODE" \
    trainer.total_epochs=5 \
    trainer.val_before_train=False \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.logger='[console,file]' \
    trainer.project_name=mtp \
    trainer.experiment_name=mimo_7b_grpo \
    trainer.default_local_dir="$OUT" \
    "$@"
