#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A short GRPO run on a small real model, at context parallel size 2, whose reward must rise. Needs two accelerators, and
# network unless the model and the data are local. The environment must exist (scripts/setup_env.sh).
#
#   bash scripts/nightly_grpo.sh [key=value ...]    further arguments go to the trainer
#
# Environment: NIGHTLY_MODEL  a model folder, or a name on the Hugging Face hub (default Qwen/Qwen2.5-0.5B-Instruct)
#              NIGHTLY_DATA   a folder with GSM8K's train and test files (default: the hub's openai/gsm8k)
#              NIGHTLY_OUT    folder to write (default outputs/nightly)
#              NIGHTLY_RISE   how much the mean score must rise (default 0.05)
#              PYTHON         interpreter (default: that of VERL_VENV, else .venv)
# Exit code 1: the reward did not rise. Any other: that of the step that failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-${VERL_VENV:-.venv}/bin/python}"
model="${NIGHTLY_MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
out="${NIGHTLY_OUT:-outputs/nightly}"
actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout

mkdir -p "$out"
rm -rf "$out/run" # metrics of an earlier run would be read as the start of this one
"$python" examples/data_preprocess/gsm8k.py --local_save_dir "$out/data" \
    ${NIGHTLY_DATA:+--local_dataset_path "$NIGHTLY_DATA"}
if [[ ! -d "$model" ]]; then
    "$python" -c 'import sys, huggingface_hub as hub; hub.snapshot_download(sys.argv[1], local_dir=sys.argv[2])' \
        "$model" "$out/model"
    model="$out/model"
fi

"$python" -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    "data.train_files=$out/data/train.parquet" \
    "data.val_files=$out/data/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=384 \
    data.filter_overlong_prompts=True \
    "actor_rollout_ref.model.path=$model" \
    $actor.megatron.context_parallel_size=2 \
    $actor.ppo_mini_batch_size=64 \
    $actor.use_dynamic_bsz=True \
    $actor.ppo_max_token_len_per_gpu=16384 \
    $actor.optim.lr=1e-6 \
    $rollout.name=hf \
    $rollout.n=8 \
    $rollout.temperature=1.0 \
    trainer.n_gpus_per_node=2 \
    trainer.nnodes=1 \
    trainer.total_training_steps=60 \
    trainer.val_before_train=False \
    trainer.test_freq=-1 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    'trainer.logger=[console,file]' \
    trainer.project_name=nightly \
    trainer.experiment_name=grpo \
    "trainer.default_local_dir=$out/run" \
    "$@"

"$python" scripts/check_reward_rise.py "$out/run/metrics.jsonl" --least "${NIGHTLY_RISE:-0.05}"
