# SPDX-License-Identifier: Apache-2.0
"""Counts of a step, factors of both regimes, and the two guards."""

import pytest
import torch
from tensordict import TensorDict

from tests.utils_dist import run_world
from verl.workers.engine.megatron.loss_scale import (
    LossScale,
    _routed_num_tokens,
    check_per_token_loss_guards,
    count_step,
)


def jagged(*lengths: int) -> torch.Tensor:
    rows = [torch.arange(1, n + 1) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def sft_batch(*lengths: int) -> TensorDict:
    """Every token after the first of a sequence is a target."""
    ids = jagged(*lengths)
    mask = torch.nested.nested_tensor_from_jagged(torch.ones_like(ids.values()), offsets=ids.offsets())
    return TensorDict({"input_ids": ids, "loss_mask": mask}, batch_size=[len(lengths)])


def test_routed_tokens_come_from_the_attention_mask_the_offsets_or_all_ids() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    masked = TensorDict({"input_ids": jagged(9, 9), "attention_mask": mask}, batch_size=[2])
    assert _routed_num_tokens(masked).item() == 5
    masked["response_mask"] = torch.zeros(2, 2)  # what is trained has no say
    assert _routed_num_tokens(masked).item() == 5
    nested = TensorDict({"input_ids": jagged(9, 9), "attention_mask": jagged(3, 4).clamp(max=1)}, batch_size=[2])
    assert _routed_num_tokens(nested).item() == 7
    assert _routed_num_tokens(sft_batch(3, 8)).item() == 11
    dense = TensorDict({"input_ids": torch.ones(2, 6).long()}, batch_size=[2])
    assert _routed_num_tokens(dense).item() == 12
    for data in (masked, nested, dense, sft_batch(3)):
        assert _routed_num_tokens(data).dtype == torch.int64 and _routed_num_tokens(data).dim() == 0


def counts_of_four(rank: int, world: int) -> tuple:
    """D = 2 and C = 2: ranks 0 and 1 hold the same batch, ranks 2 and 3 another."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **kwargs: (
        calls.append(tensor.numel() * tensor.element_size()),
        all_reduce(tensor, **kwargs),
    )
    batch = [sft_batch(7), sft_batch(3, 5)][rank // 2]
    counts = count_step(batch, groups[rank % 2])
    found = counts.loss_tokens, counts.routed_tokens, counts.sequences, list(calls)
    # The mask of one rank's second sequence lacks a token.
    batch["attention_mask"] = [torch.ones(1, 7), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])][rank // 2]
    try:
        count_step(batch, groups[rank % 2])
    except ValueError as error:
        return (*found, str(error))
    return (*found, "")


@pytest.mark.gloo
def test_a_step_is_counted_over_data_parallel_ranks_only_in_one_collective() -> None:
    # 6 targets each: 12 in the step, not the 24 that a sum over dp x cp would give.
    results = run_world(counts_of_four, 4)
    assert [result[:4] for result in results] == [(12, 15, 3, [32])] * 4
    # Ids that are not those of the attention mask stop every rank, not only the one that has them.
    assert all("attention_mask and input_ids disagree about the lengths of 1 seq" in result[4] for result in results)


def test_one_rank_needs_no_collective() -> None:
    counts = count_step(sft_batch(4, 1), None)
    assert (counts.loss_tokens, counts.routed_tokens, counts.sequences) == (3, 5, 2)


@pytest.mark.parametrize("routed", [1, 7, 4097, 123_457])
def test_what_megatron_does_to_the_loss_comes_to_one(routed: int) -> None:
    """A loss that a loss function returns times dp must end as itself, through either regime."""
    dp, micro_batches, cp = 3, 5, 2
    off = LossScale(per_token=False, num_micro_batches=micro_batches, dp_size=dp, routed_tokens=routed)
    # schedule: x cp / K; reduction: mean over dp x cp; each of the cp ranks holds its part of one gradient
    assert dp * off.loss * cp / micro_batches / (dp * cp) == pytest.approx(1, rel=1e-15)
    assert off.router / micro_batches / dp * routed == pytest.approx(1, rel=1e-15)
    on = LossScale(per_token=True, num_micro_batches=micro_batches, dp_size=dp, routed_tokens=routed)
    final = (1.0 / torch.tensor(routed, dtype=torch.int32)).double().item()  # float32, as Megatron computes it
    assert dp * on.loss * final == pytest.approx(1, rel=1e-15)
    assert on.router * routed * final == pytest.approx(1, rel=1e-15)


def test_a_step_without_tokens_divides_by_nothing() -> None:
    for flag in (True, False):
        scale = LossScale(per_token=flag, num_micro_batches=1, dp_size=1, routed_tokens=0)
        assert scale.loss == scale.router == 1


@pytest.mark.parametrize("settings", [{"use_remove_padding": False}, {"loss_agg_mode": "seq-mean-token-mean"}])
def test_the_guards_fire_only_with_the_flag_and_name_the_way_out(settings: dict) -> None:
    with pytest.raises(ValueError, match="megatron.per_token_loss_guards=False"):
        check_per_token_loss_guards(True, True, **settings)
    check_per_token_loss_guards(True, False, **settings)
    check_per_token_loss_guards(False, True, **settings)


def test_the_guards_let_the_usual_settings_pass() -> None:
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", None):
        check_per_token_loss_guards(True, True, loss_agg_mode=mode)
