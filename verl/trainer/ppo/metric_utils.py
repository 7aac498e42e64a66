# SPDX-License-Identifier: Apache-2.0
"""Numbers for the log, computed from a finished batch on the driver. All values are plain Python floats."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import verl.utils.tensordict_utils as tu
from verl.protocol import DataProto
from verl.utils.metric import reduce_metrics

# Workers may put the seconds they worked under this name into their metrics; it is not logged.
WORKER_SECONDS = "worker_seconds"


def worker_report(output: TensorDict) -> tuple[dict[str, float], list[float]]:
    """Split the ``metrics`` that workers return: (numbers for the log, the seconds they worked if they say so)."""
    metrics = reduce_metrics(tu.get_non_tensor_data(output, "metrics", None) or {})
    seconds = [metrics.pop(WORKER_SECONDS)] if WORKER_SECONDS in metrics else []
    return metrics, seconds


class PhaseTimer:
    """Seconds by phase of one training step.

    ``seconds[name]`` is the wall time of a phase as the driver sees it. ``worker_seconds`` sums what the workers
    worked, so that ``step - worker_seconds`` is what the controller costs.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.worker_seconds = 0.0

    @contextmanager
    def phase(self, name: str):
        """Time the body under ``name``; a name used twice adds up."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    @contextmanager
    def worker_call(self, name: str):
        """Time a phase in which the driver waits for workers.

        The body may put the seconds that the workers report for themselves into the yielded list; without a report the
        whole wait counts as their work.
        """
        reported: list[float] = []
        start = perf_counter()
        try:
            with self.phase(name):
                yield reported
        finally:
            waited = perf_counter() - start
            self.worker_seconds += min(sum(reported), waited) if reported else waited


def _spread(values: torch.Tensor, name: str) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    mean, top, low = torch.stack([values.mean(), values.max(), values.min()]).tolist()
    return {f"{name}/mean": mean, f"{name}/max": top, f"{name}/min": low}


def compute_data_metrics(batch: DataProto) -> dict[str, float]:
    """Scores, rewards, advantages and lengths of a training batch.

    A row's length counts real tokens. ``response_length/clip_ratio`` is the share of responses that fill the whole
    width R (they were cut off, or ended exactly there). Reads attention_mask [B, P+R], response_mask,
    token_level_scores, token_level_rewards, advantages, returns, and values if there are, [B, R].
    """
    data = batch.batch
    mask = data["response_mask"].bool()
    width = data["responses"].shape[-1]
    attention = data["attention_mask"]
    response_length = attention[:, -width:].sum(-1).float()
    prompt_length = attention[:, :-width].sum(-1).float()

    metrics = _spread(data["token_level_scores"].sum(-1), "critic/score")
    metrics |= _spread(data["token_level_rewards"].sum(-1), "critic/rewards")
    metrics |= _spread(data["advantages"][mask], "critic/advantages")
    metrics |= _spread(data["returns"][mask], "critic/returns")
    if "values" in data.keys():
        metrics |= _value_metrics(data["values"][mask], data["returns"][mask])
    metrics |= _spread(response_length, "response_length")
    metrics |= _spread(prompt_length, "prompt_length")
    metrics["response_length/clip_ratio"] = (response_length == width).float().mean().item()
    metrics["prompt_length/clip_ratio"] = (prompt_length == attention.shape[-1] - width).float().mean().item()
    metrics["response/trained_tokens"] = float(mask.sum().item())
    return metrics


def _value_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Values of response tokens, and the share of the returns' variance that they explain (0 for returns that do not
    vary)."""
    metrics = _spread(values, "critic/values")
    if values.numel():
        variance = returns.double().var(correction=0)
        left = (returns.double() - values.double()).var(correction=0)
        metrics["critic/vf_explained_var"] = (1 - left / variance).item() if variance > 0 else 0.0
    return metrics


def compute_rollout_gap_metrics(batch: DataProto) -> dict[str, float]:
    """How far the rollout's probabilities are from the trainer's, over response tokens; empty without both.

    Reads rollout_log_probs and old_log_probs, [B, R].
    """
    data = batch.batch
    if "rollout_log_probs" not in data.keys() or "old_log_probs" not in data.keys():
        return {}
    mask = data["response_mask"].bool()
    gap = (data["rollout_log_probs"][mask].exp() - data["old_log_probs"][mask].exp()).abs()
    if gap.numel() == 0:
        return {}
    return {
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_max": gap.max().item(),
    }


def compute_timing_metrics(timer: PhaseTimer) -> dict[str, float]:
    """Seconds by phase, and ``timing_s/controller``: the step without the work of the workers.

    Needs the phase "step", which holds the training work only: validation and checkpoints are timed beside it.
    """
    metrics = {f"timing_s/{name}": seconds for name, seconds in timer.seconds.items()}
    metrics["timing_s/controller"] = max(0.0, timer.seconds["step"] - timer.worker_seconds)
    return metrics


def compute_throughout_metrics(batch: DataProto, timer: PhaseTimer, n_gpus: int) -> dict[str, float]:
    """Tokens per second and device (``perf/throughput``), counting real tokens of prompts and responses.

    The name carries verl's spelling, which user code imports.
    """
    num_tokens = float(batch.batch["attention_mask"].sum().item())
    step = timer.seconds["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": step,
        "perf/throughput": num_tokens / (step * n_gpus),
    }


def _numeric_columns(infos: Mapping[str, Sequence[Any]], num_rows: int) -> dict[str, np.ndarray]:
    """Columns of numbers, with NaN in rows that have None; others (texts, columns of another length) have no mean."""
    columns = {}
    for name, values in infos.items():
        given = [v for v in values if v is not None]
        if given and len(values) == num_rows and all(isinstance(v, int | float | np.number | np.bool_) for v in given):
            columns[name] = np.asarray([np.nan if v is None else v for v in values], dtype=np.float64)
    return columns


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos: Mapping[str, Sequence[Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Validation scores by data source.

    Args:
        data_sources: [N] source of each sample.
        sample_uids: [N] prompt of each sample; the samples of a prompt are averaged before prompts are.
        infos: name -> [N] values; columns that are not numeric are left out, rows with None are left out of their
            column's numbers. "reward" is expected among them.

    Returns:
        source -> variable -> {"mean@n", and for n > 1 samples "best@n", "worst@n", "std@n"}, n being the largest number
        of samples of a prompt of that source. A variable that no row of a source has is not there.
    """
    columns = _numeric_columns(infos, len(data_sources))
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows[str(source)][str(uid)].append(row)
    by_source = {
        source: {name: _over_prompts(values, groups.values()) for name, values in columns.items()}
        for source, groups in rows.items()
    }
    return {source: {name: found for name, found in named.items() if found} for source, named in by_source.items()}


def _over_prompts(values: np.ndarray, groups: Collection[list[int]]) -> dict[str, float]:
    n = max(len(group) for group in groups)  # of all samples: a row without a value must not change the names
    samples = [s for s in (values[group][~np.isnan(values[group])] for group in groups) if len(s)]
    if not samples:
        return {}
    result = {f"mean@{n}": float(np.mean([s.mean() for s in samples]))}
    if n > 1:
        result[f"std@{n}"] = float(np.mean([s.std(ddof=1) if len(s) > 1 else 0.0 for s in samples]))
        result[f"best@{n}"] = float(np.mean([s.max() for s in samples]))
        result[f"worst@{n}"] = float(np.mean([s.min() for s in samples]))
    return result


def flatten_validation_metrics(by_source: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Names for the log: ``val-core/<source>/<variable>/mean@n`` for the variable that decides, ``val-aux/...`` for
    others.

    The deciding variable is "acc" where the reward function reports it, otherwise "reward".
    """
    flat = {}
    for source, variables in by_source.items():
        core = "acc" if "acc" in variables else "reward"
        for name, numbers in variables.items():
            for key, value in numbers.items():
                section = "val-core" if name == core and not key.startswith(("std@", "worst@")) else "val-aux"
                flat[f"{section}/{source}/{name}/{key}"] = value
    return flat
