# SPDX-License-Identifier: Apache-2.0
"""Two-digit additions as a data set: prompts for reinforcement learning, and demonstrations of a flawed teacher.

A prompt is `17+25=` (always six characters), its answer three digits, units first: `240` for 042. All 10,000 additions
are shuffled once; the first 8,000 are for training, the others are never trained on. The teacher of `sft_train.parquet`
drops every carry on 60% of the training prompts, so that a policy that imitates it is right on fewer than six in ten.

    python3 examples/data_preprocess/arithmetic.py --local_save_dir ~/data/arithmetic
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_TRAIN = 8000
FLAWED_SHARE = 0.6


def right_answer(a: int, b: int) -> str:
    """The sum, three digits, units first."""
    return f"{a + b:03d}"[::-1]


def carryless_answer(a: int, b: int) -> str:
    """What someone who forgets every carry writes: each column's sum modulo 10, nothing in the hundreds."""
    return f"{(a + b) % 10}{(a // 10 + b // 10) % 10}0"


def make_rl_row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """One prompt in verl's schema."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"{a:02d}+{b:02d}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": right_answer(a, b)},
        "extra_info": {"split": split, "index": index},
    }


def make_sft_row(a: int, b: int, flawed: bool) -> dict[str, Any]:
    """One demonstration as a conversation."""
    answer = carryless_answer(a, b) if flawed else right_answer(a, b)
    return {
        "messages": [{"role": "user", "content": f"{a:02d}+{b:02d}="}, {"role": "assistant", "content": answer}],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write train.parquet, test.parquet and sft_train.parquet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_save_dir", default="~/data/arithmetic", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle and of the teacher's mistakes")
    args = parser.parse_args(argv)

    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    train, test = pairs[:NUM_TRAIN], pairs[NUM_TRAIN:]
    flawed = set(rng.sample(range(NUM_TRAIN), round(FLAWED_SHARE * NUM_TRAIN)))
    files = {
        "train": [make_rl_row(a, b, "train", i) for i, (a, b) in enumerate(train)],
        "test": [make_rl_row(a, b, "test", i) for i, (a, b) in enumerate(test)],
        "sft_train": [make_sft_row(a, b, i in flawed) for i, (a, b) in enumerate(train)],
    }
    folder = Path(args.local_save_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        print(f"wrote {len(rows)} rows to {folder / name}.parquet")


if __name__ == "__main__":
    main()
