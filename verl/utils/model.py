# SPDX-License-Identifier: Apache-2.0
"""Small tensor helpers about token positions and response masks."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["compute_position_id_with_mask", "compute_response_mask"]


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions that count real tokens only: the first real token of a row is at 0, whatever the padding before it.

    Args:
        mask: [..., T], 1 (or True) for real tokens.

    Returns:
        int64 [..., T]; padding before the first real token gets 0, padding after the last one repeats its position.
    """
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def compute_response_mask(
    responses: Tensor,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Which tokens of right-padded responses the policy produced.

    A response goes up to and including its first EOS. One without EOS goes up to its last token that is not padding.
    When the pad id is also an EOS id, the first such token is kept as the EOS and the rest is padding.

    Args:
        responses: int64 [B, R], right-padded.
        eos_token_id: one id, several ids (any of them ends a response), or None when nothing ends it.
        pad_token_id: the padding id, or None when responses carry no padding.
        dtype: of the result.

    Returns:
        [B, R], 1 on the response, 0 after it.
    """
    eos_ids = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    is_eos = torch.isin(responses, torch.tensor(eos_ids, dtype=responses.dtype, device=responses.device))
    after_first_eos = (is_eos.long().cumsum(dim=-1) - is_eos.long()) > 0
    mask = ~after_first_eos
    if pad_token_id is not None and pad_token_id not in eos_ids:
        # Only the trailing run is padding: a pad id with a real token after it was sampled.
        is_real = (responses != pad_token_id).long()
        real_from_here_on = is_real.flip(-1).cumsum(dim=-1).flip(-1) > 0
        mask = mask & real_from_here_on
    return mask.to(dtype)
