#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# GRPO: Moonlight-16B-A3B-Instruct on GSM8K, a DeepSeek-V3 architecture of 16 billion parameters: multi-head latent
# attention, 64 routed and 2 shared experts, a sigmoid router with a correction bias.
#
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/grpo_trainer/run_moonlight_16b_a3b_megatron.sh
#   bash examples/grpo_trainer/run_moonlight_16b_a3b_megatron.sh trainer.dry_run=True   what it would do, without a GPU
#
# GPUs:   8 of 80 GB (one machine)
# Layout: TP=2 x CP=2 x DP=2, experts EP=8 x ETP=1 x expert-DP=1. Its 27 layers do not divide into 2 or 4 pipeline
#         stages
# Regime: calculate_per_token_loss off; the engine weighs router losses by tokens itself, so that with it on the
#         gradient is the same
# Memory: 42.9 GiB a GPU at most, in generation, 29.7 GiB of it the rollout's copy of the model: an estimate of the
#         dry run, not measured on a GPU. Without the CUDA context, NCCL's buffers and fragmentation
# Host:   455 GiB of a machine's memory hold what is offloaded: the rollout's copy while the others work, weights and
#         optimizer state while they do not
# Curve:  not measured
#
# Rollout: hf, the only one here: every GPU holds a whole bfloat16 copy of the model and generates with transformers,
# token by token. It is slow, and the copy waits in host memory while the others train.
# Tokenizer: Moonlight's is Python code in its folder, hence trust_remote_code. The same key would make transformers
# take the folder's model code, written for transformers 4: remove auto_map from its config.json (not from
# tokenizer_config.json), so that the DeepSeek-V3 of transformers 5 generates. Untested with the real folder; a tiny
# model of the same architecture trained two steps by hand, and trains two steps of SFT in the tests.
#
# Environment, with its default (paths are relative to the repository); further key=value arguments win:
#   MODEL_PATH       folder of the model, or its name on the Hugging Face hub (moonshotai/Moonlight-16B-A3B-Instruct)
#   TRAIN_FILES      training rows ($HOME/data/gsm8k/train.parquet)
#   VAL_FILES        held-out rows ($HOME/data/gsm8k/test.parquet)
#   NNODES           machines of the Ray cluster (1)
#   N_GPUS_PER_NODE  GPUs of each machine (8)
#   OUT              checkpoints and metrics (checkpoints/grpo_moonlight_16b_a3b)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_PATH="${MODEL_PATH:-moonshotai/Moonlight-16B-A3B-Instruct}"
TRAIN_FILES="${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}"
VAL_FILES="${VAL_FILES:-$HOME/data/gsm8k/test.parquet}"
NNODES="${NNODES:-1}"
N_GPUS_PER_NODE="${N_GPUS_PER_NODE:-8}"
OUT="${OUT:-checkpoints/grpo_moonlight_16b_a3b}"

exec "$python" -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=128 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.trust_remote_code=True \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.actor.megatron.param_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_load_balancing_type=aux_loss \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.001 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff=0.001 \
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
    actor_rollout_ref.rollout.max_num_seqs=32 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=1.0 \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$N_GPUS_PER_NODE" \
    trainer.total_epochs=15 \
    trainer.val_before_train=False \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.logger='[console,file]' \
    trainer.project_name=grpo \
    trainer.experiment_name=moonlight_16b_a3b \
    trainer.default_local_dir="$OUT" \
    "$@"
