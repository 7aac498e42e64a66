# SPDX-License-Identifier: Apache-2.0
"""Batches of a data set in a seeded order that can be left and taken up again at any batch.

The order is a function of (seed, epoch) alone and the position counts the batches the caller has received. So a resumed
run sees exactly the rows that the uninterrupted one would have seen, whatever worker processes had prefetched.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch import Generator, randperm
from torch.utils.data import DataLoader, Dataset

from verl.utils.run_length import check_warmup, resolve_total_steps

__all__ = ["ResumableLoader", "check_warmup", "resolve_total_steps"]


class ResumableLoader:
    """Endless iterator over batches, epoch after epoch.

    Args:
        dataset: a map-style data set.
        batch_size: rows in a batch over all ranks. An incomplete last batch of an epoch is left out: its rows come up
            in other epochs, in another order.
        collate_fn: list of rows -> batch.
        shuffle: a new order for each epoch; otherwise the order of the data set.
        seed: of the order.
        num_workers: processes that read ahead, at most one per core; 0 reads in this process.
        shard: (rank, number of ranks): this rank gets its contiguous part of each batch. The batches as a whole do not
            depend on the number of ranks.

    Raises:
        ValueError: the data set is smaller than one batch, or the batch does not divide over the ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        collate_fn: Callable,
        shuffle: bool = True,
        seed: int = 1,
        num_workers: int = 0,
        shard: tuple[int, int] = (0, 1),
    ):
        assert isinstance(dataset, Sized)
        if len(dataset) < batch_size:
            raise ValueError(
                f"data.train_batch_size={batch_size} is more than the {len(dataset)} rows of the training data; "
                f"the largest possible value is {len(dataset)}"
            )
        if batch_size % shard[1]:
            nearest = max(1, round(batch_size / shard[1])) * shard[1]
            raise ValueError(
                f"data.train_batch_size={batch_size} is not a multiple of the {shard[1]} data-parallel ranks; "
                f"the nearest right value is {nearest}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.shuffle = shuffle
        self.seed = int(seed)
        self.num_workers = min(num_workers, os.cpu_count() or 1)
        self.shard = shard
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.dataset) // self.batch_size

    def _rows_of_epoch(self) -> list[list[int]]:
        """Row numbers of the epoch's remaining batches, this rank's part."""
        if self.shuffle:
            order = randperm(len(self.dataset), generator=Generator().manual_seed(self.seed + self.epoch)).tolist()
        else:
            order = list(range(len(self.dataset)))
        rank, num_ranks = self.shard
        rows = self.batch_size // num_ranks
        starts = (b * self.batch_size + rank * rows for b in range(self.position, len(self)))
        return [order[start : start + rows] for start in starts]

    def __iter__(self) -> Iterator:
        while True:
            batches = DataLoader(
                self.dataset,
                batch_sampler=self._rows_of_epoch(),
                collate_fn=self.collate_fn,
                num_workers=self.num_workers,
                multiprocessing_context=self._worker_context() if self.num_workers else None,
                worker_init_fn=_end_with_trainer if self.num_workers else None,
            )
            for batch in batches:
                self.position += 1
                yield batch
            self.epoch, self.position = self.epoch + 1, 0

    def _worker_context(self) -> Any:
        """Reader processes start from a clean server: forking this process, with Ray's threads in it, can deadlock."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", type(self.dataset).__module__])
        return context

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands, in plain numbers."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "num_rows": len(self.dataset),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state``.

        Raises:
            ValueError: the data, the batch size or the seed are not those the state was taken with.
        """
        mine = self.state_dict()
        changed = [key for key in ("seed", "batch_size", "num_rows") if state[key] != mine[key]]
        if changed:
            what = ", ".join(f"{key} was {state[key]} and is {mine[key]}" for key in changed)
            raise ValueError(f"the checkpoint's position in the training data does not fit this run: {what}")
        self.epoch, self.position = state["epoch"], state["position"]


def _end_with_trainer(worker_id: int) -> None:
    """Let this reader process end with the process that it reads for.

    A killed process cannot end its readers, and they would wait for it for ever: what forked them is a server that
    lives as long as they do.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None  # a reader was forked by something

    def wait() -> None:
        trainer.join()  # a pipe that closes with it
        os._exit(1)

    threading.Thread(target=wait, name="end-with-trainer", daemon=True).start()
