# SPDX-License-Identifier: Apache-2.0
"""The counts that move a router's expert bias are those of real tokens."""

from types import SimpleNamespace

import pytest
import torch

from verl.models.mcore.patch import apply_patches
from verl.utils.megatron import cpu_backend


@pytest.mark.parametrize("tokens", [3, 4], ids=["3 tokens, 4 experts", "as many tokens as experts"])
def test_padding_is_not_counted_for_the_expert_bias(tokens: int) -> None:
    cpu_backend.install()
    apply_patches()
    from megatron.core.transformer.moe.router import TopKRouter

    chosen = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)[:tokens]
    padding = torch.tensor([False, True, False, True])[:tokens]
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(4))
    TopKRouter._apply_expert_bias(router, chosen, padding_mask=padding)
    assert router.local_tokens_per_expert.tolist() == chosen[~padding].sum(0).tolist() == [1, 2, 0, 1]
    TopKRouter._apply_expert_bias(router, chosen)
    assert router.local_tokens_per_expert.sum() == 4 + 2 * tokens
