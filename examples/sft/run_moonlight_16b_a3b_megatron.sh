#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Supervised fine-tuning: Moonlight-16B-A3B-Instruct on the worked answers of GSM8K, a DeepSeek-V3 architecture of 16
# billion parameters: multi-head latent attention, 64 routed and 2 shared experts, a sigmoid router with a correction
# bias.
#
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/sft/run_moonlight_16b_a3b_megatron.sh
#   bash examples/sft/run_moonlight_16b_a3b_megatron.sh trainer.dry_run=True   what it would do, without a GPU
#
# GPUs:   8 of 80 GB (one machine)
# Layout: TP=2 x CP=2 x DP=2, experts EP=8 x ETP=1 x expert-DP=1. Its 27 layers do not divide into 2 or 4 pipeline
#         stages
# Regime: calculate_per_token_loss on: Megatron divides by the routed tokens of the whole step
# Memory: 50.3 GiB a GPU at most, while a checkpoint is saved: an estimate of the dry run, not measured on a GPU.
#         Without the CUDA context, NCCL's buffers and fragmentation
# Curve:  not measured
#
# Tokenizer: Moonlight's is Python code in its folder, hence trust_remote_code.
#
# Environment, with its default (paths are relative to the repository); further key=value arguments win:
#   MODEL_PATH       folder of the model, or its name on the Hugging Face hub (moonshotai/Moonlight-16B-A3B-Instruct)
#   TRAIN_FILES      training rows ($HOME/data/gsm8k/sft_train.parquet)
#   VAL_FILES        held-out rows ($HOME/data/gsm8k/sft_test.parquet)
#   N_GPUS_PER_NODE  GPUs of this machine (8)
#   OUT              checkpoints and metrics (checkpoints/sft_moonlight_16b_a3b)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_PATH="${MODEL_PATH:-moonshotai/Moonlight-16B-A3B-Instruct}"
TRAIN_FILES="${TRAIN_FILES:-$HOME/data/gsm8k/sft_train.parquet}"
VAL_FILES="${VAL_FILES:-$HOME/data/gsm8k/sft_test.parquet}"
N_GPUS_PER_NODE="${N_GPUS_PER_NODE:-8}"
OUT="${OUT:-checkpoints/sft_moonlight_16b_a3b}"

exec "$python" -m verl.trainer.sft_trainer \
    engine=megatron \
    optim=megatron \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=128 \
    data.max_length=2048 \
    data.truncation=right \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=8192 \
    model.path="$MODEL_PATH" \
    model.trust_remote_code=True \
    engine.tensor_model_parallel_size=2 \
    engine.pipeline_model_parallel_size=1 \
    engine.context_parallel_size=2 \
    engine.expert_model_parallel_size=8 \
    engine.expert_tensor_parallel_size=1 \
    engine.override_transformer_config.recompute_granularity=full \
    engine.override_transformer_config.recompute_method=uniform \
    engine.override_transformer_config.recompute_num_layers=1 \
    +engine.override_transformer_config.moe_router_dtype=fp32 \
    +engine.override_transformer_config.moe_permute_fusion=True \
    +engine.override_transformer_config.moe_router_load_balancing_type=aux_loss \
    +engine.override_transformer_config.moe_aux_loss_coeff=0.001 \
    +engine.override_transformer_config.moe_z_loss_coeff=0.001 \
    +engine.override_transformer_config.calculate_per_token_loss=True \
    optim.lr=1e-5 \
    optim.betas='[0.9,0.95]' \
    optim.weight_decay=0.1 \
    optim.clip_grad=1.0 \
    optim.lr_warmup_steps_ratio=0.03 \
    optim.lr_decay_style=cosine \
    trainer.n_gpus_per_node="$N_GPUS_PER_NODE" \
    trainer.total_epochs=3 \
    trainer.test_freq=20 \
    trainer.save_freq=100 \
    trainer.max_ckpt_to_keep=2 \
    trainer.logger='[console,file]' \
    trainer.project_name=sft \
    trainer.experiment_name=moonlight_16b_a3b \
    trainer.default_local_dir="$OUT" \
    "$@"
