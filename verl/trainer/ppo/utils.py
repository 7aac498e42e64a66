# SPDX-License-Identifier: Apache-2.0
"""What a worker is there for, and which workers a configuration needs."""

from enum import Enum

from omegaconf import DictConfig

from verl.trainer.ppo.preflight_tables import NEEDS_CRITIC


class Role(Enum):
    """Duties of a worker group. A combined role is one group whose processes hold all the named parts."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6

    def __str__(self) -> str:
        return _WORKER_ROLE[self]


_WORKER_ROLE = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
}


def need_reference_policy(config: DictConfig) -> bool:
    """Whether the objective measures the distance to the initial policy, in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_critic(config: DictConfig) -> bool:
    """Whether there is a critic: as ``critic.enable`` says, or, if that is null, as the advantage estimator needs."""
    enable = config.critic.enable
    return config.algorithm.adv_estimator in NEEDS_CRITIC if enable is None else bool(enable)


def actor_dp_size(config: DictConfig) -> int:
    """Number of data-parallel parts of the actor: devices / (tensor x pipeline x context parallel size)."""
    megatron = config.actor_rollout_ref.actor.megatron
    model_parallel = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    return config.trainer.n_gpus_per_node * config.trainer.nnodes // model_parallel
