# SPDX-License-Identifier: Apache-2.0
"""Seconds of one GRPO step of the quickstart (32 prompts x 8 answers), by phase.

``python3 scripts/bench/grpo_step.py [--steps N]`` trains the quickstart's random model, without the warm-up, and writes
``scripts/bench/results/grpo_step.json``: median and quartiles over the steps after the first ten, the machine, and the
versions. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO_ROOT / "scripts" / "quickstart"))
WARM_UP_STEPS = 10
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers", "ray", "tensordict")


def processor() -> str:
    """The processor's name as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: round(1e3 * x, 2) for name, x in (("q1", low), ("median", middle), ("q3", high))}


def measure(folder: Path, steps: int) -> dict:
    """Train ``steps`` steps in ``folder``; returns the phases' spread."""
    from run import choose_layout, grpo_command

    num_workers, context_parallel = choose_layout()
    model = folder / "model"
    for arguments in (
        ["examples/data_preprocess/arithmetic.py", "--local_save_dir", str(folder / "data")],
        ["scripts/init_random_model.py", "--out", str(model)],
        [
            *grpo_command(folder, model, 0, steps, -1, num_workers, context_parallel),
            *("trainer.val_before_train=False", "trainer.save_freq=-1", f"hydra.run.dir={folder / 'hydra'}"),
        ],
    ):
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
        subprocess.run([sys.executable, *arguments], cwd=REPO_ROOT, env=environment, check=True)
    lines = (folder / "grpo" / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line)["data"] for line in lines][WARM_UP_STEPS:]
    phases = sorted(key for key in measured[0] if key.startswith("timing_s/"))
    return {
        "workers": num_workers,
        "context_parallel_size": context_parallel,
        "steps": len(measured),
        "milliseconds": {key.removeprefix("timing_s/"): spread([step[key] for step in measured]) for key in phases},
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=REPO_ROOT / "scripts" / "bench" / "results" / "grpo_step.json")
    args = parser.parse_args()
    if args.steps < WARM_UP_STEPS + 5:
        parser.error(f"--steps={args.steps} leaves too few after {WARM_UP_STEPS}; use {WARM_UP_STEPS + 5} or more")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.steps)
    result["load_average"] = os.getloadavg()[0]
    result["machine"] = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    result["versions"] = {name: version(name) for name in PACKAGES}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
