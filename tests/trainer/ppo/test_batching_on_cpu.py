# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import verl.utils.tensordict_utils as tu
from tests.trainer.ppo.fakes import Prompts, collate
from verl.protocol import DataProto
from verl.trainer.ppo.batching import dp_row_order, model_batch, prompt_batch, token_imbalance
from verl.utils.jagged import make_jagged
from verl.workers.engine.utils import restore_order, split_micro_batches
from verl.workers.utils.padding import no_padding_2_padding


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


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_per_token_output_is_back_in_its_place_after_balancing_and_micro_batches(dp_size):
    # Every token's id is its own; the "model" predicts at each position the id of the next token.
    rows, prompt_width, width, budget = 16, 5, 9, 30
    generator = torch.Generator().manual_seed(1)
    prompt_lengths = torch.randint(1, prompt_width + 1, (rows, 1), generator=generator)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    response_mask = (torch.arange(width) < lengths).long()
    attention = torch.cat([(torch.arange(prompt_width) >= prompt_width - prompt_lengths).long(), response_mask], dim=1)
    ids = (1 + torch.arange(rows * (prompt_width + width)).reshape(rows, -1)) * attention
    batch = DataProto.from_dict(
        {
            "prompts": ids[:, :prompt_width],
            "responses": ids[:, prompt_width:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
        }
    )
    batch.reorder(dp_row_order(attention.sum(-1).tolist(), dp_size, 8, balance=True))
    data = tu.assign_non_tensor(model_batch(batch), use_dynamic_bsz=True, max_token_len_per_gpu=budget)
    outputs = []
    for piece in tu.chunk_tensordict(data, dp_size):
        parts, indices = split_micro_batches(piece, None)
        assert all(part["input_ids"].values().numel() <= budget for part in parts)
        assert len(parts) > 1
        predicted = [make_jagged(ids.values().roll(-1), ids.offsets()) for ids in (part["input_ids"] for part in parts)]
        outputs.append(no_padding_2_padding(restore_order(predicted, indices), piece))
    assert torch.equal(torch.cat(outputs), batch.batch["responses"])
