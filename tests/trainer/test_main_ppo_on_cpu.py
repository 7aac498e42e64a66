# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import time

import pytest

from verl.trainer.main_ppo import TaskRunner, check_local_cpus, check_schedules, ray_init_kwargs, time_limited
from verl.utils.config import compose_config


def _config(*overrides):
    return compose_config("ppo_trainer", ["actor_rollout_ref.rollout.name=hf", *overrides])


def test_ray_gets_what_is_set_and_nothing_that_is_null(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_init_kwargs(_config()) == {"include_dashboard": False}
    config = _config("ray_kwargs.ray_init.num_cpus=3", "ray_kwargs.ray_init.runtime_env.py_executable=python")
    assert ray_init_kwargs(config) == {
        "num_cpus": 3,
        "runtime_env": {"py_executable": "python"},
        "include_dashboard": False,
    }
    # A cluster that runs already has its own dashboard, and ray.init refuses the argument.
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    assert ray_init_kwargs(_config()) == {}


def test_a_wait_that_does_not_end_says_what_it_waited_for():
    code = (
        "import time\n"
        "from verl.trainer.main_ppo import time_limited\n"
        "with time_limited('the Ray cluster', 0.2):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "gave up: the Ray cluster did not come up within 0.2 s" in done.stderr


def test_a_wait_that_ends_in_time_is_left_alone():
    with time_limited("nothing", 0.1):
        pass
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="inside"), time_limited("nothing", 0.1):
        raise RuntimeError("inside")
    time.sleep(0.2)


def test_the_command_line_loads_neither_torch_nor_ray_before_the_checks():
    code = "import sys, verl.trainer.main_ppo, verl.trainer.sft_trainer; print({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("overrides", "said", "not_said"),
    [
        (["trainer.n_gpus_per_node=3"], ["need 3 CPUs", "has 2", "n_gpus_per_node=2 or num_cpus_per_worker=0.666"], []),
        (["trainer.n_gpus_per_node=1000"], ["need 1000 CPUs", "use n_gpus_per_node=2"], ["or num_cpus_per_worker"]),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=8"], ["trainer.nnodes=1, or name the cluster"], ["use n_gpus"]),
        (["trainer.num_cpus_per_worker=3", "trainer.n_gpus_per_node=1"], ["num_cpus_per_worker=2"], []),
        (["ray_kwargs.ray_init.num_cpus=two"], ["ray_kwargs.ray_init.num_cpus='two' must be"], []),
        (["ray_kwargs.ray_init.num_cpus=0"], ["ray_kwargs.ray_init.num_cpus=0 must be"], []),
    ],
)
def test_more_workers_than_cpus_are_answered_with_what_would_fit(monkeypatch, overrides, said, not_said):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: "cpu")
    with pytest.raises(ValueError) as error:
        check_local_cpus(_config("ray_kwargs.ray_init.num_cpus=2", *overrides))
    assert all(part in str(error.value) for part in said), error.value
    assert not any(part in str(error.value) for part in not_said), error.value
    check_local_cpus(_config("ray_kwargs.ray_init.num_cpus=2", "trainer.n_gpus_per_node=2"))
    fitting = ["ray_kwargs.ray_init.num_cpus=2", "trainer.n_gpus_per_node=3", "trainer.num_cpus_per_worker=0.666"]
    check_local_cpus(_config(*fitting))


ACTOR_OPTIM, CRITIC_OPTIM = "actor_rollout_ref.actor.optim", "critic.optim"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # 100 // 32 = 3 steps an epoch, 2 epochs
        ([f"{ACTOR_OPTIM}.lr_warmup_steps=6"], f"{ACTOR_OPTIM}.lr_warmup_steps=6 must be below the schedule's 6 steps"),
        ([f"{ACTOR_OPTIM}.lr_warmup_steps=4", "trainer.critic_warmup=2"], "the schedule's 4 steps; use at most 3"),
        (
            [f"{ACTOR_OPTIM}.lr_warmup_steps_ratio=0.9", f"{ACTOR_OPTIM}.lr_decay_steps=5"],
            f"{ACTOR_OPTIM}.lr_warmup_steps_ratio=0.9 of 6 steps is a warm-up of 5, which must be below",
        ),
        (
            [
                "algorithm.adv_estimator=gae",
                f"{CRITIC_OPTIM}.lr_decay_style=cosine",
                f"{CRITIC_OPTIM}.lr_warmup_steps=7",
            ],
            f"{CRITIC_OPTIM}.lr_warmup_steps=7 must be below the schedule's 6 steps",
        ),
        ([f"{ACTOR_OPTIM}.lr_warmup_steps=5"], None),
        ([f"{ACTOR_OPTIM}.lr_warmup_steps=60", f"{ACTOR_OPTIM}.lr_decay_style=constant"], None),
        ([f"{ACTOR_OPTIM}.lr_warmup_steps=60", "trainer.total_training_steps=61"], None),
    ],
)
def test_a_warm_up_that_the_run_is_too_short_for(overrides, said):
    given = ["data.train_batch_size=32", "trainer.total_epochs=2", "algorithm.adv_estimator=grpo"]
    given += [f"{ACTOR_OPTIM}.lr_decay_style=cosine", *overrides]
    if said is None:
        check_schedules(_config(*given), 100)
        return
    with pytest.raises(ValueError) as error:
        check_schedules(_config(*given), 100)
    assert said in str(error.value)


def test_the_schedules_are_checked_where_the_data_are_opened_which_is_before_ray(monkeypatch):
    checked = []
    monkeypatch.setattr("verl.utils.tokenizer.hf_tokenizer", lambda *args: None)
    monkeypatch.setattr("verl.trainer.main_ppo.create_rl_dataset", lambda *args: range(100))
    monkeypatch.setattr("verl.trainer.ppo.reward.load_reward_manager", lambda *args: None)
    monkeypatch.setattr("verl.trainer.main_ppo.check_schedules", lambda config, rows: checked.append(rows))
    TaskRunner(_config())
    assert checked == [100]
