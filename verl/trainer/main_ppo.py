# SPDX-License-Identifier: Apache-2.0
"""Command line of the PPO trainer: ``python3 -m verl.trainer.main_ppo key=value ...``.

The configuration is checked before torch, Ray or a model is loaded. The controller runs in this process; it starts Ray,
or joins the cluster that ``ray_kwargs.ray_init.address`` or ``RAY_ADDRESS`` names.
"""

import math
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.dry_run.command import run_command
from verl.trainer.ppo.preflight import validate_ppo_config
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.utils.config import to_tree
from verl.utils.device import DEVICE_ENV
from verl.utils.run_length import check_warmup, lengths_of_schedules, resolve_total_steps

RAY_START_TIMEOUT_S = 180.0

# More processes than this on one CPU are not offered as a way out.
MAX_WORKERS_ON_A_CPU = 4


def main() -> None:
    """Read the command line, check it, train; exits non-zero on any failure."""
    run_command(prepare, "ppo_trainer")


def prepare(config: DictConfig) -> Callable[[], None]:
    """Check ``config``, open the data, start Ray; returns the training, a function of no arguments.

    Raises:
        ValueError: the configuration, the data or the cluster are not fit; Ray is not left running.
    """
    validate_ppo_config(config)
    if config.trainer.device == "cpu":
        os.environ[DEVICE_ENV] = "cpu"
    check_local_cpus(config)
    check_writable(config.trainer.default_local_dir)
    runner = TaskRunner(config)
    start_ray(config)
    try:
        runner.build_trainer()
    except BaseException:
        stop_ray()
        raise

    def train() -> None:
        try:
            runner.run()
        finally:
            stop_ray()

    return train


@contextmanager
def time_limited(what: str, seconds: float):
    """End the process with a message if the body, waiting for ``what``, takes longer than ``seconds``.

    The process is ended from another thread, because a wait inside a library does not return to be interrupted.
    """

    def expire() -> None:
        print(f"gave up: {what} did not come up within {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_writable(folder: str) -> None:
    """Make the folder of the run, so that a run does not train for hours to fail at its first checkpoint.

    Raises:
        ValueError: it cannot be made or written to.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir={folder} cannot be written to ({error.strerror}); name another folder"
        ) from None


def check_local_cpus(config: DictConfig) -> None:
    """Refuse more workers than this machine has CPUs for, where Ray will be started here and workers take CPUs.

    The cluster is asked again once Ray runs; this answer comes before anything slow.

    Raises:
        ValueError: names both numbers.
    """
    from verl.utils.device import get_device_name

    kwargs = ray_init_kwargs(config)
    if "address" in kwargs or "RAY_ADDRESS" in os.environ or get_device_name() != "cpu":
        return
    trainer = config.trainer
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    available = kwargs.get("num_cpus", len(cores))
    if isinstance(available, bool) or not isinstance(available, int) or available < 1:
        raise ValueError(f"ray_kwargs.ray_init.num_cpus={available!r} must be a whole number of at least 1, or null")
    workers = trainer.nnodes * trainer.n_gpus_per_node
    needed = workers * trainer.num_cpus_per_worker
    if needed <= available:
        return
    advice = [f"n_gpus_per_node={available}"] if trainer.nnodes == 1 else []
    if workers <= MAX_WORKERS_ON_A_CPU * available:
        advice.append(f"num_cpus_per_worker={math.floor(1000 * available / workers) / 1000:g}")
    if trainer.nnodes > 1:
        advice.append("trainer.nnodes=1, or name the cluster with ray_kwargs.ray_init.address")
    raise ValueError(
        f"trainer.nnodes x trainer.n_gpus_per_node={workers} worker processes at trainer.num_cpus_per_worker="
        f"{trainer.num_cpus_per_worker} need {needed:g} CPUs, and this machine has {available} (no GPU or NPU, "
        f"so every worker takes CPUs); use {' or '.join(advice)}"
    )


def ray_init_kwargs(config: DictConfig) -> dict[str, Any]:
    """Arguments for ``ray.init`` from ``ray_kwargs.ray_init``, without what is null."""
    given = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    kwargs = {key: value for key, value in given.items() if value is not None}
    runtime_env = {key: value for key, value in (kwargs.pop("runtime_env", None) or {}).items() if value is not None}
    if runtime_env:
        kwargs["runtime_env"] = runtime_env
    if "address" not in kwargs and "RAY_ADDRESS" not in os.environ:
        kwargs.setdefault("include_dashboard", False)
    return kwargs


def start_ray(config: DictConfig) -> None:
    """Start or join Ray within `RAY_START_TIMEOUT_S`; does nothing when it already runs in this process."""
    import ray

    import verl.single_controller.ray  # noqa: F401  sets how large a message Ray carries inline, before Ray reads it

    if ray.is_initialized():
        return
    kwargs = ray_init_kwargs(config)
    address = kwargs.get("address") or os.environ.get("RAY_ADDRESS")
    what = f"the Ray cluster at {address!r}" if address else "Ray on this machine (ray.init)"
    with time_limited(what, RAY_START_TIMEOUT_S):
        ray.init(**kwargs)


def stop_ray() -> None:
    """Leave Ray; what this process started is ended."""
    import ray

    ray.shutdown()


def create_rl_dataset(data_files: Any, config: DictConfig, tokenizer: Any, max_samples: int = -1) -> Any:
    """Open prompt data.

    Args:
        data_files: a path or a list of paths.
        config: the ``data`` section.
        tokenizer: of the model.
        max_samples: rows at most; -1 for all.
    """
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return RLHFDataset(data_files=data_files, tokenizer=tokenizer, config=config, max_samples=max_samples)


def check_schedules(config: DictConfig, num_prompts: int) -> None:
    """Refuse a warm-up of the learning rate that the run is too short for.

    Raises:
        ValueError: names the key and the longest warm-up.
    """
    from verl.trainer.ppo.dynamic_sampling import loader_batch_size

    trainer, steps_per_epoch = config.trainer, num_prompts // loader_batch_size(config)
    if not steps_per_epoch:
        return  # which the loader refuses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer gives the same warning
        total = resolve_total_steps(steps_per_epoch, trainer.total_epochs, trainer.total_training_steps)
    tree = to_tree(config)
    for key, length in lengths_of_schedules(total, trainer.critic_warmup or 0, uses_critic(tree)).items():
        check_warmup(key, OmegaConf.select(config, key), length)


class TaskRunner:
    """The parts of one run: making it opens tokenizer, data and rewards, `build_trainer` and `run` need Ray.

    Args:
        config: the checked ``ppo_trainer`` tree.

    Raises:
        ValueError: data, tokenizer or reward function cannot be used.
    """

    def __init__(self, config: DictConfig):
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.utils.tokenizer import hf_tokenizer

        self.config = config
        model, data = config.actor_rollout_ref.model, config.data
        self.tokenizer = hf_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
        self.train_dataset = create_rl_dataset(data.train_files, data, self.tokenizer, data.train_max_samples)
        self.val_dataset = None
        if data.val_files:
            self.val_dataset = create_rl_dataset(data.val_files, data, self.tokenizer, data.val_max_samples)
        check_schedules(config, len(self.train_dataset))
        self.reward_fn = load_reward_manager(config, self.tokenizer)
        self.trainer: Any = None

    def build_trainer(self) -> Any:
        """Make the trainer, without its workers; asks the cluster whether they would fit.

        Raises:
            ValueError: they do not fit, the data are smaller than a batch, or there is no such checkpoint.
        """
        import ray

        from verl.single_controller.ray import ResourcePoolManager
        from verl.trainer.ppo.utils import Role

        trainer, roles = self.config.trainer, (Role.ActorRollout, Role.ActorRolloutRef, Role.Critic)
        pools = ResourcePoolManager(
            resource_pool_spec={"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes},
            mapping=dict.fromkeys(roles, "global_pool"),
            num_cpus_per_worker=trainer.num_cpus_per_worker,
        )
        pools.create_resource_pool()

        # Slow to import, so only when the cluster is large enough.
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.utils.dataset.rl_dataset import collate_fn
        from verl.workers.critic_worker import CriticWorker
        from verl.workers.engine_workers import ActorRolloutRefWorker

        workers = dict.fromkeys(roles, ray.remote(ActorRolloutRefWorker)) | {Role.Critic: ray.remote(CriticWorker)}
        self.trainer = RayPPOTrainer(
            config=self.config,
            tokenizer=self.tokenizer,
            role_worker_mapping=workers,
            resource_pool_manager=pools,
            reward_fn=self.reward_fn,
            val_reward_fn=self.reward_fn,
            train_dataset=self.train_dataset,
            val_dataset=self.val_dataset,
            collate_fn=collate_fn,
        )
        return self.trainer

    def run(self) -> dict[str, float]:
        """Start the workers and train; returns the last metrics."""
        self.trainer.init_workers()
        return self.trainer.fit()


if __name__ == "__main__":
    main()
