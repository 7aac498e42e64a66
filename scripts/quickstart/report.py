# SPDX-License-Identifier: Apache-2.0
"""What the quickstart shows at its end: curves, a summary, and a check of the saved model with plain transformers."""

import importlib.metadata
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

VALIDATION_KEY = "val-core/arithmetic/reward/mean@1"
PACKAGES = ("torch", "transformers", "megatron-core", "megatron-bridge", "ray", "tensordict")
# Prompts whose answer may turn over because sums are added in another order; a wrong export changes hundreds.
MAX_TURNED_ANSWERS = 4


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of each line of a JSONL log."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["data"]) for line in lines]


def series(metrics: list[tuple[int, dict[str, float]]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    found = [(step, data[key]) for step, data in metrics if data.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw_curves(metrics: list[tuple[int, dict[str, float]]], path: Path) -> None:
    """PNG of training reward and held-out exact match over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=150)
    axes.plot(*series(metrics, "critic/score/mean"), color="#8aa9c9", label="reward of sampled training answers")
    axes.plot(*series(metrics, VALIDATION_KEY), color="#c0392b", marker="o", label="held-out exact match (greedy)")
    axes.set(xlabel="GRPO step", ylabel="share of right answers", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def score_with_transformers(model_folder: Path, data_file: Path, batch_size: int = 500) -> float:
    """Share of the rows of ``data_file`` that the saved model answers right, greedily and with plain transformers."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = pq.read_table(data_file).to_pylist()
    num_right = 0
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in part]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=4)
        answers = output[:, inputs["input_ids"].shape[1] :].tolist()
        for row, answer in zip(part, answers, strict=True):
            ended = tokenizer.eos_token_id in answer
            text = tokenizer.decode(answer[: answer.index(tokenizer.eos_token_id)] if ended else answer)
            num_right += ended and text == row["reward_model"]["ground_truth"]
    return num_right / len(rows)


def versions() -> dict[str, str]:
    """Versions of Python, this package and what it stands on."""
    root = Path(__file__).resolve().parent.parent.parent
    own = (root / "verl" / "version" / "version").read_text().strip()
    return {"python": platform.python_version(), "verl": own} | {
        name: importlib.metadata.version(name) for name in PACKAGES
    }


def summarise(metrics: list[tuple[int, dict[str, float]]], seconds: dict[str, float]) -> dict[str, Any]:
    """The numbers of a GRPO run: held-out score before and after, median seconds of a step and of its phases.

    The first two steps are left out of the medians: they pay for what is set up once.
    """
    steps, held_out = series(metrics, VALIDATION_KEY)
    timed = [data for step, data in metrics if step > 2 and "timing_s/step" in data]
    phases = sorted({key for data in timed for key in data if key.startswith("timing_s/")})
    medians = {
        key.removeprefix("timing_s/"): statistics.median(data[key] for data in timed if key in data) for key in phases
    }
    return {
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "held_out_by_step": dict(zip(map(str, steps), held_out, strict=True)),
        "grpo_step_seconds": medians.get("step"),
        "grpo_phase_seconds": medians,
        "seconds": seconds | {"total": sum(seconds.values())},
    }


def write_report(folder: Path, model: Path, seed: int, context_parallel: int, seconds: dict[str, float]) -> None:
    """Write curves.png and summary.json and print the summary.

    Args:
        folder: of the quickstart; ``grpo/metrics.jsonl`` and ``data/test.parquet`` are read.
        model: the trained model in Hugging Face format.
        seed: of the run.
        context_parallel: context parallel size of the run.
        seconds: wall time of the phases so far.

    Raises:
        SystemExit: the saved model does not score what the last validation said.
    """
    start = time.perf_counter()
    metrics = read_metrics(folder / "grpo" / "metrics.jsonl")
    draw_curves(metrics, folder / "curves.png")
    data_file = folder / "data" / "test.parquet"
    rescored = score_with_transformers(model, data_file)
    seconds = seconds | {"report": time.perf_counter() - start}
    summary = {"seed": seed, "context_parallel_size": context_parallel} | summarise(metrics, seconds)
    summary |= {"held_out_rescored_with_transformers": rescored, "versions": versions()}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    phases = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    print(f"""
held-out exact match   {summary["held_out_before"]:.3f} -> {summary["held_out_after"]:.3f}
saved model, rescored  {rescored:.3f}   ({model})
GRPO step              {summary["grpo_step_seconds"]:.2f} s (median)
time                   {phases}; {summary["seconds"]["total"]:.0f} s in all
curves                 {folder / "curves.png"}
logs                   {folder / "grpo" / "metrics.jsonl"}, {folder / "grpo" / "tensorboard"}
summary                {folder / "summary.json"}""")
    if abs(rescored - summary["held_out_after"]) * 2000 > MAX_TURNED_ANSWERS + 0.5:
        raise SystemExit("quickstart: the saved model does not score what the last validation said")
