# SPDX-License-Identifier: Apache-2.0
"""Names of estimators and losses, and what they need, checked before anything starts."""

import copy

import pytest
from omegaconf import OmegaConf

from verl.trainer.ppo.preflight_algos import check_algorithm
from verl.utils.config import compose_config
from verl.workers.config.names import ADV_ESTIMATORS, POLICY_LOSSES

LOSS, ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"
RULES = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def shipped():
    config = compose_config("ppo_trainer", ["actor_rollout_ref.rollout.name=hf", "algorithm.adv_estimator=grpo"])
    return OmegaConf.to_container(config, resolve=True)


def problems(shipped, changes):
    tree = copy.deepcopy(shipped)
    for key, value in changes.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[last] = value
    return check_algorithm(tree)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_known_estimators_pass(shipped, name):
    needs = {"gdpo": {"algorithm.gdpo_reward_keys": ["a"]}, "grpo_passk": {"actor_rollout_ref.rollout.n": 2}}
    assert problems(shipped, {ESTIMATOR: name} | needs.get(name, {})) == []


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "bypass_mode"])
def test_known_losses_pass(shipped, name):
    assert problems(shipped, {LOSS: name}) == []


def test_functions_of_the_users_own_by_path(shipped, tmp_path, monkeypatch):
    (tmp_path / "my_functions.py").write_text("def mine(**kwargs):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert problems(shipped, {ESTIMATOR: "my_functions:mine", LOSS: "my_functions:mine"}) == []
    (said,) = problems(shipped, {LOSS: "my_functions:main"})
    assert f"{LOSS}='my_functions:main'" in said and "Did you mean mine?" in said
    (said,) = problems(shipped, {ESTIMATOR: "nowhere:mine"})
    assert "module 'nowhere' cannot be imported" in said


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({ESTIMATOR: "rlooo"}, ["'rlooo' is not known", "Did you mean 'rloo'?", "module:function"]),
        ({LOSS: "gsop"}, [f"{LOSS}='gsop' is not known", "Did you mean 'gspo'?"]),
        ({ESTIMATOR: "gdpo"}, ["needs algorithm.gdpo_reward_keys"]),
        (
            {
                ESTIMATOR: "gdpo",
                "algorithm.gdpo_reward_keys": ["a", "b"],
                "algorithm.gdpo_reward_weights": [1.0],
            },
            ["gdpo_reward_weights=[1.0]", "['a', 'b']"],
        ),
        (
            {ESTIMATOR: "gdpo", "algorithm.gdpo_reward_keys": ["a"], "algorithm.use_kl_in_reward": True},
            ["use_kl_in_reward=True has no effect", "use_kl_loss=True"],
        ),
        ({ESTIMATOR: "grpo_passk"}, ["rollout.n=1 must be at least 2"]),
        (
            {f"{RULES}.rollout_is": "token", "actor_rollout_ref.rollout.calculate_log_probs": False},
            [f"{RULES}.rollout_is='token' needs the rollout's log-probs", "calculate_log_probs=True"],
        ),
        ({LOSS: "bypass_mode"}, [f"{RULES}.bypass_mode=True"]),
        ({f"{RULES}.bypass_mode": True, LOSS: "gspo"}, ["'gspo' would not be used"]),
        (
            {f"{RULES}.bypass_mode": True, f"{RULES}.rollout_is_batch_normalize": True},
            ["rollout_is_batch_normalize=True", "set it to False"],
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(shipped, changes, parts):
    said = problems(shipped, changes)
    assert len(said) == 1, said
    assert all(part in said[0] for part in parts), said[0]


def test_a_typed_section_says_the_full_key(shipped):
    from verl.utils.config import omega_conf_to_dataclass

    node = copy.deepcopy(shipped["algorithm"])
    node["rollout_correction"]["rollout_rs"] = "token_k9"
    node["rollout_correction"]["rollout_rs_threshold"] = 2.0
    with pytest.raises(ValueError, match="algorithm.rollout_correction.rollout_rs='token_k9'"):
        omega_conf_to_dataclass(node, path="algorithm")
