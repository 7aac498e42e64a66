# SPDX-License-Identifier: Apache-2.0
"""What a run is allowed to do and hardly anybody wants: settings without effect, and files that get in the way.

Each function returns sentences; a dry run shows them as notes, a run logs them as warnings.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.trainer.ppo.preflight_model import has_own_class, is_dense, read_model
from verl.utils.config import is_of_type
from verl.utils.hf_config import find_hf_config

__all__ = ["model_code_warnings", "ppo_warnings", "save_warnings", "sft_warnings"]

# Estimators whose baseline is made of the other responses to the same prompt.
_GROUPED = (
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
)
_ROUTER_LOSSES = ("moe_z_loss_coeff", "moe_aux_loss_coeff")


def ppo_warnings(tree: Mapping) -> list[str]:
    """Of a ``ppo_trainer`` config."""
    actor, model = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.model"
    found = _router_losses(actor, get(tree, actor), get(tree, model)) + model_code_warnings(model, get(tree, model))
    if uses_critic(tree):
        found += _router_losses("critic.megatron", get(tree, "critic.megatron"), get(tree, "critic.model"))
    estimator, n = get(tree, "algorithm.adv_estimator"), get(tree, "actor_rollout_ref.rollout.n")
    if estimator in _GROUPED and n == 1:
        found.append(
            f"algorithm.adv_estimator={estimator!r} compares the responses to a prompt with each other, and "
            "actor_rollout_ref.rollout.n=1 leaves nothing to compare; use 2 or more, such as 8"
        )
    return found


def sft_warnings(tree: Mapping) -> list[str]:
    """Of an ``sft_trainer_engine`` config."""
    return _router_losses("engine", tree["engine"], tree["model"])


def _router_losses(path: str, engine: Mapping, model: Mapping) -> list[str]:
    given = engine["override_transformer_config"] or {}
    names = [name for name in _ROUTER_LOSSES if given.get(name)]
    facts = read_model(model) if names else None
    if facts is None or not is_dense(facts):
        return []
    return [
        f"{path}.override_transformer_config.{name}={given[name]!r} has no effect: {facts.file} is of a dense model, "
        "without routers"
        for name in names
    ]


def model_code_warnings(path: str, model: Mapping[str, Any]) -> list[str]:
    """Of a model that transformers knows, and generates with the folder's own code all the same.

    Args:
        path: the model node's key.
        model: the node.
    """
    config, file = find_hf_config(model) if model["trust_remote_code"] else (None, "")
    own = [name for name in (config or {}).get("auto_map") or {} if str(name).startswith("AutoModel")]
    if config is None or not own or not has_own_class(config.get("model_type")):
        return []
    return [
        f"{path}.trust_remote_code=True generates with the model code that {file} names (auto_map), which may be "
        f"written for another release of transformers; transformers knows model_type={config['model_type']!r} itself: "
        "take auto_map out of that file (leave it in tokenizer_config.json)"
    ]


def save_warnings(tree: Mapping, num_rows: Iterable[int], batch_size: int) -> list[str]:
    """Of checkpoints that are further apart than the run is long.

    Args:
        tree: the config.
        num_rows: of each file of training data, before long rows are dropped.
        batch_size: rows of a step.
    """
    every, most = get(tree, "trainer.save_freq"), get(tree, "data.train_max_samples")
    counts = (get(tree, "trainer.total_epochs"), get(tree, "trainer.total_training_steps") or 1, batch_size)
    if not all(is_of_type(count, int) and count > 0 for count in counts) or not is_of_type(every, int):
        return []  # said where the values are checked
    rows = min(sum(num_rows), most) if most > 0 else sum(num_rows)
    steps = get(tree, "trainer.total_training_steps") or rows // batch_size * counts[0]
    if every <= steps or steps < 1:
        return []
    return [
        f"trainer.save_freq={every} is more than the {steps} steps of the run: the one checkpoint is that of the last "
        "step"
    ]
