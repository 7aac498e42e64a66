# SPDX-License-Identifier: Apache-2.0
"""The controller's part of the rollout correction, and the greedy answers that remax compares with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl.algos.rollout_correction import correct_rollout
from verl.protocol import DataProto
from verl.trainer.ppo.batching import prompt_batch
from verl.trainer.ppo.reward import compute_reward
from verl.trainer.ppo.validation import generate
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutCorrectionConfig

__all__ = ["correct_batch", "greedy_scores", "rollout_correction_of", "rollout_log_probs"]


def rollout_correction_of(config: DictConfig) -> RolloutCorrectionConfig:
    """The typed ``algorithm.rollout_correction``; in bypass mode the actor gets its loss and these settings."""
    node = config.algorithm.get("rollout_correction")
    if node is None:
        return RolloutCorrectionConfig()
    rules = omega_conf_to_dataclass(node, RolloutCorrectionConfig, path="algorithm.rollout_correction")
    if rules.bypass_mode:
        loss = {"loss_mode": "bypass_mode", "rollout_correction": OmegaConf.to_container(node, resolve=True)}
        OmegaConf.update(config, "actor_rollout_ref.actor.policy_loss", loss, force_add=True)
    return rules


def rollout_log_probs(batch: DataProto) -> torch.Tensor:
    """The log-probs [B, R] that the rollout gave with its tokens.

    Raises:
        ValueError: it gave none.
    """
    if "rollout_log_probs" not in batch.batch.keys():
        raise ValueError(
            "algorithm.rollout_correction needs rollout_log_probs, and the rollout gave none; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    return batch.batch["rollout_log_probs"]


def correct_batch(batch: DataProto, rules: RolloutCorrectionConfig) -> tuple[bool, dict[str, float]]:
    """Write ``rollout_is_weights`` and take rejected tokens out of ``response_mask``, both [B, R].

    Does nothing to the batch in bypass mode, whose loss does it, and nothing at all without the rollout's log-probs if
    none are needed.

    Returns:
        (whether tokens were taken out, metrics of the gap between rollout and trainer).

    Raises:
        ValueError: a correction is configured and the rollout gave no log-probs.
    """
    if rules.bypass_mode or ("rollout_log_probs" not in batch.batch.keys() and not rules.is_on):
        return False, {}
    mask = batch.batch["response_mask"]
    weights, kept, metrics = correct_rollout(batch.batch["old_log_probs"], rollout_log_probs(batch), mask, rules)
    if weights is not None:
        batch.batch["rollout_is_weights"] = weights
    batch.batch["response_mask"] = kept
    return not torch.equal(kept, mask), metrics


def greedy_scores(actor_wg: Any, rows: dict, n: int, reward_fn: Callable, meta_info: dict[str, Any]) -> torch.Tensor:
    """Score of the greedy answer to each prompt, n times in a row as the prompts are repeated: [prompts * n].

    Args:
        actor_wg: worker group with ``generate_sequences``.
        rows: collated prompts.
        n: responses to each prompt in the batch that the scores are for.
        reward_fn: reward manager.
        meta_info: for the rollout; sampling is switched off here.
    """
    batch = prompt_batch(rows, 1, uid_prefix="greedy")
    batch = generate(actor_wg, batch, meta_info | {"validate": False, "do_sample": False})
    return compute_reward(batch, reward_fn)[0].sum(-1).repeat_interleave(n)
