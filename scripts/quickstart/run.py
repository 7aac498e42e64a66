# SPDX-License-Identifier: Apache-2.0
"""The quickstart: data and a random model, supervised warm-up, GRPO, report. Called by ``scripts/quickstart.sh``.

The two trainings are the commands a user would type; they are printed before they run.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT_TOKENS, ANSWER_TOKENS = 6, 4  # "17+25=" and "240" with its end token


def parse_arguments() -> argparse.Namespace:
    """Command line; the step counts are for trying the script out, the defaults are the ones that learn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the sampling")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="folder to write")
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--grpo-steps", type=int, default=250)
    parser.add_argument("--test-freq", type=int, default=25, help="steps between validations on all held-out prompts")
    return parser.parse_args()


def choose_layout() -> tuple[int, int]:
    """(worker processes, context parallel size): 2 and 2 on CPUs and on two or more accelerators, 1 and 1 on one."""
    from verl.utils.device import get_device_name, get_torch_device

    if get_device_name() == "cpu" or get_torch_device().device_count() >= 2:
        return 2, 2
    print("one accelerator only: context parallel size 1 (two ranks cannot share one)")
    return 1, 1


def sft_command(folder: Path, seed: int, steps: int, num_workers: int) -> list[str]:
    """The warm-up: imitate the flawed teacher, data-parallel."""
    return [
        *("-m", "verl.trainer.sft_trainer", "engine=megatron", "optim=megatron", "model=hf_model"),
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'data' / 'sft_train.parquet'}",
        "data.train_batch_size=128",
        f"data.max_length={PROMPT_TOKENS + ANSWER_TOKENS}",
        *("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=2048", "data.num_workers=0"),
        *("engine.dtype=float32", f"engine.seed={seed}"),
        *("optim.lr=1e-3", "optim.betas=[0.9,0.99]", "optim.clip_grad=1.0"),
        *(f"trainer.n_gpus_per_node={num_workers}", f"trainer.seed={seed}"),
        *(f"trainer.total_training_steps={steps}", "trainer.total_epochs=7", f"trainer.save_freq={steps}"),
        *("trainer.resume_mode=disable", "trainer.logger=[file,tensorboard]"),
        *(
            "trainer.project_name=quickstart",
            "trainer.experiment_name=sft",
            f"trainer.default_local_dir={folder / 'sft'}",
        ),
    ]


def grpo_command(
    folder: Path, model: Path, seed: int, steps: int, test_freq: int, num_workers: int, context_parallel: int
) -> list[str]:
    """GRPO: 32 prompts with 8 answers each in a step, one update per step."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *("-m", "verl.trainer.main_ppo", "model_engine=megatron", "algorithm.adv_estimator=grpo"),
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        f"data.val_files={folder / 'data' / 'test.parquet'}",
        *("data.train_batch_size=32", f"data.max_prompt_length={PROMPT_TOKENS}"),
        *(f"data.max_response_length={ANSWER_TOKENS}", f"data.seed={seed}", "data.dataloader_num_workers=0"),
        f"actor_rollout_ref.model.path={model}",
        f"{actor}.megatron.context_parallel_size={context_parallel}",
        *(f"{actor}.megatron.dtype=float32", f"{actor}.megatron.seed={seed}"),
        *(f"{actor}.ppo_mini_batch_size=32", f"{actor}.use_dynamic_bsz=True"),
        f"{actor}.ppo_max_token_len_per_gpu=4096",
        *(f"{actor}.optim.lr=4e-4", f"{actor}.optim.betas=[0.9,0.99]", f"{actor}.optim.weight_decay=0.0"),
        *(f"{actor}.optim.lr_warmup_steps=5", f"{actor}.optim.lr_decay_style=linear", f"{actor}.optim.min_lr=4e-5"),
        f"{actor}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *(
            f"{rollout}.name=hf",
            f"{rollout}.n=8",
            f"{rollout}.temperature=1.0",
            f"{rollout}.dtype=float32",
            f"{rollout}.seed={seed}",
        ),
        *(f"trainer.n_gpus_per_node={num_workers}", "trainer.nnodes=1", f"trainer.total_training_steps={steps}"),
        *("trainer.total_epochs=1", f"trainer.test_freq={test_freq}", "trainer.val_before_train=True"),
        *(f"trainer.save_freq={steps}", "trainer.resume_mode=disable", "trainer.logger=[file,tensorboard]"),
        *("trainer.project_name=quickstart", "trainer.experiment_name=grpo"),
        f"trainer.default_local_dir={folder / 'grpo'}",
    ]


def run_python(arguments: list[str]) -> None:
    """Run this Python with ``arguments`` in the repository root, printing the command; exits if it fails."""
    print(f"\n$ python3 {shlex.join(arguments)}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([sys.executable, *arguments], cwd=REPO_ROOT, env=environment | os.environ)
    if done.returncode:
        print(f"quickstart: the command above failed with exit code {done.returncode}", file=sys.stderr)
        raise SystemExit(done.returncode if done.returncode > 0 else 1)


def clear_own_folder(folder: Path) -> None:
    """Remove what an earlier quickstart wrote to ``folder``; ends the program for a folder that holds other things."""
    marker = folder / ".quickstart"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        print(f"quickstart: --out={folder} holds files of something else; name a new or empty folder", file=sys.stderr)
        raise SystemExit(2)
    for name in ("data", "model", "sft", "grpo"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()


def main() -> None:
    """Run all phases and print what came out."""
    args = parse_arguments()
    folder = args.out if args.out.is_absolute() else REPO_ROOT / args.out
    clear_own_folder(folder)
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    with phase("prepare"):
        num_workers, context_parallel = choose_layout()
        run_python(["examples/data_preprocess/arithmetic.py", "--local_save_dir", str(folder / "data")])
        run_python(["scripts/init_random_model.py", "--out", str(folder / "model"), "--seed", str(args.seed)])
    with phase("sft"):
        run_python(sft_command(folder, args.seed, args.sft_steps, num_workers))
    warm = folder / "sft" / f"global_step_{args.sft_steps}" / "huggingface"
    with phase("grpo"):
        run_python(
            grpo_command(folder, warm, args.seed, args.grpo_steps, args.test_freq, num_workers, context_parallel)
        )
    trained = folder / "grpo" / f"global_step_{args.grpo_steps}" / "actor" / "huggingface"

    from report import write_report

    write_report(folder, trained, args.seed, context_parallel, seconds)


if __name__ == "__main__":
    main()
