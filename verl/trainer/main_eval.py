# SPDX-License-Identifier: Apache-2.0
"""Command line that scores responses: ``python3 -m verl.trainer.main_eval key=value ...``.

Reads a file of ``verl.trainer.main_generation`` and scores each response with the function that training would use.
Needs neither torch nor Ray.
"""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.dry_run.command import run_command
from verl.trainer.ppo.preflight_offline import validate_evaluation_config
from verl.utils.config import omega_conf_to_dataclass

logger = logging.getLogger(__name__)


def main() -> None:
    """Read the command line, check it, score; exits non-zero on any failure."""
    run_command(prepare, "evaluation")


def prepare(config: DictConfig) -> Callable[[], None]:
    """Check ``config``, read the responses, find the score function; returns the scoring, a function of no arguments.

    Raises:
        ValueError: the configuration, a row or the score function cannot be used.
    """
    validate_evaluation_config(config)
    calls, rows = read_calls(config)
    function = score_function(config)
    return lambda: report(config, score(config, function, calls, rows))


def read_calls(config: DictConfig) -> tuple[list[dict[str, Any]], list[int]]:
    """The keywords of the score function for every response, and the row each one comes from.

    Raises:
        ValueError: a row's responses are not a list of texts, or it has none.
    """
    import pandas as pd

    data = config.data
    paths = [data.path] if isinstance(data.path, str) else list(data.path)
    calls, rows, number = [], [], 0
    for path in map(Path, paths):
        file, is_lines = path.expanduser(), path.suffix == ".jsonl"
        try:
            frame = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_json(file, lines=is_lines)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.path: {path} could not be read: {str(error).splitlines()[0]}") from error
        for row in frame.to_dict("records"):
            texts = row[data.response_key]
            if isinstance(texts, str) or not hasattr(texts, "__len__") or not all(isinstance(t, str) for t in texts):
                raise ValueError(
                    f"data.path: {path}: row {number} of column {data.response_key!r} must be a list of texts, such as "
                    f'["240", "042"], not {str(texts)[:60]!r}'
                )
            if not len(texts):
                raise ValueError(f"data.path: {path}: row {number} of column {data.response_key!r} has no response")
            where = f"data.path: {path}: row {number}"
            answer, info = row[data.reward_model_key], row.get("extra_info")
            if not isinstance(answer, dict) or "ground_truth" not in answer:
                raise ValueError(
                    f"{where} of column {data.reward_model_key!r} must hold a ground_truth, not {str(answer)[:60]!r}"
                )
            if isinstance(info, str | list):
                raise ValueError(f"{where} of column 'extra_info' must hold an object, not {str(info)[:60]!r}")
            finished = row.get("finished", [None] * len(texts))
            if not hasattr(finished, "__len__") or len(finished) != len(texts):
                raise ValueError(
                    f"{where} of column 'finished' must be a list of {len(texts)} values, one for each response, not "
                    f"{str(finished)[:60]!r}"
                )
            for text, ended in zip(texts, finished, strict=True):
                calls.append(
                    {
                        "data_source": row[data.data_source_key],
                        "solution_str": text,
                        "ground_truth": answer["ground_truth"],
                        "extra_info": dict(info if isinstance(info, dict) else {})
                        | ({} if ended is None else {"finished": bool(ended)}),
                    }
                )
                rows.append(number)
            number += 1
    return calls, rows


def score_function(config: DictConfig) -> Callable[..., Any]:
    """The user's own score function, or the rules of the data sources."""
    from verl.utils.file_function import FileFunction
    from verl.utils.reward_score import default_compute_score

    custom = OmegaConf.to_container(config.custom_reward_function, resolve=True)
    if not custom["path"]:
        return default_compute_score
    return FileFunction("custom_reward_function", custom["path"], custom["name"], custom["reward_kwargs"])


def score(
    config: DictConfig, function: Callable[..., Any], calls: list[dict[str, Any]], rows: list[int]
) -> dict[str, dict[str, float]]:
    """Score every response.

    Returns:
        data source -> `num_prompts`, `num_responses`, `num_failures` (responses that could not be scored and count 0),
        `mean` (score, over responses of a prompt, then over prompts), `pass@1` and, for n > 1 responses, `pass@n`.
    """
    from verl.utils.scorer import Scorer

    options: Any = omega_conf_to_dataclass(config.scoring, path="scoring")
    scorer = Scorer(function, options.timeout, options.num_workers, options.executor)
    outcomes = scorer(calls)
    scorer.close()
    by_source: dict[str, dict[int, list[tuple[float, bool]]]] = defaultdict(lambda: defaultdict(list))
    failures: dict[str, int] = defaultdict(int)
    for call, row, outcome in zip(calls, rows, outcomes, strict=True):
        source = call["data_source"]
        value = outcome.value if isinstance(outcome.value, dict) else {"score": outcome.value}
        try:
            number, right = float(value["score"]), float(value.get("acc", value["score"]))
            if not math.isfinite(number):
                raise ValueError(f"the score is {number}")
        except Exception as error:  # what the user's function returned, or did not
            reason = "its time was up" if outcome.timed_out else repr(outcome.error or error)
            logger.warning("scoring failed for row %d (data_source %r), score 0: %s", row, source, reason)
            failures[source] += 1
            number, right = 0.0, -math.inf
        by_source[source][row].append((number, right >= config.pass_score))
    return {
        source: _summary(prompts.values()) | {"num_failures": failures[source]} for source, prompts in by_source.items()
    }


def _summary(prompts: Iterable[list[tuple[float, bool]]]) -> dict[str, float]:
    prompts = list(prompts)
    n = min(len(samples) for samples in prompts)
    means = [sum(score for score, _ in samples) / len(samples) for samples in prompts]
    passed = [(len(samples), sum(right for _, right in samples)) for samples in prompts]
    result = {
        "num_prompts": len(prompts),
        "num_responses": sum(map(len, prompts)),
        "mean": sum(means) / len(prompts),
    }
    for k in sorted({1, n}):
        result[f"pass@{k}"] = sum(pass_at_k(total, right, k) for total, right in passed) / len(prompts)
    return result


def pass_at_k(total: int, right: int, k: int) -> float:
    """Probability that k of a prompt's ``total`` responses, drawn without replacement, hold one of the ``right`` ones
    (Chen et al. 2021, arXiv:2107.03374, equation 1)."""
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def report(config: DictConfig, results: dict[str, dict[str, float]]) -> None:
    """Print the numbers, one line for each data source, and write them to ``data.output_path``."""
    for source, numbers in sorted(results.items()):
        print(f"{source}: " + ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()))
    if config.data.output_path:
        path = Path(config.data.output_path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
