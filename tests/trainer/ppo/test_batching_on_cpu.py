# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tests.trainer.ppo.fakes import Prompts, collate
from verl.trainer.ppo.batching import dp_row_order, prompt_batch, token_imbalance


def test_samples_of_a_prompt_are_neighbours_with_one_uid():
    batch = prompt_batch(collate([Prompts(4)[i] for i in range(2)]), n=3, uid_prefix="7")
    assert batch.batch["input_ids"][:, 2].tolist() == [10] * 3 + [11] * 3
    assert batch.non_tensor_batch["uid"].tolist() == ["7-0"] * 3 + ["7-1"] * 3
    assert batch.non_tensor_batch["reward_model"][4] == {"ground_truth": "1"}


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_mini_batch_keeps_its_rows(dp_size, balance):
    lengths = torch.randint(1, 50, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    order = dp_row_order(lengths, dp_size, 8, balance)
    assert sorted(order) == list(range(24))
    parts = torch.tensor(order).reshape(dp_size, 24 // dp_size)
    for k, mini_batch in enumerate(parts.split(8 // dp_size, dim=1)):
        assert sorted(mini_batch.flatten().tolist()) == list(range(8 * k, 8 * k + 8))


def test_balancing_evens_out_the_tokens():
    lengths = [100, 100, 100, 100, 1, 1, 1, 1]
    uneven = token_imbalance(lengths, dp_row_order(lengths, 2, 8, balance=False), 2)
    even = token_imbalance(lengths, dp_row_order(lengths, 2, 8, balance=True), 2)
    assert uneven == {"global_seqlen/balanced_max": 400, "global_seqlen/balanced_min": 4, "global_seqlen/mean": 202}
    assert even["global_seqlen/balanced_max"] == even["global_seqlen/balanced_min"] == 202
