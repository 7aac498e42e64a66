# SPDX-License-Identifier: Apache-2.0
"""The data preparation scripts write what the data sets and rewards read."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score
from verl.utils.tiny_model import build_character_tokenizer

ROOT = Path(__file__).parents[2]
GSM8K = ROOT / "tests" / "data" / "gsm8k"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"preprocess_{name}", ROOT / "examples/data_preprocess" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    load_script("arithmetic").main(["--local_save_dir", str(folder)])
    return folder


def test_arithmetic_splits_all_additions_and_trains_on_no_held_out_one(arithmetic):
    train, test, demos = (read(arithmetic / f"{name}.parquet") for name in ("train", "test", "sft_train"))
    prompts = [[row["prompt"][0]["content"] for row in rows] for rows in (train, test)]
    assert [len(p) for p in prompts] == [8000, 2000]
    assert set(prompts[0]) | set(prompts[1]) == {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}
    assert [row["messages"][0]["content"] for row in demos] == prompts[0]
    assert [row["extra_info"]["index"] for row in test] == list(range(2000))


def test_arithmetic_answers_are_right_three_digits_units_first(arithmetic):
    for row in read(arithmetic / "train.parquet")[::97]:
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        answer = row["reward_model"]["ground_truth"]
        assert len(answer) == 3
        assert int(answer[::-1]) == int(a) + int(b)
        assert default_compute_score(row["data_source"], answer, answer, {"finished": True}) == 1.0


def test_arithmetic_teacher_is_right_on_57_to_59_percent_and_wrong_only_about_carries(arithmetic):
    truth = {
        row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in read(arithmetic / "train.parquet")
    }
    wrong = []
    for row in read(arithmetic / "sft_train.parquet"):
        prompt, answer = (message["content"] for message in row["messages"])
        if answer != truth[prompt]:
            wrong.append((prompt, answer))
    assert 0.57 <= 1 - len(wrong) / len(truth) <= 0.59
    for prompt, answer in wrong:
        (a1, a0), (b1, b0) = (map(int, number) for number in prompt.rstrip("=").split("+"))
        assert answer == f"{(a0 + b0) % 10}{(a1 + b1) % 10}0"
        assert a0 + b0 > 9 or a1 + b1 > 9


def test_arithmetic_depends_on_the_seed_alone(arithmetic, tmp_path):
    script = load_script("arithmetic")
    for name, seed in (("same", "0"), ("other", "1")):
        script.main(["--local_save_dir", str(tmp_path / name), "--seed", seed])
    for file in ("train", "test", "sft_train"):
        rows = read(arithmetic / f"{file}.parquet")
        assert rows == read(tmp_path / "same" / f"{file}.parquet")
        assert rows != read(tmp_path / "other" / f"{file}.parquet")


def test_arithmetic_files_open_as_data_sets(arithmetic):
    tokenizer = build_character_tokenizer()
    prompts = RLHFDataset(str(arithmetic / "test.parquet"), tokenizer, {"max_prompt_length": 6})
    demos = MultiTurnSFTDataset(str(arithmetic / "sft_train.parquet"), tokenizer, {"max_length": 10}, max_samples=100)
    assert prompts[5]["attention_mask"].tolist() == [1] * 6
    assert demos[5]["loss_mask"].tolist() == [0] * 6 + [1] * 4


def test_gsm8k_real_rows_become_prompts_with_their_final_numbers(tmp_path):
    load_script("gsm8k").main(["--local_dataset_path", str(GSM8K), "--local_save_dir", str(tmp_path)])
    train, test = read(tmp_path / "train.parquet"), read(tmp_path / "test.parquet")
    assert (len(train), len(test)) == (200, 100)
    source = json.loads((GSM8K / "gsm8k_train_200.jsonl").read_text(encoding="utf-8").splitlines()[0])
    row = train[0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert row["extra_info"] == {"split": "train", "index": 0, **source}
    assert row["prompt"][0]["content"].startswith(source["question"])
    chats = MultiTurnSFTDataset(str(tmp_path / "sft_train.parquet"), build_character_tokenizer(), {"max_length": 2048})
    assert len(chats) == 200 and chats[0]["loss_mask"].sum() == len(source["answer"]) + 1  # and EOS
    assert read(tmp_path / "sft_test.parquet")[0]["messages"][0] == test[0]["prompt"][0]
    assert "####" in row["prompt"][0]["content"]
    for row in train + test:
        truth = row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], row["extra_info"]["answer"], truth) == 1.0


def test_gsm8k_reads_parquet_shards_and_drops_commas(tmp_path):
    for split, shards in (("train", 2), ("test", 1)):
        for k in range(shards):
            rows = [{"question": f"{split} {k}?", "answer": f"much\n#### {k + 1},000"}]
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}-{k:05d}.parquet")
    load_script("gsm8k").main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    assert [row["reward_model"]["ground_truth"] for row in read(tmp_path / "out/train.parquet")] == ["1000", "2000"]
    assert len(read(tmp_path / "out/test.parquet")) == 1


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ({"question": "q?", "answer": "no mark"}, "train row 0: the answer has no '####'"),
        ({"question": "q?"}, "no 'question' and 'answer'"),
        (None, r"no \.jsonl or \.parquet file named \*train\*"),
    ],
)
def test_gsm8k_bad_sources_are_named(tmp_path, line, match):
    if line:
        (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=match):
        load_script("gsm8k").main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
