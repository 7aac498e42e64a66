# SPDX-License-Identifier: Apache-2.0
"""Between the controller's padded batch and the jagged batch that the engines train on.

Padded: prompts are left-padded to P, responses right-padded to R, a full sequence is [B, P + R]. Jagged: [B, j] holds
the real tokens only. The prediction made AT position t is of token t + 1, so the values of a response of n tokens stand
at the n positions that start one before it.
"""

import torch
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.jagged import jagged_parts, make_jagged, offsets_from_lengths


def left_right_2_no_padding(data: TensorDict) -> TensorDict:
    """Return a shallow copy of the batch in which the sequences are jagged.

    Needs ``input_ids``, ``attention_mask``, ``position_ids`` [B, P + R], ``prompts`` [B, P], ``responses`` and
    ``response_mask`` [B, R]. Makes ``input_ids``, ``position_ids`` jagged [B, j]; adds ``loss_mask`` jagged [B, j], 1
    where the token itself is a trained target (its response mask; 0 on the prompt), and the metadata
    ``max_response_len`` = R. The three jagged tensors share their offsets. Everything else stays padded, as it is.

    Raises:
        KeyError: a needed column is missing.
        ValueError: the widths do not add up, the attention mask has a hole inside a prompt or a response, or the
            response mask is 1 on padding.
    """
    tu.get_keys(data, ["input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask"])
    prompt_width, response_width = data["prompts"].shape[1], data["responses"].shape[1]
    mask = data["attention_mask"].bool()
    if mask.shape[1] != prompt_width + response_width or data["response_mask"].shape[1] != response_width:
        raise ValueError(
            f"attention_mask is {mask.shape[1]} wide and response_mask {data['response_mask'].shape[1]}, but prompts "
            f"({prompt_width}) and responses ({response_width}) ask for {prompt_width + response_width} and "
            f"{response_width}"
        )
    prompt_mask, answer_mask = mask[:, :prompt_width], mask[:, prompt_width:]
    # The way back cuts one block of tokens per row, so the real tokens have to be one block.
    hole_in_prompt = (prompt_mask[:, :-1] & ~prompt_mask[:, 1:]).any()
    hole_in_response = (~answer_mask[:, :-1] & answer_mask[:, 1:]).any()
    if hole_in_prompt or hole_in_response:
        raise ValueError("attention_mask must be 0..01..1 over the prompt and 1..10..0 over the response in every row")
    response_mask = data["response_mask"]
    if (response_mask.bool() & ~answer_mask).any():
        raise ValueError("response_mask is 1 where attention_mask is 0: padding would count as trained tokens")
    full_loss_mask = torch.cat([response_mask.new_zeros(mask.shape[0], prompt_width), response_mask], dim=1)
    offsets = offsets_from_lengths(mask.sum(dim=1))
    result = data.copy()
    result.set("input_ids", make_jagged(data["input_ids"][mask], offsets))
    result.set("position_ids", make_jagged(data["position_ids"][mask], offsets))
    result.set("loss_mask", make_jagged(full_loss_mask[mask], offsets))
    return tu.assign_non_tensor_data(result, "max_response_len", response_width)


def _response_positions(offsets: torch.Tensor, data: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the prediction of each response token stands in the jagged values, and whether it is real; both [B, R]."""
    mask = data["attention_mask"].bool()
    prompt_width = data["prompts"].shape[1]
    prompt_lens = mask[:, :prompt_width].sum(dim=1)
    response_lens = mask[:, prompt_width:].sum(dim=1)
    steps = torch.arange(mask.shape[1] - prompt_width, device=mask.device)
    positions = prompt_lens[:, None] - 1 + steps
    # Without a prompt nothing predicts the first response token: its value is 0.
    valid = (steps < response_lens[:, None]) & (positions >= 0)
    return offsets[:-1, None] + positions, valid


def check_same_rows(tensor: torch.Tensor, data: TensorDict) -> None:
    """Whether a jagged tensor [B, j] has the rows of ``attention_mask`` [B, P + R]. On an accelerator the host waits.

    Raises:
        ValueError: a row has another length.
    """
    if not torch.equal(jagged_parts(tensor)[1].diff(), data["attention_mask"].bool().sum(dim=1)):
        raise ValueError("the jagged tensor's row lengths are not those of attention_mask: it is from another batch")


def no_padding_2_padding(tensor: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Cut the responses out of per-position model outputs. Differentiable, no loop, no wait for an accelerator.

    Args:
        tensor: jagged [B, j]; row i at position t belongs to the prediction made at t, of token t + 1.
        data: has ``attention_mask`` [B, P + R] and ``prompts`` [B, P].

    Returns:
        Dense [B, R]: the values of the predictions of the response tokens, 0 after the end of each response.

    Whether the rows are as long as the attention mask says is not looked at: see :func:`check_same_rows`.

    Raises:
        ValueError: not a jagged tensor.
    """
    values, offsets = jagged_parts(tensor)
    positions, valid = _response_positions(offsets, data)
    if values.shape[0] == 0:
        return values.sum() + values.new_zeros(positions.shape)
    picked = values[positions.clamp(0, values.shape[0] - 1)]
    return torch.where(valid, picked, picked.new_zeros(()))


def response_to_jagged(tensor: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Put response values [B, R] at the positions that predict them: jagged [B, j], 0 at all other positions.

    The inverse of :func:`no_padding_2_padding` on the real response tokens. Differentiable.
    """
    offsets = offsets_from_lengths(data["attention_mask"].bool().sum(dim=1))
    positions, valid = _response_positions(offsets, data)
    values = tensor.new_zeros(int(offsets[-1])).index_put((positions[valid],), tensor[valid])
    return make_jagged(values, offsets)
