# SPDX-License-Identifier: Apache-2.0
"""Which config keys are refused away from their default, which have no effect, and which were moved.

The rule: a key that would change results and is not supported is refused by name. One that only tunes speed or memory
is accepted, so that verl's scripts run, and named in one log line when it is set.
"""

from collections.abc import Mapping
from typing import Any

from verl.utils.device import DEVICE_NAMES
from verl.workers.config.names import NPU_FIELDS
from verl.workers.config.reward import REWARD_MANAGERS

ENGINES = {"ppo_trainer": ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron")}

# Key below a node -> (the only value that is supported, what to do instead).
ENGINE_REFUSED = {
    "use_megatron_fsdp": (False, "use_distributed_optimizer=True shards the optimizer's state"),
    "override_mcore_model_config": ({}, "put the model's fields in override_transformer_config"),
    "router_replay.mode": ("disabled", "recorded expert choices are not replayed"),
}

ENGINE_NO_EFFECT = {
    "grad_offload": "gradients go with param_offload",
    "use_mbridge": "weights always go through megatron-bridge",
    "vanilla_mbridge": "weights always go through megatron-bridge",
    "dist_checkpointing_path": "read while use_dist_checkpointing=True; else the weights are those in model.path",
    **{f"override_transformer_config.{name}": "megatron-core for Ascend NPUs reads it" for name in NPU_FIELDS},
}


def engine_no_effect(engine: Mapping[str, Any]) -> dict[str, str]:
    """The keys of an engine's node that nothing reads, with the reason; one of them is read if another says so."""
    is_read = engine["use_dist_checkpointing"]
    return {key: why for key, why in ENGINE_NO_EFFECT.items() if not (is_read and key == "dist_checkpointing_path")}


MODEL_REFUSED = {
    "lora.rank": (0, "low-rank adapters are not supported"),
    "mtp.enable_rollout": (False, "the rollout does not draft with multi-token prediction layers"),
}

MODEL_NO_EFFECT = {
    "use_fused_kernels": "log-probs are computed in chunks of tokens, without a fused kernel",
    "enable_gradient_checkpointing": "set recomputation by override_transformer_config.recompute_*",
}

CRITIC_MODEL_REFUSED = {
    "lora.rank": (0, "low-rank adapters are not supported"),
    "mtp.enable": (False, "a value model predicts no tokens"),
}

CHECKPOINT_REFUSED = {"async_save": (False, "checkpoints are written before training goes on")}

PPO_REFUSED: dict[str, tuple[Any, str]] = {
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": (False, "expert choices are not recorded"),
    "reward_model.enable": (False, "rewards come from functions; set reward.custom_reward_function.path"),
    "reward_model.reward_manager": (None, "the key is reward.reward_manager.name"),
    "reward_model.reward_kwargs": ({}, "the key is reward.reward_kwargs"),
    "custom_reward_function.path": (None, "the key is reward.custom_reward_function.path"),
    "custom_reward_function.name": (None, "the key is reward.custom_reward_function.name"),
}

_CONSTANT_DECAY = "weight decay is the same at the first step and at the last"

PPO_NO_EFFECT = {
    "actor_rollout_ref.actor.optim.weight_decay_incr_style": _CONSTANT_DECAY,
    "critic.optim.weight_decay_incr_style": _CONSTANT_DECAY,
    "actor_rollout_ref.actor.use_torch_compile": "nothing is compiled",
    "actor_rollout_ref.ref.use_torch_compile": "nothing is compiled",
    "actor_rollout_ref.actor.checkpoint.strict": "megatron-core checks the keys it is asked for",
    "critic.checkpoint.strict": "megatron-core checks the keys it is asked for",
    "trainer.use_legacy_worker_impl": "there is one kind of worker",
    "data.return_raw_chat": "the chat messages are always kept",
    "data.filter_overlong_prompts_workers": "one process drops long prompts",
}

# Keys below actor_rollout_ref.rollout that only a rollout server reads.
ROLLOUT_SERVER_ONLY = (
    "mode",
    "load_format",
    "gpu_memory_utilization",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "engine_kwargs",
    "checkpoint_engine.update_weights_bucket_megabytes",
)

SFT_NO_EFFECT = {
    "optim.weight_decay_incr_style": _CONSTANT_DECAY,
    "data.ignore_input_ids_mismatch": "a conversation is always templated as a whole",
    "checkpoint.strict": "megatron-core checks the keys it is asked for",
}

SFT_REFUSED = {"data.pad_mode": ("no_padding", "rows are packed without padding")}

# Why there is nothing in place of these keys and groups -> their last parts.
_NOT_HERE = {
    "one response is sampled to each prompt, without tools": "multi_turn agent",
    "there is no rollout server": "disable_log_stats layered_summon_param cudagraph_capture_sizes prometheus "
    "skip_rollout",
    "a response ends with its end-of-sequence token": "ignore_eos",
    "nothing is profiled": "profiler global_profiler profile_steps",
    "log-probs and entropy are computed in chunks of tokens": "entropy_from_logits_with_chunking entropy_checkpointing "
    "fused_kernel_options",
    "low-rank adapters are not supported": "lora_rank lora_alpha target_modules exclude_modules",
    "weights are always read from model.path": "load_weight",
    "the model is read from its folder": "use_shm",
    "nothing reads it": "return_raw_input_ids return_full_prompt use_fire_sampling esi_redundant_time "
    "del_local_ckpt_after_load",
    "the layers are megatron-core's": "use_liger",
    "actor and rollout always share their processes": "hybrid_engine",
    "responses are not resampled by reward": "use_pf_ppo pf_ppo",
    "images and videos are not supported": "image_key video_key",
    "rows are read from data files, in order or shuffled": "custom_cls datagen sampler",
    "batches go through Ray": "transfer_queue",
}

# Full key, group, or last part of either -> advice; {parent} is the group the key was written in.
MOVED = {
    "trainer.max_ckpt_to_keep": "use trainer.max_actor_ckpt_to_keep and trainer.max_critic_ckpt_to_keep",
    "trainer.max_actor_ckpt_to_keep": "use trainer.max_ckpt_to_keep",
    "actor_rollout_ref.actor.model_engine": "use model_engine, at the top",
    "ppo_micro_batch_size": "use {parent}.ppo_micro_batch_size_per_gpu, which counts on one rank",
    "log_prob_micro_batch_size": "use {parent}.log_prob_micro_batch_size_per_gpu, which counts on one rank",
    "grad_clip": "use {parent}.optim.clip_grad",
    "fsdp_config": "model_engine=megatron takes its layout from {parent}.megatron",
    "ulysses_sequence_parallel_size": "use {parent}.megatron.context_parallel_size",
    "critic.model.fsdp_config": "model_engine=megatron takes its layout from critic.megatron",
    "reward_model.overlong_buffer": "use reward.reward_manager.name=dapo with "
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True, and .len and .penalty_factor beside it",
    "reward_model.reward_kwargs": "use reward.reward_kwargs",
    "reward_model": "there are no model-based rewards; score with a function, reward.custom_reward_function.path",
    "warmup_style": "use {parent}.lr_decay_style",
    "min_lr_ratio": "use {parent}.min_lr, a rate and no ratio",
    "contents": "use {parent}.save_contents and {parent}.load_contents",
    "data.tokenizer": "use actor_rollout_ref.model.tokenizer_path",
    "tis_imp_ratio_cap": "use algorithm.rollout_correction.rollout_is=token and .rollout_is_threshold",
    "forward_micro_batch_size_per_gpu": "use {parent}.ppo_micro_batch_size_per_gpu, which cuts both passes",
    "forward_max_token_len_per_gpu": "use {parent}.ppo_infer_max_token_len_per_gpu",
    "remove_previous_ckpt_in_save": "use trainer.max_actor_ckpt_to_keep=1",
    "default_hdfs_dir": "use trainer.default_local_dir, which may lie on a mounted file system",
    "rollout_data_dir": "leave it out; trainer.log_val_generations logs responses of the validation",
    "validation_data_dir": "leave it out; trainer.log_val_generations logs responses of the validation",
    "external_lib": "write module:function where the name of an estimator or loss goes (docs/algorithms.md)",
    "enable_activation_offload": "leave it out; recompute by override_transformer_config.recompute_granularity=full",
    **{name: f"leave it out: {why}" for why, names in _NOT_HERE.items() for name in names.split()},
}

# Keys that only these estimators read.
READ_BY_ESTIMATORS = {"algorithm.gamma": ("gae", "reinforce_plus_plus"), "algorithm.lam": ("gae",)}

# Estimators that read the values of a critic.
NEEDS_CRITIC = ("gae",)

# Keys that must be whole numbers of at least 1; null is allowed where the default is null.
AT_LEAST_ONE = {
    "ppo_trainer": (
        "data.train_batch_size",
        "data.gen_batch_size",
        "data.val_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "data.filter_overlong_prompts_workers",
        "actor_rollout_ref.nccl_timeout",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.ray_wait_register_center_timeout",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
    ),
    "generation": ("data.n_samples", "data.batch_size", "trainer.nnodes", "trainer.n_gpus_per_node"),
    "sft_trainer_engine": (
        "data.train_batch_size",
        "data.micro_batch_size_per_gpu",
        "data.max_token_len_per_gpu",
        "data.max_length",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.max_ckpt_to_keep",
    ),
}

# Keys that take one of a few words.
ONE_OF = {
    "ppo_trainer": {
        "actor_rollout_ref.rollout.name": ("hf",),
        "data.truncation": ("error", "left", "right", "middle"),
        "reward.reward_manager.name": REWARD_MANAGERS,
        "trainer.device": (None, *DEVICE_NAMES),
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
    },
    "generation": {
        "rollout.name": ("hf",),
        "data.truncation": ("error", "left", "right", "middle"),
        "trainer.device": (None, *DEVICE_NAMES),
    },
    "evaluation": {},
    "sft_trainer_engine": {
        "data.truncation": ("error", "left", "right", "middle"),
        "trainer.device": (None, *DEVICE_NAMES),
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
    },
}

_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")

# Keys that something is divided by, or that are multiplied into such a number.
DIVISORS = {
    "ppo_trainer": (
        *AT_LEAST_ONE["ppo_trainer"],
        *(f"actor_rollout_ref.actor.megatron.{name}_parallel_size" for name in _SIZES),
        *(f"critic.megatron.{name}_parallel_size" for name in _SIZES),
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.rollout.n",
        "critic.ppo_mini_batch_size",
    ),
    "sft_trainer_engine": (
        *AT_LEAST_ONE["sft_trainer_engine"],
        *(f"engine.{name}_parallel_size" for name in _SIZES),
    ),
}

LOGGERS = ("console", "tensorboard", "file", "wandb")

# Fields of the transformer that belong to the layout and are set beside override_transformer_config.
LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
