# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which prompts stay, when more are drawn, and what the update is given."""

import copy

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.trainer.ppo.fakes import FakeWorkerGroup, make_trainer
from verl.protocol import DataProto
from verl.trainer.ppo.dynamic_sampling import fill_batch, loader_batch_size, mixed_groups
from verl.trainer.ppo.metric_utils import PhaseTimer


def make_batch(groups: dict[str, list[float]], **columns) -> DataProto:
    scores = torch.tensor([score for group in groups.values() for score in group])
    uids = [uid for uid, group in groups.items() for _ in group]
    tensors = {"token_level_scores": torch.stack([torch.zeros_like(scores), scores], dim=1)}
    non_tensors = {"uid": np.array(uids, dtype=object)} | {
        name: np.array(values, dtype=object) for name, values in columns.items()
    }
    return DataProto.from_dict(tensors, non_tensors=non_tensors)


def make_config(train=2, drawn=2, most=0, metric="seq_reward", enable=True):
    groups = {"enable": enable, "metric": metric, "max_num_gen_batches": most}
    return OmegaConf.create(
        {"algorithm": {"filter_groups": groups}, "data": {"train_batch_size": train, "gen_batch_size": drawn}}
    )


def run(config, batches, batches_in_data=100):
    """fill_batch on ready batches; the prompts are their numbers."""
    drawn = []

    def draw(rows, number):
        drawn.append(number)
        assert rows == number
        return copy.deepcopy(batches[number]), {"reward/num_timeouts": 1.0}

    batch, counts = fill_batch(draw, 0, iter(range(1, len(batches))), config, batches_in_data)
    return batch, counts, drawn


def test_groups_that_differ_in_the_metric_stay():
    batch = make_batch({"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [0.1, 0.1]}, acc=[1, 1, True, False, 0, 0])
    assert mixed_groups(batch, "seq_reward") == mixed_groups(batch, "seq_final_reward") == ["a"]
    assert mixed_groups(batch, "score") == ["a"]
    assert mixed_groups(batch, "acc") == ["b"]


def test_a_metric_that_is_not_there_or_not_a_number_is_named():
    batch = make_batch({"a": [0.0, 1.0]}, acc=[None, 1.0])
    with pytest.raises(ValueError, match="metric='accuracy' is not among .* uid, acc; use seq_reward"):
        mixed_groups(batch, "accuracy")
    with pytest.raises(ValueError, match="metric='acc' is None in row 0"):
        mixed_groups(batch, "acc")


def test_batches_are_drawn_until_enough_prompts_differ_and_the_excess_is_left_out():
    batches = [
        make_batch({"a": [0.0, 1.0], "b": [1.0, 1.0]}),
        make_batch({"c": [0.0, 0.0], "d": [1.0, 1.0]}),
        make_batch({"e": [0.0, 1.0], "f": [1.0, 0.0]}, why=["x", "y", "x", "y"]),
        make_batch({"never": [0.0, 1.0]}),
    ]
    batch, counts, drawn = run(make_config(), batches)
    assert drawn == [0, 1, 2]
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "e", "e"]
    assert batch.batch["token_level_scores"][:, 1].tolist() == [0, 1, 0, 1]
    assert batch.non_tensor_batch["why"].tolist() == [None, None, "x", "y"]
    assert counts == {
        "reward/num_timeouts": 3.0,
        "train/num_gen_batches": 3.0,
        "train/mixed_groups_share": 0.5,
        "train/score_before_filter": pytest.approx((1 + 2 + 0 + 2 + 1 + 1) / 12),
    }


def test_without_the_filter_one_batch_is_taken_as_it_is():
    batches = [make_batch({"a": [0.0, 0.0], "b": [1.0, 1.0]})]
    batch, counts, drawn = run(make_config(enable=False, drawn=7), batches)
    assert (len(batch), drawn, counts) == (4, [0], {"reward/num_timeouts": 1.0})
    assert loader_batch_size(make_config(enable=False, drawn=7)) == 2
    assert loader_batch_size(make_config(drawn=7)) == 7
    assert loader_batch_size(OmegaConf.create({"algorithm": {}, "data": {"train_batch_size": 3}})) == 3


def test_too_few_within_the_limit_names_numbers_that_would_do():
    batches = [make_batch({f"a{i}": [0.0, 1.0], f"b{i}": [1.0, 1.0]}) for i in range(9)]
    with pytest.raises(ValueError) as caught:
        run(make_config(train=4, most=2), batches)
    for part in ("2 batches of data.gen_batch_size=2", "gave 2 prompts", "would have to be 4", "at most 2"):
        assert part in str(caught.value)
    # The number it names is enough.
    assert len(run(make_config(train=4, most=4), batches)[0]) == 8


def test_data_without_any_mixed_prompt_end_the_run_after_one_pass():
    batches = [make_batch({f"a{i}": [1.0, 1.0]}) for i in range(9)]
    with pytest.raises(ValueError, match="3 batches .* too easy or too hard"):
        run(make_config(), batches, batches_in_data=3)


class LuckyPrompts(FakeWorkerGroup):
    """Answers prompts with an even first token with three tokens each, so that their groups do not differ."""

    def generate_sequences(self, prompts):
        output = super().generate_sequences(prompts)
        even = prompts.batch["input_ids"][:, 2] % 2 == 0
        output.batch["response_mask"][even] = 1
        output.batch["responses"][even] = 7
        output.batch["attention_mask"][even, -3:] = 1
        return output


def test_the_trainer_updates_on_full_batches_of_mixed_prompts(tmp_path):
    changes = {
        "algorithm.filter_groups": {"enable": True, "metric": "seq_reward", "max_num_gen_batches": 0},
        "data.gen_batch_size": 3,
    }
    trainer = make_trainer(tmp_path, rows=20, group=LuckyPrompts(), **changes)
    batch, metrics = trainer.training_step(next(batches := iter(trainer.train_dataloader)), PhaseTimer(), batches)
    update = trainer.actor_rollout_wg.updates[0]
    first_tokens = update["prompts"][:, 2]
    assert len(first_tokens) == 12 and len(set(first_tokens.tolist())) == 4
    assert (first_tokens % 2 == 1).all()
    assert len(set(batch.non_tensor_batch["uid"])) == 4
    assert metrics["train/num_gen_batches"] == trainer.actor_rollout_wg.calls.count("generate_sequences") >= 2
    assert update["advantages"].abs().sum(-1).gt(0).sum() == 8  # of scores 1, 2, 3 the middle one has advantage 0
    assert trainer.train_dataloader.state_dict()["position"] == metrics["train/num_gen_batches"]
