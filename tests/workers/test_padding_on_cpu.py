# SPDX-License-Identifier: Apache-2.0
"""From the padded batch to jagged sequences and back: positions, gradients, empty and odd rows."""

import pytest
import torch
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import (
    check_same_rows,
    left_right_2_no_padding,
    no_padding_2_padding,
    response_to_jagged,
)

P, R = 4, 5
# prompt and response tokens per row: odd and even lengths, a full row, a row with an empty response
ROWS = [([11, 12, 13], [21]), ([14], [22, 23, 24, 25, 26]), ([15, 16, 17, 18], []), ([19, 20], [27, 28, 29])]


def _batch(rows=ROWS, prompt_width: int = P, response_width: int = R) -> TensorDict:
    size = len(rows)
    prompts, responses = torch.zeros(size, prompt_width).long(), torch.zeros(size, response_width).long()
    mask = torch.zeros(size, prompt_width + response_width).long()
    for i, (prompt, response) in enumerate(rows):
        prompts[i, prompt_width - len(prompt) :] = torch.tensor(prompt)
        responses[i, : len(response)] = torch.tensor(response)
        mask[i, prompt_width - len(prompt) : prompt_width + len(response)] = 1
    return tu.get_tensordict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask[:, prompt_width:].clone(),
            "advantages": torch.randn(size, response_width),
            "uid": [str(i) for i in range(size)],
        },
        {"temperature": 0.5},
    )


def _real(data: TensorDict) -> torch.Tensor:
    return data["attention_mask"][:, data["prompts"].shape[1] :].bool()


def test_sequences_hold_the_real_tokens_only():
    data = _batch()
    out = left_right_2_no_padding(data)
    assert [r.tolist() for r in out["input_ids"].unbind()] == [prompt + response for prompt, response in ROWS]
    assert [r.tolist() for r in out["position_ids"].unbind()] == [list(range(len(p) + len(r))) for p, r in ROWS]
    assert [r.tolist() for r in out["loss_mask"].unbind()] == [[0] * len(p) + [1] * len(r) for p, r in ROWS]
    assert out["input_ids"].offsets() is out["loss_mask"].offsets() is out["position_ids"].offsets()
    assert tu.get(out, "max_response_len") == R and tu.get(out, "temperature") == 0.5
    assert tu.get(out, "uid") == ["0", "1", "2", "3"] and out["advantages"] is data["advantages"]


def test_the_padded_batch_is_left_as_it_was():
    data = _batch()
    before = tu.slice_tensordict(data, 0, 4)
    left_right_2_no_padding(data)
    tu.assert_tensordict_eq(data, before)


def test_response_mask_decides_the_loss_mask_inside_a_response():
    data = _batch()
    data["response_mask"][1] = torch.tensor([1, 0, 0, 1, 1])
    assert left_right_2_no_padding(data)["loss_mask"].unbind()[1].tolist() == [0, 1, 0, 0, 1, 1]


def test_values_come_from_the_position_before_their_token():
    data = left_right_2_no_padding(_batch())
    # At every position t the "prediction" is token t + 1 of its own sequence; the last one is meaningless: -1.
    predictions = [torch.tensor((prompt + response)[1:] + [-1]) for prompt, response in ROWS]
    out = no_padding_2_padding(tu.nested_tensor_from_tensor_list(predictions), data)
    assert torch.equal(out, data["responses"])


def test_padding_is_zero_and_nan_outside_the_response_stays_outside():
    data = left_right_2_no_padding(_batch())
    values = [torch.full((len(p) + len(r),), float("nan")) for p, r in ROWS]
    for value, (prompt, response) in zip(values, ROWS, strict=True):
        value[len(prompt) - 1 : len(prompt) - 1 + len(response)] = 2.0
    leaf = torch.cat(values).requires_grad_()
    out = no_padding_2_padding(
        torch.nested.nested_tensor_from_jagged(leaf, data["input_ids"].offsets()),
        data,
    )
    assert torch.equal(out, 2.0 * _real(data))
    out.sum().backward()
    assert torch.equal(leaf.grad, (leaf == 2.0).float())


def test_gradients_flow_to_the_right_positions():
    data = left_right_2_no_padding(_batch())
    weights = torch.arange(1.0, 1 + 4 * R, dtype=torch.float64).reshape(4, R)
    offsets = data["input_ids"].offsets()
    leaf = torch.randn(int(offsets[-1]), dtype=torch.float64, requires_grad=True)
    (no_padding_2_padding(torch.nested.nested_tensor_from_jagged(leaf, offsets), data) * weights).sum().backward()
    expected = torch.zeros_like(leaf)
    for i, (prompt, response) in enumerate(ROWS):
        start = int(offsets[i]) + len(prompt) - 1
        expected[start : start + len(response)] = weights[i, : len(response)]
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_two_directions_are_inverse_on_real_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    prompt_width, response_width = 7, 9
    rows = [
        (
            list(range(1, 1 + int(torch.randint(1, prompt_width + 1, (), generator=generator)))),
            list(range(int(torch.randint(0, response_width + 1, (), generator=generator)))),
        )
        for _ in range(6)
    ]
    data = left_right_2_no_padding(_batch(rows, prompt_width, response_width))
    values = torch.randn(6, response_width, generator=generator)
    jagged = response_to_jagged(values, data)
    assert jagged.offsets().tolist() == data["input_ids"].offsets().tolist()
    assert torch.equal(no_padding_2_padding(jagged, data), torch.where(_real(data), values, 0.0))
    assert jagged.values().count_nonzero() == _real(data).sum()


def test_response_to_jagged_is_differentiable():
    data = left_right_2_no_padding(_batch())
    values = torch.randn(4, R, requires_grad=True)
    response_to_jagged(values, data).values().sum().backward()
    assert torch.equal(values.grad, _real(data).float())


def test_rows_without_any_response_or_prompt():
    only_prompts = left_right_2_no_padding(_batch([([1, 2], []), ([3], [])]))
    out = no_padding_2_padding(only_prompts["input_ids"].float(), only_prompts)
    assert torch.equal(out, torch.zeros(2, R))
    # Nothing predicts the first token of a row without a prompt; the neighbour's last value must not be taken.
    data = left_right_2_no_padding(_batch([([1], [2]), ([], [3, 4])]))
    ones = torch.nested.nested_tensor_from_jagged(torch.ones(4), data["input_ids"].offsets())
    assert no_padding_2_padding(ones, data).tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    empty = left_right_2_no_padding(_batch([([], []), ([], [])]))
    assert torch.equal(no_padding_2_padding(empty["input_ids"].float(), empty), torch.zeros(2, R))


def test_pieces_convert_like_the_whole():
    data = left_right_2_no_padding(_batch())
    whole = no_padding_2_padding(data["input_ids"], data)
    for piece, rows in zip(tu.chunk_tensordict(data, 2), whole.chunk(2), strict=True):
        assert torch.equal(no_padding_2_padding(piece["input_ids"], piece), rows)
    picked = tu.index_select_tensor_dict(data, [3, 0])
    assert torch.equal(no_padding_2_padding(picked["input_ids"], picked), whole[[3, 0]])


def test_wrong_batches_are_named():
    with pytest.raises(KeyError, match="response_mask"):
        left_right_2_no_padding(tu.get_keys(_batch(), ["input_ids", "attention_mask", "position_ids", "prompts"]))
    data = _batch()
    data["prompts"] = data["prompts"][:, 1:]
    with pytest.raises(ValueError, match=r"prompts \(3\) and responses \(5\) ask for 8"):
        left_right_2_no_padding(data)
    for row, column in ((1, P + 1), (2, 1)):
        data = _batch()
        data["attention_mask"][row, column] = 0
        data["response_mask"][row] = 0
        with pytest.raises(ValueError, match="in every row"):
            left_right_2_no_padding(data)
    data = _batch()
    data["response_mask"][0, 1] = 1
    with pytest.raises(ValueError, match="response_mask is 1 where attention_mask is 0"):
        left_right_2_no_padding(data)
    data = left_right_2_no_padding(_batch())
    other = tu.index_select_tensor_dict(data, [1, 0, 2, 3])
    check_same_rows(data["input_ids"], data)
    with pytest.raises(ValueError, match="another batch"):
        check_same_rows(other["input_ids"], data)
