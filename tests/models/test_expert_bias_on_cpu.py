# SPDX-License-Identifier: Apache-2.0
"""The counts that move a router's expert bias are those of real tokens."""

from types import SimpleNamespace

import pytest
import torch

from tests.utils_dist import run_world


def counts(rank: int, world: int) -> list[list[list[float]]]:
    """What a router counted with a padding mask, what it should have, and what it counted without one."""
    from verl.utils.megatron import cpu_backend

    cpu_backend.install()
    from megatron.core.transformer.moe.router import TopKRouter

    from verl.models.mcore.patch import apply_patches

    apply_patches()
    found = []
    for tokens in (3, 4):
        chosen = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)[:tokens]
        padding = torch.tensor([False, True, False, True])[:tokens]
        router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(4))
        TopKRouter._apply_expert_bias(router, chosen, padding_mask=padding)
        masked = router.local_tokens_per_expert.tolist()
        TopKRouter._apply_expert_bias(router, chosen)
        both = router.local_tokens_per_expert.tolist()
        found.append([masked, chosen[~padding].sum(0).tolist(), both])
    return found


@pytest.mark.gloo
def test_padding_is_not_counted_for_the_expert_bias() -> None:
    ((fewer_tokens_than_experts, as_many),) = run_world(counts, 1)
    for tokens, (masked, real, both) in ((3, fewer_tokens_than_experts), (4, as_many)):
        assert masked == real == [1, 2, 0, 1]
        assert sum(both) == 4 + 2 * tokens
