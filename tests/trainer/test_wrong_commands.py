# SPDX-License-Identifier: Apache-2.0
"""Commands that cannot work: each ends in seconds, non-zero, with one sentence that names the key, and starts nothing.

These are real command lines in real processes on real files; the checks behind them have finer tests in
tests/trainer/ppo.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from verl.utils.tiny_model import save_tiny_qwen3_moe

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0
A = "actor_rollout_ref"


def row(prompt: str = "17+25=", source: str = "arithmetic") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "240"},
        "extra_info": {"index": 0},
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    save_tiny_qwen3_moe(str(folder / "model"), hidden=32, head_dim=8, experts=4, moe_intermediate=16)
    bare = folder / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / "model" / name).read_bytes())
    for name in ("odd", "cut"):
        shutil.copytree(folder / "model", folder / name)
    config = json.loads((folder / "odd" / "config.json").read_text())
    (folder / "odd" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    pd.DataFrame([row() for _ in range(64)]).to_parquet(folder / "good.parquet")
    pd.DataFrame([row() for _ in range(4)]).to_parquet(folder / "short.parquet")
    pd.DataFrame([row(source="nobody") for _ in range(64)]).to_parquet(folder / "unknown.parquet")
    chat = [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}]
    pd.DataFrame([{"messages": chat}] * 64).to_parquet(folder / "chats.parquet")
    pd.DataFrame([{"question": "1+1", "answer": "2"}] * 64).to_parquet(folder / "raw.parquet")
    pd.DataFrame([row("1" * 40) for _ in range(64)]).to_parquet(folder / "long.parquet")
    (folder / "broken.parquet").write_text("not parquet")
    (folder / "rows.jsonl").write_text(json.dumps({"messages": "none"}) + "\n")
    (folder / "score.py").write_text("def compute_score(*a, **k):\n    return 0.0\n")
    return folder


def ppo(files: Path, *changes: str) -> list[str]:
    """A command that would train, with changes."""
    return [
        *("-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", f"data.train_files={files}/good.parquet"),
        *(f"data.val_files={files}/good.parquet", "data.train_batch_size=16", "data.max_prompt_length=8"),
        *("data.max_response_length=4", f"{A}.model.path={files}/model", f"{A}.rollout.name=hf", f"{A}.rollout.n=2"),
        *(f"{A}.actor.ppo_mini_batch_size=16", f"{A}.actor.use_dynamic_bsz=True", f"{A}.actor.megatron.dtype=float32"),
        *("trainer.n_gpus_per_node=2", "trainer.logger=[console]", "trainer.total_training_steps=1", *changes),
    ]


def sft(files: Path, *changes: str) -> list[str]:
    return [
        *("-m", "verl.trainer.sft_trainer", "engine=megatron", "optim=megatron", "model=hf_model"),
        *(f"model.path={files}/model", f"data.train_files={files}/chats.parquet", "trainer.n_gpus_per_node=1"),
        *("data.train_batch_size=16", *changes),
    ]


WRONG = {
    "missing file": (["data.train_files=/no/such.parquet"], ["data.train_files", "/no/such.parquet"]),
    "not a parquet file": (["data.train_files={files}/broken.parquet"], ["broken.parquet"]),
    "missing column": (["data.train_files={files}/raw.parquet"], ["raw.parquet", "prompt"]),
    "unknown data source": (["data.train_files={files}/unknown.parquet"], ["nobody", "custom_reward_function"]),
    "fewer rows than a batch": (["data.train_files={files}/short.parquet"], ["data.train_batch_size", "16", "4"]),
    "prompt too long": (["data.train_files={files}/long.parquet"], ["40", "data.max_prompt_length"]),
    "mini-batch above batch": ([f"{A}.actor.ppo_mini_batch_size=32"], ["ppo_mini_batch_size", "32", "16"]),
    "mini-batch does not divide": ([f"{A}.actor.ppo_mini_batch_size=12"], ["ppo_mini_batch_size", "12"]),
    "world size": ([f"{A}.actor.megatron.context_parallel_size=3"], ["context_parallel_size", "3"]),
    "no micro-batch size": (
        [f"{A}.actor.use_dynamic_bsz=False", f"{A}.rollout.log_prob_use_dynamic_bsz=True"],
        ["ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"],
    ),
    "token budget": (
        [f"{A}.actor.ppo_max_token_len_per_gpu=8", f"{A}.rollout.log_prob_max_token_len_per_gpu=99"],
        ["ppo_max_token_len_per_gpu", "12"],
    ),
    "unknown key": ([f"{A}.actor.ppo_mini_batchsize=16"], ["ppo_mini_batchsize", "ppo_mini_batch_size"]),
    "new key": ([f"+{A}.actor.magic=1"], ["magic"]),
    "unknown estimator": (["algorithm.adv_estimator=grppo"], ["algorithm.adv_estimator", "grppo", "grpo"]),
    "unknown rollout": ([f"{A}.rollout.name=hff"], [f"{A}.rollout.name", "hff", "hf"]),
    "rollout left out": ([f"{A}.rollout.name=???"], [f"{A}.rollout.name"]),
    "no tokenizer": ([f"{A}.model.path={{files}}/bare"], [f"{A}.model.path", "bare", "tokenizer"]),
    "no model": ([f"{A}.model.path={{files}}/nothing"], [f"{A}.model.path", "nothing"]),
    "another engine": (["model_engine=dp"], ["model_engine", "megatron"]),
    "no such reward function": (
        ["reward.custom_reward_function.path={files}/score.py", "reward.custom_reward_function.name=other"],
        ["custom_reward_function.name", "other", "compute_score"],
    ),
    "guard of the fix": (
        [
            f"+{A}.actor.megatron.override_transformer_config.calculate_per_token_loss=True",
            f"{A}.actor.loss_agg_mode=seq-mean-token-mean",
        ],
        ["seq-mean-token-mean", "per_token_loss_guards"],
    ),
    "aux loss without its type": (
        [f"+{A}.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01"],
        ["moe_aux_loss_coeff", "moe_router_load_balancing_type"],
    ),
    "folder that cannot be written": (
        ["trainer.default_local_dir=/proc/nope"],
        ["trainer.default_local_dir", "/proc/nope"],
    ),
    "layers that do not divide": (
        [f"{A}.actor.megatron.pipeline_model_parallel_size=2", f"{A}.model.path={{files}}/odd"],
        ["pipeline_model_parallel_size=2", "3 layers", "use 1,"],
    ),
    "unknown field of the transformer": (
        [f"+{A}.actor.megatron.override_transformer_config.moe_z_loss_coef=0.1"],
        ["moe_z_loss_coef=0.1", "Did you mean moe_z_loss_coeff?"],
    ),
    "weights cut off": ([f"{A}.model.path={{files}}/cut"], ["cut", "model.safetensors is cut off"]),
    "a number for a whole group": (["data=5"], ["data=5", "KEY.NAME=VALUE"]),
    "not a number": (["data.train_batch_size=many"], ["train_batch_size", "many"]),
}


def run(command: list[str], **env: str) -> tuple[subprocess.CompletedProcess, float]:
    start = sum(os.times()[2:4])  # CPU seconds of children: what else the machine does must not fail a test
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    return done, sum(os.times()[2:4]) - start


@pytest.fixture(autouse=True)
def outputs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra makes a folder for every command."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    yield


def check(done: subprocess.CompletedProcess, seconds: float, words: list[str]) -> None:
    said = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2, f"exit code {done.returncode}: {done.stderr[-800:]}"
    assert "Traceback" not in done.stderr
    sentence = " ".join(said)
    assert not [word for word in words if word not in sentence], f"not said: {sentence}"
    assert len(said) == 1, f"more than one sentence:\n{done.stderr}"
    assert seconds < LIMIT_S


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_ppo_command_says_what_is_wrong(files: Path, tmp_path: Path, name: str) -> None:
    changes, words = WRONG[name]
    changes = [change.replace("{files}", str(files)) for change in changes]
    check(*run(ppo(files, f"hydra.run.dir={tmp_path}", *changes)), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.train_files={files}/none.parquet"], ["data.train_files", "none.parquet"]),
        (["data.train_files={files}/raw.parquet"], ["raw.parquet", "messages"]),
        (["engine.tensor_model_parallel_size=2"], ["tensor_model_parallel_size", "2"]),
        (["optim.lrr=1"], ["optim.lrr", "optim.lr"]),
    ],
)
def test_a_wrong_sft_command_says_what_is_wrong(
    files: Path, tmp_path: Path, changes: list[str], words: list[str]
) -> None:
    changes = [change.replace("{files}", str(files)) for change in changes]
    check(*run(sft(files, f"hydra.run.dir={tmp_path}", *changes)), words)


def test_ppo_under_torchrun_is_refused(files: Path, tmp_path: Path) -> None:
    command = ppo(files, f"hydra.run.dir={tmp_path}")
    check(*run(command, TORCHELASTIC_RUN_ID="1", RANK="0", WORLD_SIZE="2"), ["torchrun", "verl.trainer.main_ppo"])


def test_more_workers_than_the_machine_has_cpus(files: Path, tmp_path: Path) -> None:
    command = ppo(files, f"hydra.run.dir={tmp_path}", "trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_cpus=2")
    check(*run(command, VERL_DEVICE="cpu"), ["4 CPUs", "has 2", "num_cpus_per_worker=0.5"])
