# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with the training engine of the PPO actor.

``torchrun ... -m verl.trainer.sft_trainer key=value ...`` as in verl, or plain ``python3 -m verl.trainer.sft_trainer``,
which starts ``trainer.n_gpus_per_node`` ranks itself. Every rank runs the same loop: all ranks see the same order of
global batches and take the part of their data-parallel rank; the ranks of a model-parallel group take the same part.
"""

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.dry_run.command import run_command
from verl.trainer.main_ppo import check_writable
from verl.trainer.ppo.preflight import validate_sft_config
from verl.utils.device import DEVICE_ENV

CONFIG_NAME = "sft_trainer_engine"


def main() -> None:
    """Read the command line, check it, train; exits non-zero on any failure."""
    run_command(prepare, CONFIG_NAME)


def prepare(config: DictConfig) -> Callable[[], None]:
    """Check ``config`` and, in the process that trains, open the data; returns the training.

    Raises:
        ValueError: the configuration or the data are not fit for training.
    """
    validate_sft_config(config)
    if config.trainer.device == "cpu":
        os.environ[DEVICE_ENV] = "cpu"
    if config.trainer.save_freq > 0:
        check_writable(config.trainer.default_local_dir)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return SFTTrainer(config).fit
    trainer = config.trainer
    if trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={trainer.nnodes} needs torchrun on every node; without it use trainer.nnodes=1"
        )
    if trainer.n_gpus_per_node > 1:
        return functools.partial(launch_ranks, trainer.n_gpus_per_node, sys.argv[1:])
    return SFTTrainer(config).fit


def launch_ranks(num_ranks: int, arguments: list[str]) -> None:
    """Run this module with ``arguments`` in ``num_ranks`` local processes and wait for them.

    The rendezvous store is opened on a free port by the launcher and kept open for the ranks, so the port cannot be
    taken by another program in between.

    Raises:
        SystemExit: a rank failed (it has printed why).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each rank prints its own error; the launcher's account of it would bury that.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"sft_{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", "verl.trainer.sft_trainer", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # A rank that refused the configuration (exit code 2) has said so in one sentence; no more is to be told.
        if failure.exitcode != 2:
            cause = " ".join(failure.message.split())
            print(f"error: rank {rank} (exit code {failure.exitcode}): {cause}", file=sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None
    except SignalException as error:  # the ranks have been ended
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None


class SFTTrainer:
    """One rank of the training. Making it opens the data, `fit` builds the model and trains.

    Args:
        config: the checked ``sft_trainer_engine`` tree.

    Raises:
        ValueError: data or tokenizer cannot be used, or there is no such checkpoint to resume from.
    """

    def __init__(self, config: DictConfig):
        from verl.utils.checkpoint_folder import CheckpointFolder
        from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset, SFTTensorCollator
        from verl.utils.resumable_loader import check_warmup, resolve_total_steps
        from verl.utils.tokenizer import hf_tokenizer

        self.config = config
        data, model, trainer = config.data, config.model, config.trainer
        tokenizer = hf_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
        open_data = functools.partial(MultiTurnSFTDataset, tokenizer=tokenizer, config=data)
        self.train_dataset = open_data(parquet_files=data.train_files, max_samples=data.train_max_samples)
        self.val_dataset = None
        if data.val_files:
            self.val_dataset = open_data(parquet_files=data.val_files, max_samples=data.val_max_samples)
        self.collate = SFTTensorCollator(data.pad_mode)
        steps_per_epoch = max(1, len(self.train_dataset) // data.train_batch_size)
        self.total_steps = resolve_total_steps(steps_per_epoch, trainer.total_epochs, trainer.total_training_steps)
        check_warmup("optim", config.optim, self.total_steps)
        self.checkpoints = CheckpointFolder(trainer.default_local_dir, trainer.max_ckpt_to_keep)
        self.resume_source = self.checkpoints.resume_from(trainer.resume_mode, trainer.resume_from_path)
        self.step = 0

    def build(self) -> None:
        """Build the model on this rank and take its part of the data. Collective."""
        self.worker = self._build_worker()
        engine = self.worker.engine
        self.dp_rank, self.dp_size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        self.loader = self._build_loader()
        if self.resume_source is not None:
            self._load(self.resume_source)

    def _build_worker(self) -> Any:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import sft_loss

        config = self.config
        config.optim.total_training_steps = self.total_steps
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=omega_conf_to_dataclass(config.model),
                engine_config=omega_conf_to_dataclass(config.engine),
                optimizer_config=omega_conf_to_dataclass(config.optim),
                checkpoint_config=omega_conf_to_dataclass(config.checkpoint),
            )
        )
        worker.reset()
        worker.set_loss_fn(functools.partial(sft_loss, config=None))
        return worker

    def _build_loader(self) -> Any:
        from verl.utils.resumable_loader import ResumableLoader

        return ResumableLoader(
            self.train_dataset,
            self.config.data.train_batch_size,
            self.collate,
            seed=self.config.trainer.seed,
            num_workers=self.config.data.num_workers,
            shard=(self.dp_rank, self.dp_size),
        )

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes logs and the checkpoint's bookkeeping."""
        return self.worker.rank == 0

    def fit(self) -> None:
        """Train to the last step, with validation and checkpoints as configured."""
        from verl.utils.progress import TrainingProgress
        from verl.utils.tracking import Tracking

        self.build()
        trainer = self.config.trainer
        if not self.is_first_rank:
            self._loop(lambda metrics: None)
            return
        tracker = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        try:
            with TrainingProgress(self.total_steps, title="sft") as progress:

                def report(metrics: dict[str, float]) -> None:
                    tracker.log(metrics, step=self.step)
                    progress.update(
                        self.step,
                        grad_norm=metrics.get("train/grad_norm"),
                        tokens_per_s=metrics.get("train/tokens_per_s"),
                    )

                self._loop(report)
        finally:
            tracker.finish()

    def _loop(self, report: Callable[[dict[str, float]], None]) -> None:
        trainer = self.config.trainer
        batches = iter(self.loader)
        while self.step < self.total_steps:
            metrics = self._train_step(batches)
            self.step += 1
            if self.val_dataset is not None and self._due(trainer.test_freq):
                metrics["val/loss"] = self.validate()
            report(metrics)
            if self._due(trainer.save_freq):
                self._save()

    def _due(self, freq: int) -> bool:
        return freq > 0 and (self.step % freq == 0 or self.step == self.total_steps)

    def _batch(self, columns: dict[str, Any]) -> Any:
        """TensorDict of jagged columns with the micro-batch settings."""
        import verl.utils.tensordict_utils as tu

        data = self.config.data
        settings = {
            "use_dynamic_bsz": data.use_dynamic_bsz,
            "max_token_len_per_gpu": data.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
            "temperature": 1.0,
        }
        return tu.get_tensordict(columns, settings)

    def _train_step(self, batches: Iterator[dict[str, Any]]) -> dict[str, float]:
        from time import perf_counter

        import verl.utils.tensordict_utils as tu
        from verl.utils.metric import reduce_metrics

        start = perf_counter()
        batch = self._batch(next(batches))
        num_tokens = self._sum_over_dp(float(batch["input_ids"].values().numel()))
        output = self.worker.train_batch(batch)
        metrics = reduce_metrics(tu.get_non_tensor_data(output, "metrics", None) or {}) if output is not None else {}
        seconds = perf_counter() - start
        metrics.pop("worker_seconds", None)
        # Of mtp/loss the last part would be the main loss's name.
        named = {
            name if name.startswith("mtp/") else f"train/{name.rsplit('/', 1)[-1]}": value
            for name, value in metrics.items()
        }
        return named | {
            "train/global_tokens": num_tokens,
            "train/tokens_per_s": num_tokens / seconds,
            "train/step_seconds": seconds,
            "train/epoch": float(self.loader.epoch),
        }

    def _sum_over_dp(self, value: float) -> float:
        """Sum of a number over the data-parallel ranks; each rank of a model-parallel group passes the same value."""
        return self._sum_over_world(value) / (self.worker.world_size // self.dp_size)

    def _sum_over_world(self, *values: float) -> Any:
        """Sums over all ranks, on the host: every backend that `Worker.init_distributed` chooses has gloo for it."""
        import torch
        import torch.distributed as dist

        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return packed.item() if len(values) == 1 else packed.tolist()

    def validate(self) -> float:
        """Mean cross-entropy, in nats, over the target tokens of all validation rows.

        The sum and the count are added over all rows before they are divided, so the value depends neither on the batch
        size nor on the ranks.
        """
        import verl.utils.tensordict_utils as tu

        rows_per_rank = -(-self.config.data.train_batch_size // self.dp_size)
        total, count = 0.0, 0.0
        for rows, num_real in self._val_rows(rows_per_rank):
            columns = self.collate([self.val_dataset[row] for row in rows])
            batch = self._batch(columns)
            tu.assign_non_tensor(batch, calculate_entropy=False)
            output = self.worker.infer_batch(batch)
            if output is None or not self.worker.engine.is_mp_src_rank_with_outputs():
                continue
            loss, tokens = target_nll(output["log_probs"], columns["loss_mask"], num_real)
            total, count = total + loss, count + tokens
        total, count = self._sum_over_world(total, count)
        return total / count if count else float("nan")

    def _val_rows(self, rows_per_rank: int) -> Iterator[tuple[list[int], int]]:
        """(row numbers of a batch of this rank, how many of them count); all ranks get equally many rows.

        What is missing to whole micro-batches on every rank is filled with row 0, which does not count: the engine's
        collectives need every rank.
        """
        data, engine, num_rows = self.config.data, self.config.engine, len(self.val_dataset)
        for start in range(0, num_rows, rows_per_rank * self.dp_size):
            whole = min(rows_per_rank * self.dp_size, num_rows - start)
            share = -(-whole // self.dp_size)
            mine = list(range(start + self.dp_rank * share, min(start + (self.dp_rank + 1) * share, start + whole)))
            micro = 1 if data.use_dynamic_bsz else data.micro_batch_size_per_gpu
            if engine.virtual_pipeline_model_parallel_size:  # they take a multiple of this many micro-batches
                micro *= engine.pipeline_model_parallel_size
            padded = -(-share // micro) * micro
            yield mine + [0] * (padded - len(mine)), len(mine)

    def _barrier(self) -> None:
        self._sum_over_world(0.0)

    def _save(self) -> None:
        """Write a checkpoint with all ranks; it counts as complete when every rank has written its part."""
        import torch

        folder = self.checkpoints.incomplete_path(self.step)
        if self.is_first_rank:
            self.checkpoints.begin(self.step)
        self._barrier()
        self.worker.save_checkpoint(folder, global_step=self.step)
        contents = self.config.checkpoint.save_contents
        if "hf_model" in contents or self.step == self.total_steps:
            self.worker.export_hf(os.path.join(folder, "huggingface"))
        if self.is_first_rank:
            torch.save({"step": self.step, "loader": self.loader.state_dict()}, os.path.join(folder, "data.pt"))
        self._barrier()
        if self.is_first_rank:
            self.checkpoints.commit(self.step)
        self._barrier()

    def _load(self, source: str) -> None:
        import torch

        path = os.path.join(source, "data.pt")
        if not os.path.exists(path):
            raise ValueError(f"{source} is no complete checkpoint: data.pt is missing")
        state = torch.load(path, weights_only=True)
        self.loader.load_state_dict(state["loader"])
        self.worker.load_checkpoint(source)
        self.step = state["step"]
        if self.is_first_rank:
            print(f"resumed from {source}: {self.step} of {self.total_steps} steps are done")


def target_nll(log_probs: Any, loss_mask: Any, num_rows: int) -> tuple[float, float]:
    """Negative log-likelihood of the targets of the first ``num_rows`` rows.

    Args:
        log_probs: jagged [B, j] in nats; entry t belongs to the prediction of token t + 1 of its sequence.
        loss_mask: jagged [B, j], 1 where the token itself is a target.
        num_rows: rows that count.

    Returns:
        (sum in nats, number of target tokens).
    """
    total, count = 0.0, 0.0
    for row_log_probs, row_mask in zip(log_probs.unbind()[:num_rows], loss_mask.unbind()[:num_rows], strict=True):
        targets = row_mask[1:].bool()
        total -= row_log_probs[:-1].to(targets.device)[targets].double().sum().item()
        count += targets.sum().item()
    return total, count


if __name__ == "__main__":
    main()
