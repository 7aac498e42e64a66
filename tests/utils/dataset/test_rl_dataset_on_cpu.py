# SPDX-License-Identifier: Apache-2.0
"""RLHFDataset: what rows become, which rows are refused, and that filter and reading agree."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tiny_model import build_character_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer()


def make_row(text: str, index: int = 0) -> dict:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "240"},
        "extra_info": {"split": "train", "index": index},
    }


def write(folder, rows: list[dict], suffix: str = "parquet") -> str:
    path = folder / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


def decode(tokenizer, row: dict) -> str:
    return tokenizer.decode(row["input_ids"][row["attention_mask"].bool()].tolist())


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_a_row_becomes_a_left_padded_prompt_with_everything_else_handed_through(tmp_path, tokenizer, suffix):
    path = write(tmp_path, [make_row("17+25=", 41)], suffix)
    row = RLHFDataset(path, tokenizer, OmegaConf.create({"max_prompt_length": 8}))[0]
    assert row["input_ids"].tolist() == [0, 0, *tokenizer("17+25=")["input_ids"]]
    assert row["attention_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert row["position_ids"].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert row["raw_prompt"] == [{"role": "user", "content": "17+25="}]
    assert row["index"] == 41
    assert (row["data_source"], row["ability"]) == ("arithmetic", "math")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "240"}


def test_collated_rows_make_a_data_proto_with_one_object_per_row(tmp_path, tokenizer):
    path = write(tmp_path, [make_row("1+1="), make_row("2+2=")])
    dataset = RLHFDataset(path, tokenizer, {"max_prompt_length": 6})
    data = DataProto.from_single_dict(collate_fn([dataset[0], dataset[1]]))
    assert data.batch["input_ids"].shape == (2, 6)
    assert data.non_tensor_batch["raw_prompt"].shape == (2,)  # equal lists must not become a second dimension
    assert data.non_tensor_batch["raw_prompt"][1] == [{"role": "user", "content": "2+2="}]


def test_filter_drops_and_counts_the_row_of_12_tokens(tmp_path, tokenizer):
    path = write(tmp_path, [make_row("1" * 12), make_row("12345678"), make_row("123")])
    dataset = RLHFDataset(path, tokenizer, {"max_prompt_length": 8, "filter_overlong_prompts": True})
    assert (len(dataset), dataset.num_dropped) == (2, 1)
    assert [decode(tokenizer, dataset[i]) for i in range(2)] == ["12345678", "123"]
    assert dataset.column("prompt")[0][0]["content"] == "12345678"


def test_filter_counts_the_tokens_the_template_arguments_add(tmp_path):
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if think %}{{ 'thinking' }}{% endif %}"
    path = write(tmp_path, [make_row("1234"), make_row("1")])
    config = {"max_prompt_length": 9, "filter_overlong_prompts": True}
    assert len(RLHFDataset(path, tokenizer, config)) == 2
    thinking = RLHFDataset(path, tokenizer, config | {"apply_chat_template_kwargs": {"think": True}})
    assert [decode(tokenizer, row) for row in thinking] == ["1thinking"]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", "56789abc"), ("right", "12345678"), ("middle", "12349abc"), ("middle7", "1239abc")],
)
def test_truncation_keeps_exactly_the_limit(tmp_path, tokenizer, truncation, kept):
    path = write(tmp_path, [make_row("123456789abc")])
    config = {"max_prompt_length": len(kept), "truncation": truncation.rstrip("7")}
    row = RLHFDataset(path, tokenizer, config)[0]
    assert decode(tokenizer, row) == kept
    assert row["attention_mask"].tolist() == [1] * len(kept)


def test_truncation_error_names_row_and_token_count_when_the_data_set_opens(tmp_path, tokenizer):
    path = write(tmp_path, [make_row("1+1="), make_row("1" * 12)])
    with pytest.raises(ValueError, match=r"row 1 .*has 12 tokens.*data\.max_prompt_length=8.*truncation='error'"):
        RLHFDataset(path, tokenizer, {"max_prompt_length": 8})


def test_filter_that_leaves_nothing_is_an_error(tmp_path, tokenizer):
    path = write(tmp_path, [make_row("1" * 12), make_row("1" * 9)])
    with pytest.raises(ValueError, match="left no row: the shortest of 2 prompts has 9 tokens"):
        RLHFDataset(path, tokenizer, {"max_prompt_length": 8, "filter_overlong_prompts": True})


def test_missing_columns_are_named_with_file_and_example_row(tmp_path, tokenizer):
    path = write(tmp_path, [{"question": "2+2?", "answer": "#### 4"}])
    with pytest.raises(ValueError) as caught:
        RLHFDataset(path, tokenizer, {})
    message = str(caught.value)
    assert path in message
    assert "no column 'prompt', 'data_source', 'reward_model'" in message
    assert "question, answer" in message
    assert '"ground_truth": "240"' in message


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt": "17+25="}, "expected a list of chat messages"),
        ({"reward_model": {"style": "rule"}}, "ground_truth"),
        ({"images": ["a.png"]}, "column 'images' holds images"),
    ],
)
def test_rows_of_the_wrong_form_are_refused_on_opening(tmp_path, tokenizer, change, match):
    path = write(tmp_path, [make_row("1+1=") | change])
    with pytest.raises(ValueError, match=match):
        RLHFDataset(path, tokenizer, {})


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_unknown_truncation_and_missing_template_are_refused(tmp_path, truncation):
    path = write(tmp_path, [make_row("1+1=")])
    bare = build_character_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        RLHFDataset(path, bare, {"truncation": truncation})
    with pytest.raises(ValueError, match="data.truncation='leftt' is unknown"):
        RLHFDataset(path, build_character_tokenizer(), {"truncation": "leftt"})


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("none.parquet", None, "does not exist"),
        ("rows.csv", "a,b", "unknown kind"),
        ("rows.parquet", "not parquet", "could not be read"),
        ("rows.jsonl", "{broken", "could not be read"),
        ("rows.jsonl", "[1, 2]", "expected a list of objects"),
    ],
)
def test_unreadable_files_are_named(tmp_path, tokenizer, name, content, match):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=match) as caught:
        RLHFDataset(str(path), tokenizer, {})
    assert name in str(caught.value)


def test_several_files_are_read_one_after_the_other(tmp_path, tokenizer):
    paths = []
    for name, suffix in (("1+1=", "parquet"), ("2+2=", "jsonl")):
        row = make_row(name) | ({"level": 1} if suffix == "jsonl" else {})  # a column that only one file has
        paths.append(write(tmp_path, [row], suffix))
    dataset = RLHFDataset(OmegaConf.create(paths), tokenizer, {"max_prompt_length": 8})
    assert [decode(tokenizer, row) for row in dataset] == ["1+1=", "2+2="]
    assert [row["level"] for row in dataset] == [None, 1]


def test_jsonl_rows_may_lack_an_optional_column(tmp_path, tokenizer):
    first = make_row("1+1=")
    del first["extra_info"]
    path = write(tmp_path, [first, make_row("2+2=", 7)], "jsonl")
    dataset = RLHFDataset(path, tokenizer, {"max_prompt_length": 8})
    assert (dataset[0]["extra_info"], dataset[0]["index"]) == ({}, 0)
    assert dataset[1]["index"] == 7


def test_max_samples_takes_the_first_rows_or_draws_them_by_seed(tmp_path, tokenizer):
    path = write(tmp_path, [make_row(f"{i}+{i}=", i) for i in range(10)])

    def indices(**config):
        dataset = RLHFDataset(path, tokenizer, {"max_prompt_length": 8} | config, max_samples=4)
        return [dataset[i]["index"] for i in range(len(dataset))]

    assert indices(shuffle=False) == [0, 1, 2, 3]
    assert indices(shuffle=True, seed=1) == indices(shuffle=True, seed=1)
    assert indices(shuffle=True, seed=1) != indices(shuffle=True, seed=2)
    assert len(set(indices(shuffle=True, seed=1))) == 4


def test_null_fields_that_parquet_adds_do_not_reach_the_template(tmp_path):
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.name is defined %}{{ m.name }}:{% endif %}{{ m.content }}{% endfor %}"
    )
    row = make_row("1")
    row["prompt"] = [{"role": "system", "content": "a", "name": "b"}, {"role": "user", "content": "1"}]
    dataset = RLHFDataset(write(tmp_path, [row]), tokenizer, {"max_prompt_length": 8})
    assert decode(tokenizer, dataset[0]) == "b:a1"


def test_a_template_that_fails_is_reported_with_the_row(tmp_path):
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(ValueError, match="row 0 .*no system message"):
        RLHFDataset(write(tmp_path, [make_row("1")]), tokenizer, {})


def test_padding_uses_the_pad_token_also_when_it_is_eos(tmp_path):
    tokenizer = build_character_tokenizer(pad_is_eos=True)
    row = RLHFDataset(write(tmp_path, [make_row("1")]), tokenizer, {"max_prompt_length": 3})[0]
    assert row["input_ids"].tolist() == [tokenizer.eos_token_id] * 2 + tokenizer("1")["input_ids"]
    assert torch.equal(row["attention_mask"], torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [{"role": "user", "content": None}]}, "message 0, of role 'user', has no content"),
        ({"prompt": [{"role": "user"}]}, "message 0, of role 'user', has no content"),
        ({"prompt": [{"role": "", "content": "1"}]}, "expected a list of chat messages"),
        ({"prompt": []}, "expected a list of chat messages"),
        ({"prompt": None}, "expected a list of chat messages"),
        ({"reward_model": None}, "row 2: column 'reward_model' must hold"),
        ({"prompt": [{"role": "user", "content": ""}]}, "is empty: the chat template makes no token of it"),
    ],
)
def test_a_bad_row_behind_good_ones_is_found_on_opening(tmp_path, tokenizer, change, words):
    path = write(tmp_path, [make_row("1"), make_row("2"), make_row("3") | change], "jsonl")
    with pytest.raises(ValueError, match=words) as error:
        RLHFDataset(path, tokenizer, {"max_prompt_length": 8})
    assert "row 2" in str(error.value)


def test_a_message_that_calls_a_tool_needs_no_content(tmp_path, tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [{"role": "user", "content": "1"}, call, {"role": "tool", "content": "2"}]
    path = write(tmp_path, [make_row("1") | {"prompt": messages}], "jsonl")
    template = "{% for m in messages %}{{ m.content or 'call' }}{% endfor %}"
    assert (
        len(
            RLHFDataset(
                path, tokenizer, {"max_prompt_length": 9, "apply_chat_template_kwargs": {"chat_template": template}}
            )
        )
        == 1
    )


def test_no_row_to_keep_is_refused(tmp_path, tokenizer):
    path = write(tmp_path, [make_row("1")])
    with pytest.raises(ValueError, match="max_samples=0 keeps no row; use -1"):
        RLHFDataset(path, tokenizer, {"max_prompt_length": 8}, max_samples=0)


def test_extra_information_that_is_no_object_is_refused(tmp_path, tokenizer):
    path = write(tmp_path, [make_row("1") | {"extra_info": "x"}], "jsonl")
    with pytest.raises(ValueError, match="row 0: column 'extra_info' must hold an object, got 'x'"):
        RLHFDataset(path, tokenizer, {"max_prompt_length": 8})
