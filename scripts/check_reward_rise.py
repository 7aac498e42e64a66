# SPDX-License-Identifier: Apache-2.0
"""Check that a metric rose during a run, from the metrics.jsonl that ``trainer.logger=[file]`` writes.

The mean over the last ``--window`` steps must be at least ``--least`` above the mean over the first.
Exit code 0: it is. 1: it is not, or a value is missing or not finite. 2: the file cannot be read or is too short.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path


def read_metric(path: Path, key: str) -> dict[int, float]:
    """Step -> value of every line that has the metric; null, which stands for NaN and infinity, becomes NaN.

    Of a step that was logged twice (a run that was resumed) the last line counts.

    Raises:
        ValueError: a line is no JSON object of the form ``{"step": 1, "data": {...}}``.
    """
    values = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            if key in entry["data"]:
                value = entry["data"][key]
                values[int(entry["step"])] = math.nan if value is None else float(value)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is not a line of metrics: {line[:80]!r}") from error
    return dict(sorted(values.items()))


def measure_rise(values: Sequence[float], window: int) -> tuple[float, float]:
    """Means of the first and of the last ``window`` values.

    Raises:
        ValueError: there are fewer than twice as many values, so that the two windows would overlap.
    """
    if window < 1 or len(values) < 2 * window:
        raise ValueError(f"{len(values)} steps are too few for two windows of {window}")
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:])


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="metrics.jsonl")
    parser.add_argument("--key", default="critic/score/mean", help="the metric")
    parser.add_argument("--window", type=int, default=10, help="steps at either end")
    parser.add_argument("--least", type=float, default=0.05, help="least rise")
    args = parser.parse_args(argv)
    try:
        values = read_metric(args.file, args.key)
        if not values:
            raise ValueError(f"{args.file} has no {args.key!r}")
        first, last = measure_rise(list(values.values()), args.window)
    except (OSError, ValueError) as error:
        print(f"check_reward_rise: {error}", file=sys.stderr)
        return 2
    # Anywhere in the run, not only in the windows: a reward that was not a number for a while is a fault.
    finite = all(map(math.isfinite, values.values()))
    risen = finite and last - first >= args.least
    verdict = "rose" if risen else "DID NOT RISE ENOUGH" if finite else "IS NOT FINITE at some steps"
    print(
        f"{args.key} {verdict}: {first:.4f} over the first {args.window} of {len(values)} steps, "
        f"{last:.4f} over the last {args.window} (least rise {args.least:g})"
    )
    return 0 if risen else 1


if __name__ == "__main__":
    raise SystemExit(main())
