# SPDX-License-Identifier: Apache-2.0
"""Faults of megatron-core that change a gradient or a resumed run, mended on every device.

Each patch stands alone, says which fault it mends, and is applied by :func:`apply_patches` once per process. The
versions they were checked with are in ``CHECKED``; another version is refused, because a patch that silently no longer
fits would bring the fault back.
"""

import functools
from importlib.metadata import version
from typing import Any

__all__ = ["CHECKED", "apply_patches"]

CHECKED = ("0.19.2",)

_applied = False


def apply_patches() -> None:
    """Mend megatron-core in this process (idempotent).

    Raises:
        RuntimeError: for a megatron-core version that the patches were not checked with.
    """
    global _applied
    if _applied:
        return
    found = version("megatron-core")
    if found not in CHECKED:
        raise RuntimeError(
            f"verl.models.mcore.patch was checked with megatron-core {', '.join(CHECKED)}, found {found}"
        )
    _allow_torch_norm_under_sequence_parallel()
    _scatter_padding_mask_on_later_stages()
    _keep_local_expert_counts()
    _keep_float64_cross_entropy()
    _restore_torch_adam_state()
    _rotate_whole_packs()
    _applied = True


def _allow_torch_norm_under_sequence_parallel() -> None:
    """The plain torch norm refuses sequence parallelism.

    All it needs is ``sequence_parallel = True`` on its parameters, so that the end of the step sums their gradients
    over the tensor-parallel ranks. Without the mark the replicas drift apart.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = build(cls, config, hidden_size, eps)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new


def _scatter_padding_mask_on_later_stages() -> None:
    """Under sequence parallelism only the first pipeline stage scatters the router's padding mask.

    The routers of later stages would see a mask ``tp`` times too long.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    preprocess = GPTModel._preprocess
    mask_position = 5  # place of the padding mask among the values that _preprocess returns

    @functools.wraps(preprocess)
    def wrapped(self: Any, *args: Any, padding_mask: Any = None, **kwargs: Any) -> tuple:
        values = list(preprocess(self, *args, padding_mask=padding_mask, **kwargs))
        untouched = padding_mask is not None and values[mask_position] is padding_mask
        if untouched and self.config.sequence_parallel and not self.pre_process:
            by_position = padding_mask.transpose(0, 1).contiguous()
            scattered = scatter_to_sequence_parallel_region(by_position, group=self.pg_collection.tp)
            values[mask_position] = scattered.transpose(0, 1).contiguous()
        return tuple(values)

    GPTModel._preprocess = wrapped


def _keep_local_expert_counts() -> None:
    """The sum of token counts over the TP and CP ranks is done in place, on the very tensor of local counts.

    With a padding mask the "local" number of tokens, by which the auxiliary loss is weighted in the per-token regime,
    is then the number of the whole group.
    """
    from megatron.core.transformer.moe import moe_utils, router

    def counts(routing_map: Any, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False) -> tuple:
        local = routing_map.sum(dim=0)
        whole = moe_utils.reduce_from_tensor_model_parallel_region(local.clone(), reduce_group)
        if with_padding_mask:
            return whole, local.sum() / topk, whole.sum() / topk
        return whole, routing_map.shape[0], routing_map.shape[0] * reduce_group.size()

    moe_utils.get_tokens_per_expert_and_token_count = counts
    router.get_tokens_per_expert_and_token_count = counts


def _keep_float64_cross_entropy() -> None:
    """The vocabulary-parallel cross entropy casts logits to float32, float64 ones too."""
    import torch
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    in_float32 = VocabParallelCrossEntropy.calculate_logits_max

    def logits_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.dtype == torch.float64:
            return logits.clone(), logits.max(dim=-1)[0]
        return in_float32(logits)

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(logits_max)


def _restore_torch_adam_state() -> None:
    """Two faults of the distributed optimizer with torch's Adam (no TransformerEngine, no Apex).

    Its state also holds ``step``, which is looked up among the checkpointed tensors and is not there. And after a load
    all parameters share one ``step`` tensor, which Adam then advances once per parameter: a silent, wrong bias
    correction.
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load = DistributedOptimizer.load_state_dict

    @functools.wraps(set_states)
    def set_states_without_step(self: Any, model_param: Any, tensors: dict) -> None:
        set_states(self, model_param, {"step": None, **tensors})

    @functools.wraps(load)
    def load_with_own_steps(self: Any, state_dict: dict) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
    DistributedOptimizer.load_state_dict = load_with_own_steps


def _rotate_whole_packs() -> None:
    """The unfused rotary embedding of a pack works sequence by sequence: a dozen launches for each of them.

    The positions of all tokens at once, then one rotation, gives the same numbers (RoPE: Su et al. 2021,
    arXiv 2104.09864).
    """
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    def rotate(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
        multi_latent_attention: bool | None = None,
    ) -> torch.Tensor:
        """[t, h, d] of a pack, rotated; ``freqs`` [longest, 1, 1, d], or one row for every position of the pack."""
        if multi_latent_attention is not None:
            mla_rotary_interleaved = multi_latent_attention
        cp_size, cp_rank = cp_group.size(), cp_group.rank()
        ends = cu_seqlens.long()
        slots = torch.arange(t.shape[0], device=t.device)
        sequence = torch.bucketize(slots, ends[1:] // cp_size, right=True)
        position = slots - (ends[:-1] // cp_size)[sequence]
        if cp_size > 1:
            chunk = ends.diff()[sequence] // (2 * cp_size)
            ahead = (2 * cp_size - 2 - cp_rank) * chunk  # what lies between a rank's first and second chunk
            position = position + torch.where(position < chunk, cp_rank * chunk, ahead)
        if freqs.shape[0] == t.shape[0] * cp_size:
            position = position + ends[:-1][sequence]
        return rope_utils._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1),
            freqs[position],
            rotary_interleaved=rotary_interleaved,
            mla_rotary_interleaved=mla_rotary_interleaved,
            mscale=mscale,
        ).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate
