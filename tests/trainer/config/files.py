# SPDX-License-Identifier: Apache-2.0
"""Small files that a right configuration points to."""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PROMPT = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "17+25="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "240"},
    "extra_info": {"index": 0},
}
CHAT = {"messages": [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}]}


@dataclass(frozen=True)
class Files:
    """Paths of a prompt file, a chat file and a model folder."""

    root: Path
    prompts: Path
    chats: Path
    model: Path

    def insert(self, argument: str) -> str:
        """Replace the placeholders PROMPTS, CHATS and MODEL in a command-line argument."""
        for word, path in (("PROMPTS", self.prompts), ("CHATS", self.chats), ("MODEL", self.model)):
            argument = argument.replace(word, str(path))
        return argument

    @property
    def ppo_arguments(self) -> list[str]:
        """The fewest arguments of a right GRPO command: two ranks, context parallel size 2."""
        return [
            f"data.train_files={self.prompts}",
            f"data.val_files={self.prompts}",
            f"actor_rollout_ref.model.path={self.model}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.megatron.context_parallel_size=2",
            "actor_rollout_ref.rollout.name=hf",
            "algorithm.adv_estimator=grpo",
            "trainer.n_gpus_per_node=2",
        ]

    @property
    def sft_arguments(self) -> list[str]:
        """The fewest arguments of a right SFT command."""
        return [f"data.train_files={self.chats}", f"model.path={self.model}", "data.train_batch_size=8"]


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows as parquet or, by the path's suffix, as JSON lines."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_model(folder: Path, **config: object) -> Path:
    """Write a model folder that has every file and no sensible content."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"], **config}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_files(root: Path) -> Files:
    """Write everything that ``Files`` names, 16 rows a file."""
    return Files(
        root=root,
        prompts=write_rows(root / "train.parquet", [PROMPT] * 16),
        chats=write_rows(root / "chats.jsonl", [CHAT] * 16),
        model=write_model(root / "model"),
    )
