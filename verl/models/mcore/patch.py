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
    _weigh_router_losses_by_whole_counts()
    _share_global_aux_loss()
    _count_real_tokens_for_expert_bias()
    _leave_uncompressed_queries_without_norm()
    _sum_gradients_of_shared_rotary_keys()
    _keep_float64_router_scores()
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


def _weigh_router_losses_by_whole_counts() -> None:
    """Auxiliary losses of a group of ranks are weighed by what each rank happens to hold.

    The value of a micro-batch is a sum over its TP and CP ranks, of which each computes a part. In the per-token regime
    Megatron multiplies each part by that rank's own number of tokens times the group's size, which is right only for
    equal shards; and because the all-reduce of the counts is done in place, with a padding mask the "own" number is the
    whole group's, ``tp * cp`` times too much. Here every rank gets an equal share of the group's true count. A
    micro-batch without a real token gives 0, not 0 / 0.
    """
    from megatron.core.transformer.moe import moe_utils, router

    original = moe_utils.get_tokens_per_expert_and_token_count

    @functools.wraps(original)
    def counts(routing_map: Any, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False) -> tuple:
        local = routing_map.sum(dim=0)
        whole = moe_utils.reduce_from_tensor_model_parallel_region(local.clone(), reduce_group)
        size = reduce_group.size()
        total = (whole.sum() / topk).clamp(min=1) if with_padding_mask else routing_map.shape[0] * size
        return whole, total / size, total

    moe_utils.get_tokens_per_expert_and_token_count = counts
    router.get_tokens_per_expert_and_token_count = counts


def _share_global_aux_loss() -> None:
    """The global auxiliary loss depends on the layout and on unequal micro-batches.

    Its value is a sum over all data-parallel ranks already, so that averaging over them makes it ``dp`` times weaker
    than the other types; and the running mean of expert counts is divided by the tokens of the current micro-batch.
    Here a step's expert fractions are those of its tokens so far, and every rank's part has the weight of all tokens
    of the current micro-batches. The counts stay in float32 where the model is in bfloat16, which knows no 257.
    """
    from megatron.core.transformer.moe import router

    original = router.TopKRouter._apply_global_aux_loss

    @functools.wraps(original)
    def apply(
        self: Any, probs: Any, scores_for_aux_loss: Any, routing_map: Any, with_padding_mask: bool = False
    ) -> Any:
        coeff = self.get_aux_loss_coeff("global_aux_loss")
        if coeff == 0:
            return probs
        whole, _, total = router.get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_dp_cp_group,
            with_padding_mask=with_padding_mask,
            topk=self.topk,
        )
        if self.global_tokens_per_expert.dtype.itemsize < 4:
            self.global_tokens_per_expert = self.global_tokens_per_expert.float()
        self.global_tokens_per_expert += whole
        self.ga_steps += 1
        so_far = (self.global_tokens_per_expert.sum() / self.topk).clamp(min=1)
        loss = router.switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=self.global_tokens_per_expert * (total / so_far),
            total_num_tokens=total,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coeff,
            fused=self.config.moe_router_fusion,
        )
        return self.attach_and_log_load_balancing_loss(
            probs,
            coeff,
            loss,
            "global_load_balancing_loss",
            self.tp_dp_cp_group,
            needs_dp_avg=False,
            valid_token_count=total / self.tp_cp_group.size(),
        )

    router.TopKRouter._apply_global_aux_loss = apply


def _count_real_tokens_for_expert_bias() -> None:
    """Routers with an expert bias (DeepSeek-V3 and its kin) fail under a padding mask.

    The mask has an entry a token, and the map that it is laid over an entry a token and expert: the sizes do not match,
    or, where there are as many tokens as experts, the wrong entries are left out.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter._apply_expert_bias

    @functools.wraps(original)
    def apply(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        if padding_mask is not None and padding_mask.dim() == 1:
            padding_mask = padding_mask.unsqueeze(-1)
        original(self, routing_map, padding_mask=padding_mask)

    TopKRouter._apply_expert_bias = apply


def _leave_uncompressed_queries_without_norm() -> None:
    """Latent attention without compressed queries (Moonlight, DeepSeek-V2-Lite) gets a norm that the models lack.

    Where queries are not compressed there is nothing between the layer's norm and their projection; megatron-core
    builds the projection with a second norm inside, whose weight no checkpoint holds, and fails without
    TransformerEngine.
    """
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    original = QKNormConfigResolver._resolve_mla_qk_layernorm

    @functools.wraps(original)
    def resolve(self: Any) -> Any:
        if not self.has_q_lora:
            with_norm = self._mla_fused_linear_or_default

            def choose(module: Any, name: str) -> Any:
                return (self._non_fused_or_default if name == "linear_q_proj" else with_norm)(module, name)

            self._mla_fused_linear_or_default = choose
        return original(self)

    QKNormConfigResolver._resolve_mla_qk_layernorm = resolve


def _sum_gradients_of_shared_rotary_keys() -> None:
    """Latent attention over tensor-parallel ranks loses gradients where the down-projection is column parallel.

    All heads share the rotated part of the keys, so that each rank has the gradient of its own heads only. Behind
    TransformerEngine's replicated down-projection the parts are summed; behind a column-parallel one (the layers
    without TransformerEngine) a rank keeps its own part. Here the output is handed on as the former would have it.
    """
    import torch
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    original = MLASelfAttention._qkv_down_projection

    @functools.wraps(original)
    def down(self: Any, hidden_states: torch.Tensor) -> tuple:
        q_compressed, kv_combined = original(self, hidden_states)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        if kv_combined.size(-1) != sum(widths):
            kv_combined = gather_from_tensor_model_parallel_region(kv_combined)
            if self.config.sequence_parallel:
                kv_combined = scatter_to_sequence_parallel_region(kv_combined)
            else:
                latent, rotary = kv_combined.split(widths, dim=-1)
                kv_combined = torch.cat([latent, copy_to_tensor_model_parallel_region(rotary)], dim=-1)
        return q_compressed, kv_combined

    MLASelfAttention._qkv_down_projection = down


def _keep_float64_router_scores() -> None:
    """Routers compute their probabilities in float32, float64 models' too.

    Rounding a gradient to float32 on its way through depends on how the loss is scaled, so that two exact layouts
    would differ by 1e-8.
    """
    import torch
    from megatron.core.transformer.moe import moe_utils, router
    from torch.overrides import TorchFunctionMode

    class KeepFloat64(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = dict(kwargs or {})
            if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
                if func is torch.Tensor.float:
                    return args[0]
                if func is torch.softmax:
                    kwargs.pop("dtype", None)
            return func(*args, **kwargs)

    def wide(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if logits.dtype != torch.float64:
                return function(logits, *args, **kwargs)
            with KeepFloat64():
                return function(logits, *args, **kwargs)

        return wrapped

    balancing = moe_utils.switch_load_balancing_loss_func

    @functools.wraps(balancing)
    def balancing_in_float64(probs: torch.Tensor, tokens_per_expert: Any, total_num_tokens: Any, **kwargs: Any) -> Any:
        if probs.dtype == torch.float64 and isinstance(total_num_tokens, torch.Tensor):
            total_num_tokens = total_num_tokens.double()
        return balancing(probs, tokens_per_expert, total_num_tokens, **kwargs)

    replacements = {
        "topk_routing_with_score_function": wide(moe_utils.topk_routing_with_score_function),
        "compute_routing_scores_for_aux_loss": wide(moe_utils.compute_routing_scores_for_aux_loss),
        "switch_load_balancing_loss_func": balancing_in_float64,
    }
    for name, replacement in replacements.items():
        setattr(moe_utils, name, replacement)
        setattr(router, name, replacement)


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
