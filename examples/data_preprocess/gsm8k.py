# SPDX-License-Identifier: Apache-2.0
"""GSM8K (Cobbe et al., 2021, arXiv:2110.14168) in verl's schema, from local files or from the Hugging Face hub.

    python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python3 examples/data_preprocess/gsm8k.py --local_dataset_path FOLDER --local_save_dir ~/data/gsm8k

A local folder holds jsonl or parquet files with the columns `question` and `answer`; a file belongs to the split
(train, test) that its name contains. Written are train.parquet and test.parquet, prompts with their final numbers, and
sft_train.parquet and sft_test.parquet, the same prompts as conversations that end in the worked answer.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Reason step by step, then write the final number on a last line after "####".'


def final_number(answer: str, where: str) -> str:
    """What stands behind the `####` of a worked answer, without thousands separators.

    Raises:
        ValueError: the answer has no `####`.
    """
    _, mark, number = answer.rpartition("####")
    if not mark:
        raise ValueError(f"{where}: the answer has no '####' before its final number: {answer[-80:]!r}")
    return number.strip().replace(",", "")


def make_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """One prompt in verl's schema."""
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_number(answer, f"{split} row {index}")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def make_conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt with its worked answer, for supervised fine-tuning."""
    answer = {"role": "assistant", "content": row["extra_info"]["answer"]}
    return {"messages": [*row["prompt"], answer], "extra_info": {"index": row["extra_info"]["index"]}}


def read_local(folder: Path, split: str) -> list[dict[str, str]]:
    """Rows of the jsonl and parquet files of `folder` whose names contain `split`.

    Raises:
        ValueError: there is no such file, or a row lacks `question` or `answer`.
    """
    files = sorted(f for f in folder.glob(f"*{split}*") if f.suffix in (".jsonl", ".parquet"))
    if not files:
        raise ValueError(f"--local_dataset_path={str(folder)!r} has no .jsonl or .parquet file named *{split}*")
    rows = []
    for file in files:
        if file.suffix == ".parquet":
            new = pq.read_table(file).to_pylist()
        else:
            with file.open(encoding="utf-8") as lines:
                new = [json.loads(line) for line in lines if line.strip()]
        for i, row in enumerate(new):
            if not {"question", "answer"} <= row.keys():
                raise ValueError(f"{file} row {i} has no 'question' and 'answer'; it has {', '.join(row)}")
        rows += new
    return rows


def read_hub(split: str) -> list[dict[str, str]]:
    """Rows of the hub's data set."""
    import datasets

    return datasets.load_dataset(HUB_NAME, "main", split=split).to_list()


def main(argv: Sequence[str] | None = None) -> None:
    """Write both splits, as prompts and as conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", help="folder with the source's files; without it the hub is asked")
    parser.add_argument("--local_save_dir", default="~/data/gsm8k", help="folder to write")
    args = parser.parse_args(argv)

    out = Path(args.local_save_dir).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        if args.local_dataset_path:
            source = read_local(Path(args.local_dataset_path).expanduser(), split)
        else:
            source = read_hub(split)
        rows = [make_row(row["question"], row["answer"], split, i) for i, row in enumerate(source)]
        for name, table in ((split, rows), (f"sft_{split}", [make_conversation(row) for row in rows])):
            pq.write_table(pa.Table.from_pylist(table), out / f"{name}.parquet")
            print(f"wrote {len(rows)} rows to {out / name}.parquet")


if __name__ == "__main__":
    main()
