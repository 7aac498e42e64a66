# SPDX-License-Identifier: Apache-2.0
"""NaiveRewardManager, and how the config leads to it."""

import logging

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.trainer.ppo.reward import compute_reward, get_custom_reward_fn, load_reward_manager
from verl.utils.tiny_model import build_character_tokenizer
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls, register

TOKENIZER = build_character_tokenizer()
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def make_batch(responses: list[str], width: int = 6, source: str = "arithmetic", truth: str = "240") -> DataProto:
    """Responses as text ("<eos>" included), behind the prompt `17+25=` with two places of padding before it."""
    prompt = TOKENIZER("17+25=")["input_ids"]
    ids = [TOKENIZER(text)["input_ids"] for text in responses]
    rows = len(responses)
    response_ids = torch.tensor([row + [PAD] * (width - len(row)) for row in ids])
    response_mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    prompts = torch.tensor([[PAD, PAD, *prompt]] * rows)
    prompt_mask = torch.tensor([[0, 0, *[1] * len(prompt)]] * rows)
    tensors = {
        "prompts": prompts,
        "responses": response_ids,
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
    }
    non_tensors = {
        "data_source": np.array([source] * rows, dtype=object),
        "reward_model": np.array([{"style": "rule", "ground_truth": truth}] * rows, dtype=object),
        "extra_info": np.array([{"index": i} for i in range(rows)], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def test_score_stands_on_the_last_valid_token_and_nowhere_else():
    reward, extra = compute_reward(make_batch(["240<eos>", "042<eos>", "24024", ""]), NaiveRewardManager(TOKENIZER))
    expected = torch.zeros(4, 6)
    expected[0, 3] = 1.0
    assert torch.equal(reward, expected)
    assert reward.dtype == torch.float32
    assert extra == {}


def test_right_answer_without_eos_or_with_padding_as_its_end_is_not_right():
    reward = NaiveRewardManager(TOKENIZER)(make_batch(["240", "240<pad>", "240<eos>"]))
    assert reward.sum(dim=-1).tolist() == [0.0, 0.0, 1.0]


def test_eos_ids_of_the_batch_go_before_the_tokenizers():
    data = make_batch(["240<bos>", "240<eos>"])
    data.meta_info["eos_token_id"] = [TOKENIZER.bos_token_id]
    assert NaiveRewardManager(TOKENIZER)(data).sum(dim=-1).tolist() == [1.0, 0.0]


def test_score_function_sees_text_truth_and_extra_info():
    calls = []

    def spy(**kwargs):
        calls.append(kwargs)
        return 0.25 * len(calls)

    data = make_batch(["24<eos>", "1"])
    reward = NaiveRewardManager(TOKENIZER, compute_score=spy)(data)
    assert calls == [
        {
            "data_source": "arithmetic",
            "solution_str": "24",
            "ground_truth": "240",
            "extra_info": {"index": 0, "finished": True},
        },
        {
            "data_source": "arithmetic",
            "solution_str": "1",
            "ground_truth": "240",
            "extra_info": {"index": 1, "finished": False},
        },
    ]
    assert (reward[0, 2].item(), reward[1, 0].item()) == (0.25, 0.5)
    assert data.non_tensor_batch["extra_info"][0] == {"index": 0}  # the batch's own dict is left alone


def test_extra_values_stay_aligned_with_their_rows():
    def score(solution_str, **_):
        return {"score": 1.0, "acc": True} if solution_str == "1" else {"score": 0.5, "why": solution_str}

    reward, extra = compute_reward(make_batch(["1", "2", "1"]), NaiveRewardManager(TOKENIZER, compute_score=score))
    assert reward[:, 0].tolist() == [1.0, 0.5, 1.0]
    assert extra == {"score": [1.0, 0.5, 1.0], "acc": [True, None, True], "why": [None, "2", None]}


@pytest.mark.parametrize("bad", ["raise", float("nan"), float("inf"), None, {"acc": 1}])
def test_a_failing_score_counts_0_and_names_its_row(caplog, bad):
    def score(solution_str, **_):
        if solution_str != "2":
            return 1.0
        if bad == "raise":
            raise RuntimeError("boom")
        return bad

    with caplog.at_level(logging.WARNING):
        reward = NaiveRewardManager(TOKENIZER, compute_score=score)(make_batch(["1", "2", "3"]))
    assert reward[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert len(caplog.records) == 1
    assert "row 1" in caplog.text


def test_unknown_data_source_stops_the_run():
    with pytest.raises(ValueError, match="data_source='nowhere'"):
        NaiveRewardManager(TOKENIZER)(make_batch(["1"], source="nowhere"))


def test_missing_column_is_named():
    data = make_batch(["1"])
    with pytest.raises(ValueError, match="no column 'source'"):
        NaiveRewardManager(TOKENIZER, reward_fn_key="source")(data)


def test_examples_are_printed_per_data_source(capsys):
    data = make_batch(["240<eos>", "1", "2"])
    data.non_tensor_batch["data_source"][2] = "openai/gsm8k"
    NaiveRewardManager(TOKENIZER, num_examine=1)(data)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == ["[prompt] 17+25=", "[response] 240", "[truth] 240", "[score] 1.0"]
    assert [line for line in printed if line.startswith("[response]")] == ["[response] 240", "[response] 2"]


def test_registry_refuses_a_taken_and_an_unknown_name():
    assert get_reward_manager_cls("naive") is NaiveRewardManager
    with pytest.raises(ValueError, match="'naive' is taken by NaiveRewardManager"):
        register("naive")(int)
    with pytest.raises(ValueError, match="reward.reward_manager.name='nayve' is unknown; known are .*naive"):
        get_reward_manager_cls("nayve")


def make_config(**reward):
    return OmegaConf.create({"data": {"reward_fn_key": "data_source"}, "reward": reward})


def write_function(folder) -> str:
    path = folder / "my_reward.py"
    path.write_text(
        "def my_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    return len(solution_str) + bonus\n"
        "async def later(**kw):\n"
        "    return 0.0\n"
    )
    return str(path)


def test_config_without_anything_gives_the_naive_manager_and_the_built_in_rules():
    manager = load_reward_manager(make_config(), TOKENIZER)
    assert type(manager) is NaiveRewardManager
    assert manager(make_batch(["240<eos>"])).sum() == 1.0


def test_custom_function_is_loaded_from_its_file_with_its_kwargs(tmp_path):
    custom = {"path": write_function(tmp_path), "name": "my_score", "reward_kwargs": {"bonus": 0.5}}
    manager = load_reward_manager(make_config(custom_reward_function=custom), TOKENIZER)
    data = make_batch(["24<eos>"], source="a source without a rule")
    assert manager(data)[0].tolist() == [0, 0, 2.5, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"path": "/nowhere/x.py"}, r"custom_reward_function\.path='/nowhere/x.py': the file does not exist"),
        ({"name": "my_scor"}, r"custom_reward_function\.name='my_scor' .*Did you mean my_score"),
        ({"name": None}, r"custom_reward_function\.name='compute_score'"),
        ({"name": "later"}, "is a coroutine"),
    ],
)
def test_bad_custom_functions_name_the_key(tmp_path, change, match):
    custom = {"path": write_function(tmp_path), "name": "my_score"} | change
    with pytest.raises(ValueError, match=match):
        get_custom_reward_fn(make_config(custom_reward_function=custom))


def test_custom_file_that_does_not_import_is_named(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module_here\n")
    with pytest.raises(ValueError, match=r"custom_reward_function\.path=.*broken\.py.*no_such_module_here"):
        get_custom_reward_fn(make_config(custom_reward_function={"path": str(path)}))


def test_reward_kwargs_without_effect_are_refused():
    config = make_config(reward_kwargs={"max_resp_len": 10})
    with pytest.raises(ValueError, match=r"reward_kwargs\.max_resp_len: the reward manager 'naive' has no use for it"):
        load_reward_manager(config, TOKENIZER)
