# SPDX-License-Identifier: Apache-2.0
"""The PPO loop of the single controller.

One step: prompts -> n answers each (rollout workers) -> scores (reward manager) -> log-probs of the current and, where
the objective needs it, of the reference policy, values of a critic (workers) -> advantages (here) -> updates of critic
and actor (workers) -> weights to the rollout (workers). The batch lives here as a DataProto; workers get the columns
they need as jagged TensorDicts.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset

import verl.utils.tensordict_utils as tu
from verl.algos.advantage import AdvantageEstimator, get_adv_estimator_fn
from verl.algos.kl import get_kl_controller, kl_in_reward
from verl.protocol import DataProto
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.batching import dp_row_order, model_batch, prompt_batch, token_imbalance
from verl.trainer.ppo.checkpointing import CriticPart, load_checkpoint, save_checkpoint
from verl.trainer.ppo.critic import compute_values, update_critic
from verl.trainer.ppo.dynamic_sampling import fill_batch, filters_groups, loader_batch_size
from verl.trainer.ppo.metric_utils import (
    PhaseTimer,
    compute_data_metrics,
    compute_rollout_gap_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    worker_report,
)
from verl.trainer.ppo.off_policy import correct_batch, greedy_scores, rollout_correction_of, rollout_log_probs
from verl.trainer.ppo.reward import compute_reward, reward_metrics
from verl.trainer.ppo.utils import Role, actor_dp_size, need_critic, need_reference_policy
from verl.trainer.ppo.validation import generate, validate, write_generations
from verl.utils.checkpoint_folder import CheckpointFolder
from verl.utils.progress import TrainingProgress
from verl.utils.resumable_loader import ResumableLoader, check_warmup, resolve_total_steps
from verl.utils.tracking import Tracking

logger = logging.getLogger(__name__)

_ESTIMATOR_COLUMNS = ("old_log_probs", "values", "reward_baselines", "sum_pi_squared", "rollout_is_weights")
_NEED_SUM_PI_SQUARED = (AdvantageEstimator.OPTIMAL_TOKEN_BASELINE, AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
_UPDATE_COLUMNS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage"]


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Write token_level_rewards = token_level_scores - coefficient * KL(policy || reference), and adapt the
    coefficient.

    Reads token_level_scores, old_log_probs, ref_log_prob, response_mask, all [B, R].

    Returns:
        (the same batch, metrics of the penalty).
    """
    batch, coefficient = data.batch, kl_ctrl.value
    rewards, current_kl = kl_in_reward(
        batch["token_level_scores"],
        batch["old_log_probs"],
        batch["ref_log_prob"],
        batch["response_mask"],
        kl_coef=coefficient,
        kl_type=kl_penalty,
    )
    batch["token_level_rewards"] = rewards
    kl_ctrl.update(current_kl=current_kl.item(), n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current_kl.item(), "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(data: DataProto, adv_estimator: str, config: Any = None) -> DataProto:
    """Write advantages and returns, [B, R], with the registered estimator.

    The estimator gets token_level_rewards, response_mask, config (the ``algorithm`` section), index (the uid of each
    row), non_tensor_batch and those of the columns in `_ESTIMATOR_COLUMNS` that the batch holds.
    """
    columns = {key: data.batch[key] for key in _ESTIMATOR_COLUMNS if key in data.batch.keys()}
    advantages, returns = get_adv_estimator_fn(adv_estimator)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=config,
        non_tensor_batch=data.non_tensor_batch,
        **columns,
    )
    data.batch["advantages"] = advantages
    data.batch["returns"] = returns
    return data


class RayPPOTrainer:
    """Trains an actor on rewards, in one set of processes that holds actor, rollout and, if needed, the reference
    policy and the critic.

    Args:
        config: the ``ppo_trainer`` tree, already checked.
        tokenizer: of the model; gives the end and padding tokens.
        role_worker_mapping: `Role.ActorRollout` or `Role.ActorRolloutRef` -> Ray actor class of the workers; with a
            critic also `Role.Critic`.
        resource_pool_manager: where the workers run; all of them share the actor's processes.
        ray_worker_group_cls: how a group of workers is driven.
        processor: unused by text models.
        reward_fn: reward manager for training.
        val_reward_fn: reward manager for validation; None switches validation off.
        train_dataset: map-style data set of prompts.
        val_dataset: held-out prompts.
        collate_fn: list of rows -> dictionary of tensors and object arrays.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, Any],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        processor: Any = None,
        reward_fn: Callable | None = None,
        val_reward_fn: Callable | None = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn: Callable | None = None,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.val_dataset = val_dataset
        self.collate_fn = collate_fn
        self.use_reference_policy = need_reference_policy(config)
        self.use_critic = need_critic(config)
        self.rollout_correction = rollout_correction_of(config)
        algorithm = config.algorithm
        self.kl_ctrl_in_reward = get_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None
        self.checkpoints = CheckpointFolder(config.trainer.default_local_dir, config.trainer.max_actor_ckpt_to_keep)
        self.resume_source = self.checkpoints.resume_from(config.trainer.resume_mode, config.trainer.resume_from_path)
        self.train_dataloader = ResumableLoader(
            train_dataset,
            loader_batch_size(config),
            collate_fn,
            shuffle=config.data.shuffle,
            seed=1 if config.data.seed is None else config.data.seed,
            num_workers=config.data.dataloader_num_workers,
        )
        self.total_training_steps = resolve_total_steps(
            len(self.train_dataloader), config.trainer.total_epochs, config.trainer.total_training_steps
        )
        # The actor's schedule counts its own updates, and there is none while the critic warms up.
        actor_updates = max(self.total_training_steps - config.trainer.critic_warmup, 1)
        check_warmup("actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim, actor_updates)
        with open_dict(config):
            config.actor_rollout_ref.actor.optim.total_training_steps = actor_updates
        self.dp_size = actor_dp_size(config)
        actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
        self.mini_batch_rows = actor.ppo_mini_batch_size * n
        self.critic_mini_batch_rows = self.mini_batch_rows
        if self.use_critic:
            check_warmup("critic.optim", config.critic.optim, self.total_training_steps)
            with open_dict(config):
                config.critic.optim.total_training_steps = self.total_training_steps
            self.critic_mini_batch_rows = config.critic.ppo_mini_batch_size * n
        self.global_steps = 0
        self.actor_rollout_wg: Any = None
        self.critic_wg: Any = None

    def init_workers(self) -> None:
        """Start the workers and build the models in them."""
        role = Role.ActorRolloutRef if self.use_reference_policy else Role.ActorRollout
        worker_cls = self.role_worker_mapping.get(role) or self.role_worker_mapping[Role.ActorRollout]
        if not self.resource_pool_manager.resource_pool_dict:
            self.resource_pool_manager.create_resource_pool()
        config, workers = self.config, {}
        workers["actor"] = RayClassWithInitArgs(worker_cls, config=config.actor_rollout_ref, role=str(role))
        if self.use_critic:
            workers["critic"] = RayClassWithInitArgs(
                self.role_worker_mapping[Role.Critic],
                config=config.critic,
                nccl_timeout=config.actor_rollout_ref.nccl_timeout,
            )
        group = self.ray_worker_group_cls(
            resource_pool=self.resource_pool_manager.get_resource_pool(Role.ActorRollout),
            ray_cls_with_init=create_colocated_worker_cls(workers) if self.use_critic else workers["actor"],
            ray_wait_register_center_timeout=config.trainer.ray_wait_register_center_timeout,
        )
        groups = group.spawn(set(workers)) if self.use_critic else {"actor": group}
        self.actor_rollout_wg, self.critic_wg = groups["actor"], groups.get("critic")
        for name in workers:
            groups[name].init_model()

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the last metrics logged.

        Raises:
            ValueError: the checkpoint to resume from does not fit, or a reward or a batch is malformed.
        """
        trainer = self.config.trainer
        tracker = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        try:
            return self._fit(tracker)
        finally:
            tracker.finish()

    def _fit(self, tracker: Tracking) -> dict[str, float]:
        trainer = self.config.trainer
        source = self.resume_source
        if source is not None:
            self.global_steps = load_checkpoint(
                source, self.actor_rollout_wg, self.train_dataloader, self.kl_ctrl_in_reward, self.critic_wg
            )
            print(f"resumed from {source}: {self.global_steps} of {self.total_training_steps} steps are done")
        self.actor_rollout_wg.update_weights(global_steps=self.global_steps)
        metrics: dict[str, float] = {}
        if self._can_validate() and trainer.val_before_train:
            metrics = self._validate()
            tracker.log(metrics, step=self.global_steps)
            if trainer.val_only:
                return metrics
        batches = iter(self.train_dataloader)
        with TrainingProgress(self.total_training_steps, title=str(self.config.algorithm.adv_estimator)) as progress:
            while self.global_steps < self.total_training_steps:
                metrics = self._one_step(batches)
                tracker.log(metrics, step=self.global_steps)
                progress.update(
                    self.global_steps,
                    reward=metrics["critic/score/mean"],
                    grad_norm=metrics.get("actor/grad_norm"),
                    tokens_per_s=metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"],
                )
        return metrics

    def _due(self, freq: int) -> bool:
        """Whether something done every ``freq`` steps (and at the end; never if not positive) is due after this
        step."""
        return freq > 0 and (self.global_steps % freq == 0 or self.global_steps == self.total_training_steps)

    def _can_validate(self) -> bool:
        return self.val_reward_fn is not None and self.val_dataset is not None

    def _one_step(self, batches: Iterator[dict]) -> dict[str, float]:
        """One training step with the validation and the checkpoint that are due after it; returns all its metrics."""
        trainer, timer = self.config.trainer, PhaseTimer()
        epoch = self.train_dataloader.epoch
        with timer.phase("step"):
            batch, metrics = self.training_step(next(batches), timer, batches)
        self.global_steps += 1
        if self._can_validate() and self._due(trainer.test_freq):
            with timer.phase("testing"):
                metrics |= self._validate()
        if self._due(trainer.save_freq):
            with timer.phase("save_checkpoint"):
                self._save_checkpoint()
        metrics |= {"training/global_step": float(self.global_steps), "training/epoch": float(epoch)}
        metrics |= compute_data_metrics(batch)
        metrics |= compute_rollout_gap_metrics(batch)
        metrics |= compute_timing_metrics(timer)
        metrics |= compute_throughout_metrics(batch, timer, self.actor_rollout_wg.world_size)
        return metrics

    def training_step(
        self, rows: dict, timer: PhaseTimer, more: Iterator[dict] | None = None
    ) -> tuple[DataProto, dict[str, float]]:
        """From collated prompts to updated weights.

        Args:
            rows: collated prompts, `data.train_batch_size` of them (under dynamic sampling `data.gen_batch_size`).
            timer: gets the phases gen, reward, old_log_prob, ref, values, adv, update_critic, update_actor,
                update_weights, as far as there are such.
            more: further prompts, of which dynamic sampling draws.

        Returns:
            (the finished batch of train_batch_size * n rows, metrics of the updates).
        """
        scores_later = self._can_score_later()
        batch, metrics = fill_batch(
            lambda part, number: self._rollout(part, timer, number, score=not scores_later),
            rows,
            more,
            self.config,
            batches_in_data=len(self.train_dataloader),
        )
        order = self._row_order(batch, metrics)
        batch, data, new_metrics = self._old_log_probs(batch, order, timer, scores_meanwhile=scores_later)
        metrics |= new_metrics
        is_masked_anew, gap_metrics = correct_batch(batch, self.rollout_correction)
        metrics |= gap_metrics
        if is_masked_anew:
            data = model_batch(batch)
        if self.use_reference_policy:
            self._ref_log_probs(batch, data, timer)
        critic = self.config.critic
        if self.use_critic:
            compute_values(self.critic_wg, critic, batch, data, timer)
        with timer.phase("adv"):
            metrics |= self._advantages(batch)
        if not batch.batch["response_mask"].any():
            # An optimiser step without a gradient would still decay weights and follow its momentum.
            logger.warning("step %d: no token is left to train on; nothing is updated", self.global_steps + 1)
            return batch, metrics | {"training/skipped_update": 1.0}
        if self.use_critic:
            metrics |= update_critic(self.critic_wg, critic, batch, data, self.critic_mini_batch_rows, timer)
        if self.global_steps < self.config.trainer.critic_warmup:
            return batch, metrics
        metrics |= self._update_actor(batch, data, timer)
        return batch, metrics

    def _rollout_meta(self) -> dict[str, Any]:
        return {
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "global_steps": self.global_steps,
        }

    def _can_score_later(self) -> bool:
        """Whether nothing needs the scores before the old log-probs, so that both can be computed at the same time."""
        is_remax = self.config.algorithm.adv_estimator == AdvantageEstimator.REMAX  # asks the workers for baselines
        return not (filters_groups(self.config) or is_remax or self.rollout_correction.bypass_mode)

    def _rollout(self, rows: dict, timer: PhaseTimer, number: int, score: bool) -> tuple[DataProto, dict[str, float]]:
        prefix = f"{self.global_steps}.{number}" if number else str(self.global_steps)
        batch = prompt_batch(rows, self.config.actor_rollout_ref.rollout.n, uid_prefix=prefix)
        with timer.worker_call("gen") as seconds:
            batch = generate(self.actor_rollout_wg, batch, self._rollout_meta() | {"validate": False})
            seconds += batch.meta_info.get("timing", {}).values()
        batch.meta_info = {}
        if not score:
            return batch, {}
        metrics = self._score(batch, timer)
        if self.config.algorithm.adv_estimator == AdvantageEstimator.REMAX:
            with timer.phase("gen_max"):
                n = self.config.actor_rollout_ref.rollout.n
                baselines = greedy_scores(self.actor_rollout_wg, rows, n, self.reward_fn, self._rollout_meta())
            batch.batch["reward_baselines"] = baselines
        return batch, metrics

    def _score(self, batch: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Write the scores and the reward's extra values into ``batch``; returns the reward's counts."""
        with timer.phase("reward"):
            scores, extras = compute_reward(batch, self.reward_fn)
            batch.batch["token_level_scores"] = scores
            for name, values in extras.items():
                if len(values) == len(batch):
                    batch.non_tensor_batch[name] = np.array(values, dtype=object)
        return reward_metrics(self.reward_fn)

    def _row_order(self, batch: DataProto, metrics: dict[str, float]) -> list[int] | None:
        """The order of the rows in which data-parallel ranks share them out; None if there is one rank."""
        if self.dp_size == 1:
            return None
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        # Every mini-batch of the actor's and of the critic's is made of whole blocks of this size.
        block = math.gcd(self.mini_batch_rows, self.critic_mini_batch_rows)
        order = dp_row_order(lengths, self.dp_size, block, balance=self.config.trainer.balance_batch)
        metrics |= token_imbalance(lengths, order, self.dp_size)
        return order

    def _infer(
        self,
        method: Callable,
        data: TensorDict,
        section: DictConfig,
        timer: PhaseTimer,
        calculate_entropy: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> TensorDict:
        """Call a log-prob method of the workers with the micro-batch settings of ``section``; ``meanwhile`` runs
        here."""
        tu.assign_non_tensor(
            data,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            use_dynamic_bsz=section.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=section.log_prob_max_token_len_per_gpu,
            micro_batch_size_per_gpu=section.log_prob_micro_batch_size_per_gpu,
            calculate_entropy=calculate_entropy,
        )
        phase = "old_log_prob" if section is self.config.actor_rollout_ref.rollout else "ref"
        with timer.worker_call(phase) as seconds:
            finish = method.start(data)
            meanwhile()
            output = finish()
            seconds += worker_report(output)[1]
        return output

    def _old_log_probs(
        self, batch: DataProto, order: list[int] | None, timer: PhaseTimer, scores_meanwhile: bool
    ) -> tuple[DataProto, TensorDict, dict[str, float]]:
        """Reorder ``batch`` and write ``old_log_probs`` into it.

        The rewards may be computed while the workers are busy; they see the rows in the order of the prompts all the
        same, so that the responses to one prompt are neighbours.

        Returns:
            (the batch, its columns for the model, metrics).
        """
        arranged = batch if order is None else batch.select_idxs(np.array(order))
        data, metrics = model_batch(arranged), {}
        if self.rollout_correction.bypass_mode:
            arranged.batch["old_log_probs"] = rollout_log_probs(arranged)
            return arranged, data, metrics

        def meanwhile() -> None:
            if scores_meanwhile:
                metrics.update(self._score(batch, timer))

        section = self.config.actor_rollout_ref.rollout
        actor, estimator = self.config.actor_rollout_ref.actor, self.config.algorithm.adv_estimator
        needs_squares = actor.get("calculate_sum_pi_squared") or estimator in _NEED_SUM_PI_SQUARED
        tu.assign_non_tensor(data, calculate_sum_pi_squared=bool(needs_squares))
        output = self._infer(self.actor_rollout_wg.compute_log_prob, data, section, timer, True, meanwhile)
        tu.assign_non_tensor(data, calculate_sum_pi_squared=False)
        if order is not None:
            batch.reorder(order)
        for key in ("old_log_probs", *["sum_pi_squared"] * bool(needs_squares)):
            batch.batch[key] = output[key]
        mask = batch.batch["response_mask"].bool()
        return batch, data, metrics | {"actor/entropy": output["entropys"][mask].mean().item()}

    def _ref_log_probs(self, batch: DataProto, data: TensorDict, timer: PhaseTimer) -> None:
        section = self.config.actor_rollout_ref.ref
        output = self._infer(self.actor_rollout_wg.compute_ref_log_prob, data, section, timer, calculate_entropy=False)
        batch.batch["ref_log_prob"] = output["ref_log_prob"]

    def _advantages(self, batch: DataProto) -> dict[str, float]:
        algorithm, metrics = self.config.algorithm, {}
        if algorithm.use_kl_in_reward:
            batch, metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        compute_advantage(batch, algorithm.adv_estimator, algorithm)
        return metrics

    def _update_actor(self, batch: DataProto, data: TensorDict, timer: PhaseTimer) -> dict[str, float]:
        actor = self.config.actor_rollout_ref.actor
        for key in _UPDATE_COLUMNS:
            if key in batch.batch.keys():
                data[key] = batch.batch[key]
        tu.assign_non_tensor(
            data,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            calculate_entropy=bool(actor.get("calculate_entropy")) or actor.entropy_coeff != 0,
            use_dynamic_bsz=actor.use_dynamic_bsz,
            max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
            micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
            mini_batch_size=self.mini_batch_rows,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": actor.shuffle},
        )
        with timer.worker_call("update_actor") as seconds:
            finish = self.actor_rollout_wg.update_actor.start(data)
            # Sent along, so that the workers go from one to the other without waiting for this process.
            finish_weights = self.actor_rollout_wg.update_weights.start(global_steps=self.global_steps + 1)
            metrics, reported = worker_report(finish())
            seconds += reported
        with timer.worker_call("update_weights") as seconds:
            seconds.append(max(finish_weights()))
        return metrics

    def _validate(self) -> dict[str, float]:
        """Metrics of all held-out prompts under the rollout's present weights."""
        config = self.config
        batches = DataLoader(
            self.val_dataset,
            batch_size=config.data.val_batch_size or len(self.val_dataset),
            shuffle=config.data.validation_shuffle,
            collate_fn=self.collate_fn,
        )
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        metrics, columns = validate(self.actor_rollout_wg, batches, self.val_reward_fn, self._rollout_meta(), n)
        if config.trainer.log_val_generations > 0:
            path = os.path.join(config.trainer.default_local_dir, "val_generations", f"{self.global_steps}.jsonl")
            write_generations(path, self.tokenizer, columns, config.trainer.log_val_generations)
        return metrics

    def _save_checkpoint(self) -> None:
        contents, critic = self.config.actor_rollout_ref.actor.checkpoint.save_contents, None
        if self.use_critic:
            export_critic = "hf_model" in self.config.critic.checkpoint.save_contents
            critic = CriticPart(self.critic_wg, export_critic, self.config.trainer.max_critic_ckpt_to_keep)
        folder = save_checkpoint(
            self.checkpoints,
            self.global_steps,
            self.actor_rollout_wg,
            self.train_dataloader,
            self.kl_ctrl_in_reward,
            export_hf="hf_model" in contents,
            critic=critic,
        )
        print(f"checkpoint of step {self.global_steps}: {os.path.relpath(folder)}")
