# SPDX-License-Identifier: Apache-2.0
"""A worker group without workers, and a trainer built on it: what the loop does can be watched call by call."""

import os
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import verl.utils.tensordict_utils as tu
from verl.protocol import DataProto

REPO_ROOT = Path(__file__).resolve().parents[3]
RESPONSE_WIDTH, EOS, PAD = 3, 1, 0


class Prompts(torch.utils.data.Dataset):
    """Row i is a left-padded prompt of 2 tokens, the first of which is 10 + i."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        mask = torch.tensor([0, 0, 1, 1])
        return {
            "input_ids": torch.tensor([PAD, PAD, 10 + i, 5]),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
            "data_source": "fake",
            "reward_model": {"ground_truth": str(i)},
        }


def collate(rows):
    batch = {k: torch.stack([r[k] for r in rows]) for k in ("input_ids", "attention_mask", "position_ids")}
    for key in ("data_source", "reward_model"):
        batch[key] = np.empty(len(rows), dtype=object)
        batch[key][:] = [r[key] for r in rows]
    return batch


class Tokenizer:
    eos_token_id, pad_token_id = EOS, PAD

    def batch_decode(self, rows, skip_special_tokens=True):
        return [" ".join(map(str, row)) for row in rows]


def reward_fn(data, return_dict=True):
    """Score of a response: its number of trained tokens, at the last of them; "acc" is 1 for length 3."""
    mask = data.batch["response_mask"]
    lengths = mask.sum(-1)
    reward = torch.zeros(mask.shape)
    reward[torch.arange(len(mask)), lengths - 1] = lengths.float()
    return {"reward_tensor": reward, "reward_extra_info": {"acc": (lengths == 3).float().tolist()}}


def startable(method):
    """What a worker group makes of a method: it has ``start``, and calling what that returns gives the result."""

    def call(*args, **kwargs):
        return method(*args, **kwargs)

    def start(*args, **kwargs):
        result = method(*args, **kwargs)
        return lambda: result

    call.start = start
    return call


class FakeWorkerGroup:
    """Answers row i (of what it is given) with 1 + i % 3 tokens; log-probs are -1, those of the reference -1.5."""

    def __init__(self, world_size=2):
        self.world_size = world_size
        self.calls = []
        self.updates = []
        self.fail_on_save = False
        for name in ("update_weights", "compute_log_prob", "compute_ref_log_prob", "update_actor"):
            setattr(self, name, startable(getattr(self, name)))

    def update_weights(self, global_steps=None):
        self.calls.append("update_weights")
        return [0.0] * self.world_size

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        assert len(prompts) % self.world_size == 0
        assert set(prompts.non_tensor_batch) == set()
        self.calls.append("validate" if prompts.meta_info["validate"] else "generate_sequences")
        rows = len(prompts)
        lengths = 1 + torch.arange(rows) % 3
        mask = (torch.arange(RESPONSE_WIDTH) < lengths[:, None]).long()
        responses = torch.where(mask.bool(), 7, PAD)
        old = prompts.batch
        attention = torch.cat([old["attention_mask"], mask], 1)
        return DataProto.from_dict(
            {
                "prompts": old["input_ids"],
                "responses": responses,
                "input_ids": torch.cat([old["input_ids"], responses], 1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "response_mask": mask,
            },
            meta_info={"timing": {"generate_sequences": 0.0}},
        )

    def _columns(self, data: TensorDict, call: str):
        assert data["input_ids"].is_nested and data["input_ids"].shape[0] == data["response_mask"].shape[0]
        assert tu.get(data, "temperature") == 1.0
        self.calls.append(call)

    def compute_log_prob(self, data):
        self._columns(data, "compute_log_prob")
        assert tu.get(data, "max_token_len_per_gpu") == 111
        mask = data["response_mask"].float()
        return TensorDict({"old_log_probs": -mask, "entropys": 0.5 * mask}, batch_size=data.batch_size)

    def compute_ref_log_prob(self, data):
        self._columns(data, "compute_ref_log_prob")
        return TensorDict({"ref_log_prob": -1.5 * data["response_mask"].float()}, batch_size=data.batch_size)

    def update_actor(self, data):
        self._columns(data, "update_actor")
        self.updates.append(data.copy())
        output = TensorDict({}, batch_size=data.batch_size)
        return tu.assign_non_tensor(output, metrics={"actor/grad_norm": 2.0, "worker_seconds": 0.0})

    def save_checkpoint(self, path, global_step=0):
        os.makedirs(path)
        open(os.path.join(path, "weights"), "w").write(str(global_step))
        if self.fail_on_save:
            raise OSError("disk full")

    def export_hf(self, path):
        os.makedirs(path)

    def load_checkpoint(self, path):
        self.calls.append(("load", open(os.path.join(path, "weights")).read()))


def worker_config():
    return {
        "actor": {
            "megatron": {
                "tensor_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "context_parallel_size": 1,
            },
            "optim": {
                "total_training_steps": -1,
                "lr_warmup_steps": -1,
                "lr_decay_steps": None,
                "lr_decay_style": "constant",
            },
            "checkpoint": {"save_contents": ["model", "optimizer", "extra"]},
            "ppo_mini_batch_size": 2,
            "ppo_epochs": 1,
            "use_kl_loss": False,
            "entropy_coeff": 0,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 222,
            "ppo_micro_batch_size_per_gpu": None,
            "data_loader_seed": 42,
            "shuffle": False,
        },
        "rollout": {
            "n": 3,
            "temperature": 1.0,
            "val_kwargs": {"n": 1},
            "log_prob_use_dynamic_bsz": True,
            "log_prob_max_token_len_per_gpu": 111,
            "log_prob_micro_batch_size_per_gpu": None,
        },
        "ref": {
            "log_prob_use_dynamic_bsz": True,
            "log_prob_max_token_len_per_gpu": 333,
            "log_prob_micro_batch_size_per_gpu": None,
        },
    }


def make_config(folder, **changes):
    config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "grpo",
                "norm_adv_by_std_in_grpo": True,
                "use_kl_in_reward": False,
                "kl_penalty": "kl",
                "kl_ctrl": {"type": "fixed", "kl_coef": 0.1},
            },
            "data": {
                "train_batch_size": 4,
                "val_batch_size": None,
                "shuffle": True,
                "seed": None,
                "dataloader_num_workers": 0,
                "validation_shuffle": False,
            },
            "trainer": {
                "project_name": "p",
                "experiment_name": "e",
                "logger": [],
                "default_local_dir": str(folder),
                "total_epochs": 1,
                "total_training_steps": None,
                "n_gpus_per_node": 2,
                "nnodes": 1,
                "balance_batch": True,
                "save_freq": -1,
                "test_freq": -1,
                "val_before_train": False,
                "val_only": False,
                "log_val_generations": 0,
                "resume_mode": "auto",
                "resume_from_path": None,
                "max_actor_ckpt_to_keep": None,
                "max_critic_ckpt_to_keep": None,
                "critic_warmup": 0,
            },
            "critic": {"enable": None},
            "actor_rollout_ref": worker_config(),
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return config


def make_trainer(folder, rows=10, group=None, **changes):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = RayPPOTrainer(
        config=make_config(folder, **changes),
        tokenizer=Tokenizer(),
        role_worker_mapping={},
        resource_pool_manager=None,
        reward_fn=reward_fn,
        val_reward_fn=reward_fn,
        train_dataset=Prompts(rows),
        val_dataset=Prompts(3),
        collate_fn=collate,
    )
    trainer.actor_rollout_wg = group or FakeWorkerGroup()
    return trainer
