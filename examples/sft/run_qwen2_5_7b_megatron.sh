#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Supervised fine-tuning: Qwen2.5-7B-Instruct on the worked answers of GSM8K.
#
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/sft/run_qwen2_5_7b_megatron.sh
#   bash examples/sft/run_qwen2_5_7b_megatron.sh trainer.dry_run=True   what it would do, without a GPU
#
# GPUs:   8 of 80 GB (one machine)
# Layout: TP=2 x CP=2 x DP=2; a micro-batch holds up to 2 x 8192 tokens, half of each conversation on either context
#         rank
# Regime: calculate_per_token_loss off, as by default; with it on the gradient is the same
# Memory: 49.6 GiB a GPU at most, while a checkpoint is saved: an estimate of the dry run, not measured on a GPU.
#         Without the CUDA context, NCCL's buffers and fragmentation
# Curve:  not measured
#
# Environment, with its default (paths are relative to the repository); further key=value arguments win:
#   MODEL_PATH       folder of the model, or its name on the Hugging Face hub (Qwen/Qwen2.5-7B-Instruct)
#   TRAIN_FILES      training rows ($HOME/data/gsm8k/sft_train.parquet)
#   VAL_FILES        held-out rows ($HOME/data/gsm8k/sft_test.parquet)
#   N_GPUS_PER_NODE  GPUs of this machine (8)
#   OUT              checkpoints and metrics (checkpoints/sft_qwen2_5_7b)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
TRAIN_FILES="${TRAIN_FILES:-$HOME/data/gsm8k/sft_train.parquet}"
VAL_FILES="${VAL_FILES:-$HOME/data/gsm8k/sft_test.parquet}"
N_GPUS_PER_NODE="${N_GPUS_PER_NODE:-8}"
OUT="${OUT:-checkpoints/sft_qwen2_5_7b}"

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
    engine.tensor_model_parallel_size=2 \
    engine.pipeline_model_parallel_size=1 \
    engine.context_parallel_size=2 \
    engine.override_transformer_config.recompute_granularity=full \
    engine.override_transformer_config.recompute_method=uniform \
    engine.override_transformer_config.recompute_num_layers=1 \
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
    trainer.experiment_name=qwen2_5_7b \
    trainer.default_local_dir="$OUT" \
    "$@"
