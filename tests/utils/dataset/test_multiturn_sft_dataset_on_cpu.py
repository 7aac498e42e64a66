# SPDX-License-Identifier: Apache-2.0
"""MultiTurnSFTDataset: ids are those of the whole conversation, the loss mask covers what the assistant produced."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset, SFTTensorCollator
from verl.utils.tiny_model import build_character_tokenizer

TURNS = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "(one more)2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "(two more)4"},
]

# Turns in the style of ChatML; `body` renders an assistant's content.
CHAT = (
    "{{% for m in messages %}}{{{{ '<|start|>' + m.role + '\\n' }}}}"
    "{{% if m.role == 'assistant' %}}{body}{{% else %}}{{{{ m.content + '<|end|>' }}}}{{% endif %}}{{{{ '\\n' }}}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|start|>assistant\\n' }}}}{{% endif %}}"
)
PLAIN = CHAT.format(body="{{ m.content + '<|end|>' }}")
MARKED = CHAT.format(body="{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}")
MARKED_WITHOUT_END = CHAT.format(body="{% generation %}{{ m.content }}{% endgeneration %}{{ '<|end|>' }}")
# The thought in parentheses is dropped from every turn but the last, as reasoning models' templates do.
FORGETFUL = CHAT.format(body="{{ (m.content if loop.last else m.content.split(')')[1]) + '<|end|>' }}")


def make_tokenizer(template: str, eos: str = "<|end|>"):
    tokenizer = build_character_tokenizer(128)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


def open_rows(folder, tokenizer, rows: list[list[dict]], **config) -> MultiTurnSFTDataset:
    path = folder / "sft.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": row} for row in rows]), path)
    return MultiTurnSFTDataset(str(path), tokenizer, {"max_length": 1024} | config)


def trained_pieces(tokenizer, row: dict) -> list[str]:
    """The texts of the runs of tokens whose loss mask is 1."""
    pieces, last = [], 0
    for token, trained in zip(row["input_ids"].tolist(), row["loss_mask"].tolist(), strict=True):
        if trained:
            pieces = pieces if last else [*pieces, ""]
            pieces[-1] += tokenizer.decode([token])
        last = trained
    return pieces


def check_whole_conversation(tokenizer, row: dict, messages: list[dict]) -> None:
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert row["input_ids"].tolist() == whole
    assert row["position_ids"].tolist() == list(range(len(whole)))
    assert {name: tensor.dtype for name, tensor in row.items()} == dict.fromkeys(row, torch.int64)


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_WITHOUT_END])
def test_mask_covers_the_assistants_tokens_and_the_end_of_its_turns(tmp_path, template):
    tokenizer = make_tokenizer(template)
    row = open_rows(tmp_path, tokenizer, [TURNS])[0]
    check_whole_conversation(tokenizer, row, TURNS)
    assert trained_pieces(tokenizer, row) == ["(one more)2<|end|>", "(two more)4<|end|>"]


def test_end_of_turn_that_is_not_eos_is_trained_and_the_newline_behind_it_is_not(tmp_path):
    tokenizer = make_tokenizer(PLAIN, eos="<eos>")
    row = open_rows(tmp_path, tokenizer, [TURNS])[0]
    assert trained_pieces(tokenizer, row) == ["(one more)2<|end|>", "(two more)4<|end|>"]


def test_template_that_drops_earlier_thoughts_keeps_its_ids_and_unshifted_masks(tmp_path):
    tokenizer = make_tokenizer(FORGETFUL)
    row = open_rows(tmp_path, tokenizer, [TURNS])[0]
    check_whole_conversation(tokenizer, row, TURNS)
    assert trained_pieces(tokenizer, row) == ["2<|end|>", "(two more)4<|end|>"]


def test_turns_that_cannot_be_told_apart_are_an_error_that_names_the_message(tmp_path):
    no_eos = make_tokenizer(FORGETFUL, eos="<eos>")  # the turn's end is not EOS, so nothing says where it is
    with pytest.raises(ValueError, match=r"row 0 .*message 2: it renders differently.*generation"):
        open_rows(tmp_path, no_eos, [TURNS])
    very_end = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    eos_at_the_very_end = make_tokenizer(FORGETFUL + very_end, eos="<eos>")  # it ends no turn but the last
    with pytest.raises(ValueError, match=r"row 0 .*message 2: it renders differently.*generation"):
        open_rows(tmp_path, eos_at_the_very_end, [TURNS])
    counting = make_tokenizer("{{ messages | length }}" + PLAIN)
    with pytest.raises(ValueError, match=r"row 0 .*message 2: the messages before it render differently.*generation"):
        open_rows(tmp_path, counting, [TURNS])


def test_consecutive_tool_results_share_a_turn_as_the_template_says(tmp_path):
    template = PLAIN.replace(
        "{{ '<|start|>' + m.role",
        "{% if not (m.role == 'tool' and loop.previtem.role == 'tool') %}{{ '<|start|>' + m.role",
    ).replace("'\\n' }}{% if m.role == 'assistant' %}", "'\\n' }}{% endif %}{% if m.role == 'assistant' %}")
    tokenizer = make_tokenizer(template)
    call, final = {"role": "assistant", "content": "f g"}, {"role": "assistant", "content": "3"}
    tools = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    messages = [{"role": "user", "content": "?"}, call, *tools, final]
    row = open_rows(tmp_path, tokenizer, [messages])[0]
    check_whole_conversation(tokenizer, row, messages)
    assert tokenizer.decode(row["input_ids"].tolist()).count("<|start|>tool") == 1
    assert trained_pieces(tokenizer, row) == ["f g<|end|>", "3<|end|>"]


def test_the_tiny_models_own_template(tmp_path):
    tokenizer = build_character_tokenizer()
    messages = [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}]
    row = open_rows(tmp_path, tokenizer, [messages])[0]
    assert tokenizer.decode(row["input_ids"].tolist()) == "17+25=240<eos>"
    assert row["loss_mask"].tolist() == [0] * 6 + [1] * 4


def test_rows_come_out_equal_when_read_again(tmp_path):
    dataset = open_rows(tmp_path, make_tokenizer(MARKED), [TURNS])
    first, again = dataset[0], dataset[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    first["input_ids"].zero_()  # a caller that writes into its row must not change the next epoch's
    assert torch.equal(dataset[0]["input_ids"], again["input_ids"])


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", "+25=240<eos>"), ("right", "17+25=24"), ("middle", "17+2240<eos>")]
)
def test_truncation_cuts_ids_and_mask_alike(tmp_path, truncation, kept):
    tokenizer = build_character_tokenizer()
    messages = [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "240"}]
    row = open_rows(tmp_path, tokenizer, [messages], max_length=8, truncation=truncation)[0]
    assert tokenizer.decode(row["input_ids"].tolist()) == kept
    assert row["loss_mask"].tolist() == ([0] * 6 + [1] * 2 if truncation == "right" else [0] * 4 + [1] * 4)


def test_overlong_row_is_named_on_opening(tmp_path):
    pair = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    longer = [pair[0], {"role": "assistant", "content": "2" * 8}]
    with pytest.raises(ValueError, match=r"row 1 .*has 10 tokens, more than data\.max_length=8"):
        open_rows(tmp_path, build_character_tokenizer(), [pair, longer], max_length=8)


def test_bad_conversations_and_settings_are_refused(tmp_path):
    tokenizer = make_tokenizer(PLAIN)
    with pytest.raises(ValueError, match="no assistant message"):
        open_rows(tmp_path, tokenizer, [TURNS[:2]])
    # Behind good rows too, and where rows are cut and so not measured.
    for bad, words in ((TURNS[:2], "no assistant"), ([*TURNS[:4], TURNS[4] | {"content": None}], "has no content")):
        with pytest.raises(ValueError, match=f"row 1 .*{words}"):
            open_rows(tmp_path, tokenizer, [TURNS, bad], truncation="right")
    with pytest.raises(ValueError, match="message 0: the conversation begins with the assistant"):
        open_rows(tmp_path, tokenizer, [TURNS[2:]])
    with pytest.raises(ValueError, match="no column 'chat'"):
        open_rows(tmp_path, tokenizer, [TURNS], messages_key="chat")
    with pytest.raises(ValueError, match="data.pad_mode='right' is not supported"):
        open_rows(tmp_path, tokenizer, [TURNS], pad_mode="right")


def test_tools_of_a_row_reach_the_template(tmp_path):
    tokenizer = make_tokenizer("{{ tools[0]['function']['name'] }}" + MARKED)
    tool = {"type": "function", "function": {"name": "plus"}}
    path = tmp_path / "sft.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": TURNS, "tools": [tool]}]), path)
    row = MultiTurnSFTDataset(str(path), tokenizer, {})[0]
    assert tokenizer.decode(row["input_ids"].tolist()).startswith("plus<|start|>system")


def test_collator_makes_jagged_tensors(tmp_path):
    pair = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    dataset = open_rows(
        tmp_path, build_character_tokenizer(), [pair, [pair[0], {"role": "assistant", "content": "34"}]]
    )
    batch = SFTTensorCollator()([dataset[0], dataset[1]])
    assert batch["input_ids"].layout == torch.jagged
    assert batch["input_ids"].offsets().tolist() == [0, 3, 7]
    assert [row.tolist() for row in batch["loss_mask"].unbind()] == [[0, 1, 1], [0, 1, 1, 1]]
