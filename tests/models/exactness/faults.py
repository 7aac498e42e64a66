# SPDX-License-Identifier: Apache-2.0
"""Wrong factors, counts, masks and places, each put into the real code of one process for the time of one check."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tests.models.exactness.checks import Check, make_check
from tests.models.exactness.limits import errors_beyond_limits
from tests.models.exactness.world import engine_of, measure, references

FLAG = {"per_token_loss": True}


@dataclass(frozen=True)
class Fault:
    """``plant()`` is entered before the engine is built; ``layout`` and ``settings`` say on which check."""

    name: str
    plant: Callable[[], AbstractContextManager]
    layout: str = "cp2 dp2"
    settings: dict[str, Any] = field(default_factory=dict)
    crashes: bool = False  # whether Megatron itself stops, on every rank

    @property
    def check(self) -> Check:
        return make_check(self.layout, **{"dtype": "float64", "step": True, **self.settings})


@contextmanager
def swapped(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, and put back what was there."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def everywhere(name: str, right: Any, wrong: Any) -> AbstractContextManager:
    """Swap a function in every module of the package that imported it by name."""
    modules = [m for key, m in list(sys.modules.items()) if key.startswith("verl.") and vars(m).get(name) is right]
    assert modules, name
    return swapped(*((module, name, wrong) for module in modules))


# ------------------------------------------------------------------------------------------- counts and factors
def local_tokens(count: Callable[[Any], torch.Tensor]) -> AbstractContextManager:
    from verl.models.mcore.packing import PackLayout

    return swapped((PackLayout, "num_local_tokens", property(count)))


def loss_factor(change: Callable[[Any, float], float]) -> AbstractContextManager:
    from verl.workers.engine.megatron.loss_scale import LossScale

    right = LossScale.loss.fget
    return swapped((LossScale, "loss", property(lambda scale: change(scale, right(scale)))))


def divisor_in_one_piece() -> AbstractContextManager:
    from verl.workers.engine.megatron.loss_scale import LossScale

    return swapped((LossScale, "divisor", property(lambda scale: float(scale.routed_tokens))))


def counted_over(group: Callable[[Any], Any]) -> AbstractContextManager:
    from verl.workers.engine.megatron import transformer_impl

    right = transformer_impl.count_step
    return swapped((transformer_impl, "count_step", lambda data, dp, *rest: right(data, group(dp), *rest)))


def with_context_parallel(_: Any) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def only_sequences_with_targets() -> AbstractContextManager:
    from verl.workers.engine.megatron import transformer_impl

    right = transformer_impl.count_step

    def count(*args: Any) -> Any:
        counts = right(*args)
        return replace(counts, sequences=counts.sequences - 2)  # the check masks two

    return swapped((transformer_impl, "count_step", count))


def loss_mask_for_routed_tokens() -> AbstractContextManager:
    from verl.workers.engine.megatron import loss_scale

    return swapped((loss_scale, "_routed_num_tokens", loss_scale.loss_token_count))


def mean_of_means() -> AbstractContextManager:
    from verl.workers.utils import losses

    right = losses._step_counts

    def counts(data: Any) -> dict[str, Any]:
        own = losses.loss_token_count(data).clamp(min=1) * 4 * right(data)["dp_size"]  # the check has 4 micro-batches
        return right(data) | {"batch_num_tokens": own}

    return swapped((losses, "_step_counts", counts))


def sequence_count_of_a_shard() -> AbstractContextManager:
    from verl.algos.aggregation import agg_loss

    def shard(loss: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return agg_loss(loss, mask, *args, seq_num_tokens=(mask != 0).sum(-1) // 2, **kwargs)

    return everywhere("agg_loss", agg_loss, shard)


def two_items() -> AbstractContextManager:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine

    right = Engine.postprocess_micro_batch_func

    def wrong(self: Any, *args: Any, **kwargs: Any) -> tuple:
        items = right(self, *args, **kwargs)
        return items[0], items[-1]

    return swapped((Engine, "postprocess_micro_batch_func", wrong))


def metrics_over_context() -> AbstractContextManager:
    from verl.workers.engine.megatron import transformer_impl

    right = transformer_impl.all_reduce_metrics
    wrong = lambda metrics, group: right(metrics, with_context_parallel(group))  # noqa: E731
    return swapped((transformer_impl, "all_reduce_metrics", wrong))


# ------------------------------------------------------------------------------------------- masks and places
def change_inputs(change: Callable[[Any, Any, dict], None]) -> AbstractContextManager:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine

    right = Engine.prepare_model_inputs

    def wrong(self: Any, micro_batch: Any, *args: Any) -> dict[str, Any]:
        inputs = right(self, micro_batch, *args)
        change(self, micro_batch, inputs)
        return inputs

    return swapped((Engine, "prepare_model_inputs", wrong))


def drop_padding_mask(engine: Any, micro_batch: Any, inputs: dict) -> None:
    del inputs["model"]["padding_mask"]


def roll_labels_after_split(engine: Any, micro_batch: Any, inputs: dict) -> None:
    inputs["labels"] = inputs["layout"].pack(micro_batch["input_ids"].values()).flatten().roll(-1)


def shift_across_sequences() -> AbstractContextManager:
    from verl.workers.utils import losses

    def shifted(mask: torch.Tensor) -> torch.Tensor:
        return (mask.values() != 0).roll(-1)

    return swapped((losses, "_next_token_mask", shifted))


def alignment_without_tensor_parallel() -> AbstractContextManager:
    from verl.models.mcore import packing

    right = packing.alignment
    return swapped((packing, "alignment", lambda tp_size, cp_size: right(1, cp_size)))


def local_positions() -> AbstractContextManager:
    from megatron.core.models.common.embeddings import rope_utils

    class Alone:
        size = staticmethod(lambda: 1)
        rank = staticmethod(lambda: 0)

    right = rope_utils._apply_rotary_pos_emb_thd

    def wrong(t: torch.Tensor, cu_seqlens: torch.Tensor, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        return right(t, cu_seqlens // cp_group.size(), *args, cp_group=Alone, **kwargs)

    return swapped((rope_utils, "_apply_rotary_pos_emb_thd", wrong))


def multiply_by_mask() -> AbstractContextManager:
    from verl.algos.aggregation import select

    return everywhere("select", select, lambda values, mask: values * mask)


# ------------------------------------------------------------------------------------------- gradients between ranks
def gradient_into_all_parts() -> AbstractContextManager:
    from verl.models.mcore.attention import gather_first_dim
    from verl.utils.megatron.context_parallel import gather_with_own_gradient

    return everywhere("gather_with_own_gradient", gather_with_own_gradient, gather_first_dim)


def keys_keep_their_own_gradient() -> AbstractContextManager:
    from verl.models.mcore.attention import _GatherFirstDim

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None

    return swapped((_GatherFirstDim, "backward", staticmethod(backward)))


def after_wiring(change: Callable[[Any], None]) -> AbstractContextManager:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    right = MegatronEngine._wire_step

    def wrong(self: Any) -> None:
        right(self)
        change(self)

    return swapped((MegatronEngine, "_wire_step", wrong))


def unmark_norms(engine: Any) -> None:
    for module in engine.module:
        for name, p in module.named_parameters():
            if "norm" in name:
                p.sequence_parallel = False


def megatrons_router_scale(engine: Any) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    engine.tf_config.moe_grad_scale_func = None
    for module in engine.module:
        for part in module.modules():
            if isinstance(part, TopKRouter):
                part.calculate_per_token_loss = False


# ------------------------------------------------------------------------------------------- the patches taken off
def unpatched_counts() -> AbstractContextManager:
    from megatron.core.transformer.moe import router

    return swapped(_unpatched(router, "get_tokens_per_expert_and_token_count"))


def own_tokens_as_weight() -> AbstractContextManager:
    from megatron.core.transformer.moe import router

    right = router.get_tokens_per_expert_and_token_count

    def counts(routing_map: torch.Tensor, **kwargs: Any) -> tuple:
        whole, _, total = right(routing_map=routing_map, **kwargs)
        return whole, routing_map.sum() / kwargs["topk"], total

    return swapped((router, "get_tokens_per_expert_and_token_count", counts))


def unpatched_global_aux_loss() -> AbstractContextManager:
    from megatron.core.transformer.moe.router import TopKRouter

    return swapped(_unpatched(TopKRouter, "_apply_global_aux_loss"))


def router_scores_in_float32() -> AbstractContextManager:
    from megatron.core.transformer.moe import router

    return swapped(_unpatched(router, "topk_routing_with_score_function"))


def _unpatched(owner: Any, name: str) -> tuple[Any, str, Any]:
    return owner, name, vars(owner)[name].__wrapped__


def _aux(kind: str, **settings: Any) -> dict[str, Any]:
    return {"aux_type": kind, "aux_coef": 0.1, "data": "short", **settings}


FAULTS = [
    Fault("shard's tokens by floor division", partial(local_tokens, lambda x: x.lengths.sum() // x.cp_size),
          settings=FLAG | {"data": "short", "split": 4}),
    Fault("padding counted as tokens", partial(local_tokens, lambda x: (x.padding_mask >= 0).sum()), settings=FLAG),
    Fault("loss tokens of this rank alone", partial(counted_over, lambda group: None), "dp4"),
    Fault("counts reduced over dp x cp", partial(counted_over, with_context_parallel)),
    Fault("loss mask for routed tokens", loss_mask_for_routed_tokens, "dp4", FLAG),
    Fault("sequences without a target left out", only_sequences_with_targets,
          settings={"data": "masked sequence", "loss_agg_mode": "seq-mean-token-sum"}),
    Fault("a sequence's tokens counted on a shard", sequence_count_of_a_shard,
          settings={"loss_agg_mode": "seq-mean-token-mean"}),
    Fault("mean of means over micro-batches", mean_of_means, settings={"split": 4}),
    Fault("factor cp missing", partial(loss_factor, lambda scale, right: right / 2)),
    Fault("factor 1 / dp missing", partial(loss_factor, lambda scale, right: right * scale.dp_size), "dp4", FLAG),
    Fault("divided by micro-batches twice", partial(loss_factor, lambda scale, right: 1.0), settings={"split": 4}),
    Fault("times micro-batches with the flag on",
          partial(loss_factor, lambda scale, right: right * scale.num_micro_batches), settings=FLAG),
    Fault("float32 rounding of 1 / tokens not undone", divisor_in_one_piece, settings=FLAG),
    Fault("two items with the flag on", two_items, settings=FLAG),
    Fault("metrics summed over cp", metrics_over_context),
    Fault("padding mask not given to the router", partial(change_inputs, drop_padding_mask), settings=FLAG),
    Fault("padding mask not given, padded rows", partial(change_inputs, drop_padding_mask), "tp2", {"dense": True}),
    Fault("labels shifted after the split", partial(change_inputs, roll_labels_after_split)),
    Fault("targets shifted across sequences", shift_across_sequences, settings={"loss": "sft"}),
    Fault("padding multiple without tp", alignment_without_tensor_parallel, "tp2", {"split": 1}, crashes=True),
    Fault("positions of a shard counted from 0", local_positions),
    Fault("NaN times mask", multiply_by_mask),
    Fault("gathered log-probs give gradients twice", gradient_into_all_parts),
    Fault("keys keep their own gradient", keys_keep_their_own_gradient),
    Fault("norms not marked sequence parallel", partial(after_wiring, unmark_norms), "tp2"),
    Fault("router scale left to Megatron", partial(after_wiring, megatrons_router_scale), "dp4", {"data": "giant"}),
    Fault("expert counts reduced in place", unpatched_counts, settings=FLAG | _aux("aux_loss")),
    Fault("aux loss weighed by own tokens", own_tokens_as_weight, settings=_aux("seq_aux_loss")),
    Fault("global aux loss as in Megatron", unpatched_global_aux_loss, "dp4", _aux("global_aux_loss")),
    Fault("router probabilities in float32", router_scores_in_float32),
]  # fmt: skip


@dataclass
class Outcome:
    """What the comparison said about a fault: the comparisons that failed, and the error.

    The error is that of the whole gradient where it is wrong, else the largest one.
    """

    name: str
    error: float
    caught_by: list[str]
    crashed: bool = False


def try_faults(rank: int, world: int, paths: dict[str, str]) -> tuple[list[Outcome], list[str]]:
    """Plant each fault alone. Returns the outcomes, and the checks that fail without a fault (there must be none)."""
    known = references(rank, world, paths, [fault.check for fault in FAULTS])
    outcomes = []
    for fault in FAULTS:
        check = fault.check
        try:
            with ExitStack() as stack:
                stack.enter_context(fault.plant())
                built = stack.enter_context(engine_of(paths, check))
                result = measure(built, check, known[check.reference_key])
            found = errors_beyond_limits(result)
            seen = "whole gradient" in found or not found
            error = result.whole if seen else max(pair[0] for pair in found.values())
            outcomes.append(Outcome(fault.name, error, list(found)))
        except AssertionError as exception:
            if not fault.crashes:
                raise
            outcomes.append(Outcome(fault.name, float("inf"), [f"Megatron: {exception}"[:60]], crashed=True))
    sound = []
    for check in {fault.check.name: fault.check for fault in FAULTS[:3]}.values():
        with engine_of(paths, check) as built:
            sound += list(errors_beyond_limits(measure(built, check, known[check.reference_key])))
    return outcomes, sound
