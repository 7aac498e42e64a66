# SPDX-License-Identifier: Apache-2.0
"""Losses on micro-batches, in the form that every training engine calls.

``loss(model_output, data, dp_group) -> (scalar, metrics)`` with the configuration bound by `functools.partial`. The
scalar is normalised by the counts of the whole optimiser step and multiplied by the data-parallel size, so that adding
up micro-batches and averaging over ranks gives the loss of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from verl.algos.aggregation import agg_loss, select
from verl.algos.kl import kl_penalty
from verl.algos.policy_loss import get_policy_loss_fn
from verl.algos.value_loss import compute_value_loss
from verl.utils import tensordict_utils as tu
from verl.utils.jagged import jagged_parts
from verl.utils.metric import Metric
from verl.workers.utils.padding import no_padding_2_padding

__all__ = ["loss_token_count", "ppo_loss", "sft_loss", "value_loss"]


def _step_counts(data: TensorDict) -> dict[str, Any]:
    return {
        "dp_size": tu.get_non_tensor_data(data, "dp_size", 1),
        "batch_num_tokens": tu.get_non_tensor_data(data, "batch_num_tokens", None),
        "global_batch_size": tu.get_non_tensor_data(data, "global_batch_size", None),
    }


def _next_token_mask(loss_mask: torch.Tensor) -> torch.Tensor:
    """From "this token is a target" to "the prediction made here is one", both as flat values [sum of j], bool.

    The shift stays inside each sequence: a sequence's last position predicts nothing, its first token is predicted by
    nobody.
    """
    values, offsets = jagged_parts(loss_mask)
    is_target = values != 0
    shifted = torch.cat([is_target[1:], is_target.new_zeros(1)])
    shifted[offsets[1:] - 1] = False
    return shifted


def loss_token_count(data: TensorDict) -> torch.Tensor:
    """Tokens of a batch that the loss counts.

    Args:
        data: RL batch with response_mask [B, R], or SFT batch with jagged loss_mask [B, j] aligned with input_ids.

    Returns:
        0-d int64 tensor on the batch's device.
    """
    if "response_mask" in data.keys():
        response_mask: torch.Tensor = data["response_mask"]
        return (response_mask != 0).sum()
    return _next_token_mask(data["loss_mask"]).sum()


def ppo_loss(
    config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Policy loss, minus the entropy bonus, plus the KL to the reference.

    Args:
        config: the actor's configuration (loss_agg_mode, policy_loss.loss_mode, clip ratios, entropy_coeff,
            use_kl_loss, kl_loss_coef, kl_loss_type, loss_scale_factor, max_response_length).
        model_output: jagged [B, j] ``log_probs`` and, if computed, ``entropy``, in nats; entry t belongs to the
            prediction of token t + 1.
        data: one micro-batch: response_mask, old_log_probs, advantages, optionally ref_log_prob and rollout_is_weights,
            all [B, R]; metadata dp_size, batch_num_tokens and global_batch_size of the whole step. Without the two
            counts the micro-batch must be the whole step.
        dp_group: part of the contract, unused: nothing is communicated here.

    Returns:
        (0-d loss times dp_size, metrics). Losses are sums over micro-batches and ranks, fractions are token means; no
        tensor of them carries a graph.

    Raises:
        ValueError: an entropy bonus or a KL loss is configured and its input is missing; what `agg_loss` refuses.
    """
    mask = data["response_mask"]
    scale = _step_counts(data) | {
        "loss_scale_factor": config.loss_scale_factor,
        "max_response_length": config.max_response_length,
    }
    dp_size = scale["dp_size"]
    log_prob = no_padding_2_padding(model_output["log_probs"], data)

    policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)
    loss, metrics = policy_loss(
        old_log_prob=data["old_log_probs"],
        log_prob=log_prob,
        advantages=data["advantages"],
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=data.get("rollout_is_weights", None),
        **scale,
    )
    metrics["actor/pg_loss"] = Metric.sum(loss / dp_size)

    entropy = model_output.get("entropy")
    if entropy is None and config.entropy_coeff != 0:
        raise ValueError(f"actor.entropy_coeff={config.entropy_coeff} needs the entropy, which was not computed")
    if entropy is not None:
        mean_entropy = agg_loss(no_padding_2_padding(entropy, data), mask, config.loss_agg_mode, **scale)
        metrics["actor/entropy"] = Metric.sum(mean_entropy / dp_size)
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * mean_entropy

    if config.use_kl_loss:
        if "ref_log_prob" not in data.keys():
            raise ValueError("actor.use_kl_loss=True needs ref_log_prob in the batch, which holds none")
        # Selected before the estimator, whose exp would turn a NaN at a masked position into a NaN gradient.
        kl = kl_penalty(select(log_prob, mask), select(data["ref_log_prob"], mask), config.kl_loss_type)
        kl_loss = agg_loss(kl, mask, config.loss_agg_mode, **scale)
        metrics["actor/kl_loss"] = Metric.sum(kl_loss / dp_size)
        metrics["actor/kl_coef"] = Metric.mean(config.kl_loss_coef, 1)
        loss = loss + config.kl_loss_coef * kl_loss
    return loss, metrics


def sft_loss(
    config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Mean cross-entropy over the target tokens of the whole step, in nats.

    Args:
        config: part of the contract, unused: the loss has no setting.
        model_output: jagged [B, j] ``log_probs``; entry t belongs to the prediction of token t + 1 of its sequence, the
            last entry of a sequence is meaningless and never read.
        data: one micro-batch: jagged loss_mask [B, j] aligned with input_ids; metadata dp_size, batch_num_tokens (see
            `loss_token_count`) and global_batch_size of the whole step.
        dp_group: part of the contract, unused.

    Returns:
        (0-d loss times dp_size, {"sft/loss": its share of the step's loss}).

    Raises:
        ValueError: dp_size above 1 without batch_num_tokens.
    """
    counts = _step_counts(data)
    log_probs, _ = jagged_parts(model_output["log_probs"])
    loss = agg_loss(-log_probs[None], _next_token_mask(data["loss_mask"])[None], "token-mean", **counts)
    return loss, {"sft/loss": Metric.sum(loss / counts["dp_size"])}


def value_loss(
    config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The critic's loss: half the squared error of the values, clipped around the old ones.

    Args:
        config: the critic's configuration (cliprange_value, loss_agg_mode, loss_scale_factor, max_response_length).
        model_output: jagged [B, j] ``values``; entry t is the value of the sequence up to token t, before token t + 1.
        data: one micro-batch: response_mask, values and returns, all [B, R]; metadata dp_size, batch_num_tokens and
            global_batch_size of the whole step. Without the two counts the micro-batch must be the whole step.
        dp_group: part of the contract, unused.

    Returns:
        (0-d loss times dp_size, metrics); the loss is a sum over micro-batches and ranks, the others are token means.
    """
    scale = _step_counts(data) | {
        "loss_scale_factor": config.loss_scale_factor,
        "max_response_length": config.max_response_length,
    }
    loss, metrics = compute_value_loss(
        vpreds=no_padding_2_padding(model_output["values"], data),
        returns=data["returns"],
        values=data["values"],
        response_mask=data["response_mask"],
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
        **scale,
    )
    return loss, metrics | {"critic/vf_loss": Metric.sum(loss / scale["dp_size"])}
