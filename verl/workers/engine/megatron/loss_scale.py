# SPDX-License-Identifier: Apache-2.0
"""The one place of the Megatron engine that knows a scale factor (docs/objective.md, sections 3 and 4).

A loss function returns its share of ``sum w * l / D`` times ``dp_size``. What Megatron multiplies and divides it by
after that depends on ``calculate_per_token_loss``; the factors here undo it, so that both regimes give the gradient of
the same objective. They are constants of one optimiser step: Megatron keeps the scale of the router and MTP losses in
class-level state that the last forward wrote, so a factor that changed between micro-batches would go wrong under a
pipeline.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.models.mcore.mtp_patch import count_targets
from verl.utils.jagged import is_jagged
from verl.workers.utils.losses import loss_token_count

__all__ = ["LossScale", "StepCounts", "check_per_token_loss_guards", "count_step"]


@dataclass(frozen=True)
class StepCounts:
    """Counts over the whole optimiser step: every data-parallel rank and micro-batch.

    Attributes:
        loss_tokens: targets of the main loss.
        routed_tokens: real tokens, padding aside: those that the routers see.
        sequences: sequences that hold a real token, fully masked ones included.
        mtp_targets: trained targets of multi-token prediction, of each depth.
    """

    loss_tokens: int
    routed_tokens: int
    sequences: int
    mtp_targets: tuple[int, ...] = ()


def _routed_num_tokens(data: TensorDict) -> torch.Tensor:
    """Real tokens of a batch that enter the model, as a 0-d int64 tensor. The loss mask has no say in it.

    From ``attention_mask`` where there is one (RL), else from jagged ``input_ids``, else every entry of ``input_ids``.
    """
    if "attention_mask" in data.keys():
        mask: torch.Tensor = data["attention_mask"]
        return (mask.values() if mask.is_nested else mask).sum().long()
    input_ids: torch.Tensor = data["input_ids"]
    if is_jagged(input_ids):
        count: torch.Tensor = input_ids.offsets()[-1].long()
        return count
    return torch.tensor(input_ids.numel(), device=input_ids.device)


def _rows_that_differ(data: TensorDict, lengths: torch.Tensor) -> torch.Tensor:
    if "attention_mask" not in data.keys():
        return lengths.new_zeros(())
    mask: torch.Tensor = data["attention_mask"]
    real = mask.offsets().diff() if is_jagged(mask) else (mask != 0).sum(1)
    return (real != lengths).sum()


def count_step(
    data: TensorDict, dp_group: dist.ProcessGroup | None, device: torch.device | str = "cpu", mtp_depths: int = 0
) -> StepCounts:
    """Count a step over the data-parallel group: one all-reduce of ``4 + mtp_depths`` int64 numbers, one host copy.

    The ranks of a context-, tensor- or pipeline-parallel group hold the same batch, so they take no part in the sum.

    Args:
        data: this data-parallel rank's whole mini-batch.
        dp_group: the data-parallel group, without context parallelism.
        device: where the collective runs.
        mtp_depths: depths of multi-token prediction that are trained; they read ``loss_mask``.

    Raises:
        ValueError: on every rank, where ``attention_mask`` and the jagged ids of a row of any rank are of different
            lengths: what the losses read would belong to other tokens.
    """
    lengths = data["input_ids"].offsets().diff()
    local = torch.stack(
        [loss_token_count(data).long(), _routed_num_tokens(data), (lengths > 0).sum(), _rows_that_differ(data, lengths)]
    )
    if mtp_depths:
        local = torch.cat([local, count_targets(data["loss_mask"].values(), lengths, mtp_depths)])
    if dp_group is not None and dp_group.size() > 1:
        local = local.to(device)
        dist.all_reduce(local, group=dp_group)
    loss_tokens, routed_tokens, sequences, differing, *mtp_targets = local.tolist()
    if differing:
        raise ValueError(
            f"attention_mask and input_ids disagree about the lengths of {differing} sequences of the step; the ids "
            "must be the tokens where the mask is 1, as left_right_2_no_padding makes them"
        )
    return StepCounts(loss_tokens, routed_tokens, sequences, tuple(mtp_targets))


@dataclass(frozen=True)
class LossScale:
    """Factors of one step.

    Attributes:
        per_token: the model's ``calculate_per_token_loss``.
        num_micro_batches: of each data-parallel rank.
        dp_size: data-parallel size, without context parallelism.
        routed_tokens: of the whole step.
        cp_size: context-parallel size.
        mtp_targets: of the whole step, of each depth.
        mtp_factor: ``mtp_loss_scaling_factor``.
    """

    per_token: bool
    num_micro_batches: int
    dp_size: int
    routed_tokens: int
    cp_size: int = 1
    mtp_targets: tuple[int, ...] = ()
    mtp_factor: float = 0.0

    @property
    def divisor(self) -> float:
        """What the end of a per-token step really divides gradients by.

        Megatron multiplies them by ``1 / num_tokens`` rounded to float32. Its reciprocal in float64 undoes exactly
        that, where ``num_tokens`` itself would leave an error of 6e-8.
        """
        return 1.0 / float(np.float32(1) / np.float32(max(self.routed_tokens, 1)))

    @property
    def loss(self) -> float:
        """Factor of the loss (which comes times ``dp_size``).

        Per token: Megatron sums gradients over ranks and micro-batches and divides them by the routed tokens. Else: it
        divides by the number of micro-batches and averages over the data-parallel ranks.
        """
        return self.divisor / self.dp_size if self.per_token else float(self.num_micro_batches)

    @property
    def router(self) -> float:
        """Factor of the router losses, for Megatron's ``moe_grad_scale_func``.

        The routers always weigh a micro-batch by its tokens (:meth:`MegatronEngine.initialize` sees to it); what is
        left of Megatron's scaling must come to ``1 / routed tokens``.
        """
        routed = max(self.routed_tokens, 1)
        if self.per_token:
            return self.divisor / routed
        return self.num_micro_batches * self.dp_size / routed

    @property
    def mtp(self) -> float:
        """Factor of all depths of multi-token prediction, for Megatron's ``mtp_grad_scale_func``.

        Unlike the main loss, this one is not multiplied by the context-parallel size on the way, while gradients are
        averaged over the context-parallel ranks too when Megatron does not count tokens.
        """
        return self.divisor if self.per_token else float(self.num_micro_batches * self.dp_size * self.cp_size)

    @property
    def mtp_weights(self) -> tuple[float, ...]:
        """Weight of one target's cross entropy at each depth; 0 where the whole step has no target."""
        depths = len(self.mtp_targets)
        return tuple(self.mtp_factor / (depths * targets) if targets else 0.0 for targets in self.mtp_targets)


def check_per_token_loss_guards(
    per_token: bool, guards: bool, *, use_remove_padding: bool = True, loss_agg_mode: str | None = None
) -> None:
    """Refuse what the documented fix refuses under ``calculate_per_token_loss``.

    Raises:
        ValueError: for padded batches (``model.use_remove_padding=False``) and for
            ``loss_agg_mode=seq-mean-token-mean``, unless ``megatron.per_token_loss_guards=False``: both are exact
            here, see docs/objective.md.
    """
    if not (per_token and guards):
        return
    opt_in = "or lift this guard with megatron.per_token_loss_guards=False"
    if not use_remove_padding:
        raise ValueError(
            f"model.use_remove_padding=False with calculate_per_token_loss=True; set use_remove_padding=True, {opt_in}"
        )
    if loss_agg_mode == "seq-mean-token-mean":
        raise ValueError(f"loss_agg_mode={loss_agg_mode} with calculate_per_token_loss=True; use token-mean, {opt_in}")
