# SPDX-License-Identifier: Apache-2.0
"""What generation and evaluation would do: they train nothing, so they have rows and workers, and no layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from verl.trainer.dry_run.batches import count_rows


@dataclass(frozen=True)
class OfflineReport:
    """Numbers of a generation or an evaluation; None where the files cannot be read or the command has none.

    Attributes:
        rows: of the files.
        rows_used: after ``data.max_samples``.
        workers: processes, each with a whole copy of the model.
        samples: responses to each prompt.
        responses: in all.
        batch_size: prompts at a time over all workers.
        batches: how many of these.
        rows_per_worker: responses that a worker writes at a time.
        longest: tokens of a prompt and its response at most.
        output: the file to write.
    """

    rows: int | None
    rows_used: int | None
    workers: int | None = None
    samples: int | None = None
    responses: int | None = None
    batch_size: int | None = None
    batches: int | None = None
    rows_per_worker: int | None = None
    longest: int | None = None
    output: str | None = None


def describe_generation(tree: Mapping, workers: int) -> OfflineReport:
    """The numbers of a generation on ``workers`` processes."""
    data, rollout = tree["data"], tree["rollout"]
    rows = used = count_rows(data["path"])
    if rows is not None and 0 <= data["max_samples"] < rows:
        used = data["max_samples"]
    n, size = data["n_samples"], data["batch_size"]
    return OfflineReport(
        rows=rows,
        rows_used=used,
        workers=workers,
        samples=n,
        responses=None if used is None else used * n,
        batch_size=size,
        batches=None if used is None else ceil(used / size),
        rows_per_worker=ceil((size if used is None else min(size, used)) * n / workers),
        longest=rollout["prompt_length"] + rollout["response_length"],
        output=data["output_path"],
    )


def describe_evaluation(tree: Mapping) -> OfflineReport:
    """The numbers of an evaluation, which has no worker of its own."""
    rows = count_rows(tree["data"]["path"])
    return OfflineReport(rows=rows, rows_used=rows, output=tree["data"]["output_path"])
