# SPDX-License-Identifier: Apache-2.0
"""What the loop does with a critic: calls, settings, warm-up, checkpoints."""

import os

import pytest
import torch
from tensordict import TensorDict

import verl.utils.tensordict_utils as tu
from tests.trainer.ppo.fakes import FakeWorkerGroup, make_trainer
from verl.trainer.ppo.metric_utils import PhaseTimer, compute_data_metrics


class FakeCritic:
    """Values are 0.5 on every response token; shares the actor's list of calls."""

    def __init__(self, calls):
        self.calls = calls
        self.updates, self.inferences = [], []

    def compute_values(self, data):
        self.calls.append("compute_values")
        self.inferences.append(data.copy())
        assert "old_log_probs" not in data.keys()
        return TensorDict({"values": 0.5 * data["response_mask"].float()}, batch_size=data.batch_size)

    def update_critic(self, data):
        self.calls.append("update_critic")
        self.updates.append(data.copy())
        return tu.assign_non_tensor(TensorDict({}, batch_size=[0]), metrics={"critic/grad_norm": 3.0})

    def save_checkpoint(self, path, global_step=0):
        os.makedirs(path)
        open(os.path.join(path, "weights"), "w").write(f"critic {global_step}")

    def export_hf(self, path):
        os.makedirs(path)

    def load_checkpoint(self, path):
        self.calls.append(("load", open(os.path.join(path, "weights")).read()))


CRITIC = {
    "critic": {
        "enable": None,
        "ppo_mini_batch_size": 4,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": 444,
        "ppo_infer_max_token_len_per_gpu": 555,
        "ppo_micro_batch_size_per_gpu": 6,
        "ppo_epochs": 2,
        "shuffle": True,
        "data_loader_seed": 7,
        "checkpoint": {"save_contents": ["model", "hf_model"]},
        "optim": {
            "total_training_steps": -1,
            "lr_warmup_steps": -1,
            "lr_decay_steps": None,
            "lr_decay_style": "constant",
        },
    }
}


def critic_trainer(folder, **changes):
    settings = {"algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0, **CRITIC, **changes}
    trainer = make_trainer(folder, group=FakeWorkerGroup(), **settings)
    if trainer.use_critic:
        trainer.critic_wg = FakeCritic(trainer.actor_rollout_wg.calls)
    return trainer


def step(trainer):
    return trainer.training_step(next(iter(trainer.train_dataloader)), PhaseTimer())


def test_values_come_before_the_advantages_and_the_critic_is_updated_before_the_actor(tmp_path):
    trainer = critic_trainer(tmp_path)
    timer = PhaseTimer()
    batch, metrics = trainer.training_step(next(iter(trainer.train_dataloader)), timer)
    assert trainer.actor_rollout_wg.calls == [
        "generate_sequences",
        "compute_log_prob",
        "compute_values",
        "update_critic",
        "update_actor",
        "update_weights",
    ]
    assert {"values", "update_critic"} <= timer.seconds.keys()
    assert metrics["critic/grad_norm"] == 3.0 and metrics["actor/grad_norm"] == 2.0
    update, actor_update = trainer.critic_wg.updates[0], trainer.actor_rollout_wg.updates[0]
    mask = update["response_mask"].bool()
    # Without discount every token's return is the row's score.
    scores = batch.batch["token_level_scores"].sum(-1, keepdim=True).expand(mask.shape)
    assert torch.allclose(update["returns"][mask], scores[mask])
    assert torch.equal(update["values"], 0.5 * mask.float())
    assert "values" not in actor_update.keys() and "returns" not in actor_update.keys()
    assert torch.equal(update["input_ids"].values(), actor_update["input_ids"].values())
    numbers = compute_data_metrics(batch)
    assert numbers["critic/values/mean"] == 0.5
    assert numbers["critic/vf_explained_var"] == pytest.approx(0.0)  # a constant explains nothing


def test_the_critic_has_its_own_batch_sizes_and_budgets(tmp_path):
    trainer = critic_trainer(tmp_path, **{"trainer.n_gpus_per_node": 2})
    step(trainer)
    infer, update = trainer.critic_wg.inferences[0], trainer.critic_wg.updates[0]
    assert (tu.get(infer, "max_token_len_per_gpu"), tu.get(update, "max_token_len_per_gpu")) == (555, 444)
    for data in (infer, update):
        assert tu.get(data, "use_dynamic_bsz") is True and tu.get(data, "micro_batch_size_per_gpu") == 6
    assert tu.get(update, "mini_batch_size") == 12 and tu.get(update, "epochs") == 2 and tu.get(update, "seed") == 7
    assert tu.get(update, "dataloader_kwargs") == {"shuffle": True}
    actor_update = trainer.actor_rollout_wg.updates[0]
    assert tu.get(actor_update, "mini_batch_size") == 6 and tu.get(actor_update, "max_token_len_per_gpu") == 222


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_mini_batches_of_both_hold_the_same_prompts_whatever_the_number_of_ranks(tmp_path, sizes):
    def prompts_of_first_mini_batch(dp_size):
        changes = {"actor_rollout_ref.actor.ppo_mini_batch_size": sizes[0], "trainer.n_gpus_per_node": dp_size}
        trainer = critic_trainer(tmp_path, **changes)
        trainer.config.critic.ppo_mini_batch_size = sizes[1]
        trainer.critic_mini_batch_rows = sizes[1] * 3
        step(trainer)
        found = []
        for update in (trainer.actor_rollout_wg.updates[0], trainer.critic_wg.updates[0]):
            ranks = update["prompts"][:, 2].reshape(dp_size, -1)
            size = tu.get(update, "mini_batch_size") // dp_size
            found.append(sorted(ranks[:, :size].flatten().tolist()))
        return found

    expected = prompts_of_first_mini_batch(1)
    assert [len(set(prompts)) for prompts in expected] == list(sizes)
    assert prompts_of_first_mini_batch(2) == expected
    assert prompts_of_first_mini_batch(3) == expected


def test_only_the_critic_is_trained_in_the_warm_up(tmp_path):
    trainer = critic_trainer(tmp_path, **{"trainer.critic_warmup": 2, "trainer.total_training_steps": 4})
    trainer.config.trainer.total_epochs = 2
    metrics = trainer.fit()
    updates = [call[7] for call in trainer.actor_rollout_wg.calls if str(call).startswith("update_")]
    assert "".join(updates) == "w" + "cc" + "caw" * 2  # the rollout gets its first weights before all steps
    assert metrics["actor/grad_norm"] == 2.0 and "timing_s/update_critic" in metrics
    assert trainer.config.critic.optim.total_training_steps == 4
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 2  # its own updates


def test_the_actors_warm_up_must_end_within_its_own_updates(tmp_path):
    optim = "actor_rollout_ref.actor.optim"
    changes = {"trainer.total_training_steps": 4, f"{optim}.lr_decay_style": "linear", f"{optim}.lr_warmup_steps": 2}
    critic_trainer(tmp_path, **changes, **{"trainer.critic_warmup": 1})
    with pytest.raises(ValueError, match=r"actor.optim.lr_warmup_steps=2 must be below the schedule's 2 steps"):
        critic_trainer(tmp_path, **changes, **{"trainer.critic_warmup": 2})


def test_the_critic_goes_into_checkpoints_and_comes_back(tmp_path):
    settings = {"trainer.save_freq": 1, "trainer.total_epochs": 2, "trainer.max_critic_ckpt_to_keep": 1}
    critic_trainer(tmp_path, **settings, **{"trainer.total_training_steps": 2}).fit()
    assert (tmp_path / "global_step_2/critic/huggingface").is_dir()
    assert not (tmp_path / "global_step_2/actor/huggingface").exists()
    assert (tmp_path / "global_step_1/actor/weights").exists() and not (tmp_path / "global_step_1/critic").exists()
    resumed = critic_trainer(tmp_path, **settings, **{"trainer.total_training_steps": 3})
    resumed.fit()
    assert {("load", "2"), ("load", "critic 2")} <= set(map(tuple, filter(_is_load, resumed.actor_rollout_wg.calls)))
    source = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "global_step_1")}
    with pytest.raises(ValueError, match="global_step_1 holds no critic"):
        critic_trainer(tmp_path, **settings, **source).fit()


def _is_load(call):
    return isinstance(call, tuple)


def test_there_is_a_critic_if_asked_for_or_needed(tmp_path):
    assert critic_trainer(tmp_path).use_critic
    assert not critic_trainer(tmp_path, **{"algorithm.adv_estimator": "grpo"}).use_critic
    asked = critic_trainer(tmp_path, **{"algorithm.adv_estimator": "grpo", "critic.enable": True})
    assert asked.use_critic
    batch, _ = step(asked)
    assert asked.actor_rollout_wg.calls.count("update_critic") == 1 and "returns" in batch.batch.keys()


def test_explained_variance_is_one_for_right_values(tmp_path):
    trainer = critic_trainer(tmp_path)
    batch, _ = step(trainer)
    batch.batch["values"] = batch.batch["returns"].clone()
    assert compute_data_metrics(batch)["critic/vf_explained_var"] == 1.0
    batch.batch["returns"] = torch.ones_like(batch.batch["returns"])
    assert compute_data_metrics(batch)["critic/vf_explained_var"] == 0.0
