# SPDX-License-Identifier: Apache-2.0
"""A Megatron engine on a tiny Qwen3-MoE with a fixed batch: the pieces that tests run inside a gloo world."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, McoreActorConfig, McoreEngineConfig, McoreOptimizerConfig, MtpConfig
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl.workers.utils.padding import left_right_2_no_padding

VOCAB = 64
# (prompt, response) lengths: odd ones, shorter than 2 * cp, one long
LENGTHS = ((4, 3), (7, 5), (2, 3), (1, 8), (2, 1), (5, 5), (3, 3), (9, 11))


def save_sharp_model(folder: str, **sizes: Any) -> str:
    """A tiny Qwen3-MoE whose matrices are scaled up, so that routing and next tokens are far from uniform."""
    from verl.utils.tiny_model import save_tiny_qwen3_moe

    settings = dict(hidden=32, heads=4, kv_heads=2, head_dim=8, experts=4, moe_intermediate=24, vocab=VOCAB) | sizes
    save_tiny_qwen3_moe(folder, **settings)
    path = os.path.join(folder, "model.safetensors")
    weights = {name: w * 4 if w.dim() > 1 else w for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def padded_batch(
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    masked_rows: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> TensorDict:
    """A controller's batch with made-up policy columns; the rows in ``masked_rows`` have no response token to train."""
    generator = torch.Generator().manual_seed(5)
    rows, width_p, width_r = len(lengths), max(p for p, _ in lengths), max(r for _, r in lengths) + 1
    prompts, responses = torch.zeros(rows, width_p).long(), torch.zeros(rows, width_r).long()
    mask, response_mask = torch.zeros(rows, width_p + width_r).long(), torch.zeros(rows, width_r).long()
    for i, (p, r) in enumerate(lengths):
        prompts[i, width_p - p :] = torch.randint(1, VOCAB, (p,), generator=generator)
        responses[i, :r] = torch.randint(1, VOCAB, (r,), generator=generator)
        mask[i, width_p - p : width_p + r] = 1
        if i not in masked_rows:
            response_mask[i, :r] = 1
    # one hole inside a response, as a tool call leaves it
    if rows > 5 and 5 not in masked_rows:
        response_mask[5, 2] = 0
    noise = [torch.randn(rows, width_r, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
            "response_mask": response_mask,
            "advantages": noise[0],
            "old_log_probs": noise[1] - 4.0,
            "ref_log_prob": noise[2] - 4.0,
        },
        batch_size=[rows],
    )


@dataclass(frozen=True)
class Case:
    """One layout, one regime, one loss, one way to cut the batch."""

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = True
    distributed_optimizer: bool = False
    per_token_loss: bool = False
    dense: bool = False
    z_loss: float = 0.0
    loss: str = "policy"
    loss_agg_mode: str = "token-mean"
    micro_batch_size: int | None = 2
    token_budget: int | None = None
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    masked_rows: tuple[int, ...] = ()
    dtype: str = "float32"
    overrides: dict[str, Any] = field(default_factory=dict)
    overlap_grad_reduce: bool = False
    mtp: MtpConfig = field(default_factory=MtpConfig)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def actor_config(case: Case) -> McoreActorConfig:
    settings: dict[str, Any] = {"loss_agg_mode": case.loss_agg_mode, "max_response_length": 12}
    if case.loss == "entropy":
        settings |= {"entropy_coeff": 0.1}
    if case.loss == "kl":
        settings |= {"use_kl_loss": True, "kl_loss_coef": 0.1}
    return McoreActorConfig(**settings)


def loss_function(case: Case) -> Any:
    return partial(sft_loss, config=None) if case.loss == "sft" else partial(ppo_loss, config=actor_config(case))


_OPTIMIZER = McoreOptimizerConfig(lr=1e-3, clip_grad=1.0, total_training_steps=10)


@contextmanager
def engine(path: str, case: Case, optimizer: McoreOptimizerConfig | None = _OPTIMIZER) -> Iterator[Any]:
    """An initialised engine in the case's layout; the layout is torn down afterwards."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from verl.utils.megatron.cpu_backend import reset_megatron_state
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
    from verl.workers.engine.megatron.value_head import MegatronEngineWithValueHead

    config = McoreEngineConfig(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp if case.etp is not None else (1 if case.ep > 1 else None),
        sequence_parallel=case.sequence_parallel,
        use_distributed_optimizer=case.distributed_optimizer,
        dtype=case.dtype,
        per_token_loss_guards=False,
        override_ddp_config={"overlap_grad_reduce": case.overlap_grad_reduce},
        override_transformer_config={
            "moe_z_loss_coeff": case.z_loss or None,
            "calculate_per_token_loss": case.per_token_loss,
            **case.overrides,
        },
    )
    model = HFModelConfig(path=path, use_remove_padding=not case.dense, mtp=case.mtp)
    engine_cls = MegatronEngineWithValueHead if case.loss == "value" else MegatronEngineWithLMHead
    built = engine_cls(model, config, optimizer)
    built.initialize()
    try:
        yield built
    finally:
        reset_megatron_state()


def rank_batch(case: Case, engine: Any) -> TensorDict:
    """This data-parallel rank's rows (every dp-th), with the case's micro-batch settings."""
    whole = padded_batch(case.lengths, case.masked_rows, case.torch_dtype)
    rows = list(range(engine.get_data_parallel_rank(), whole.batch_size[0], engine.get_data_parallel_size()))
    data = left_right_2_no_padding(tu.index_select_tensor_dict(whole, rows))
    if case.loss == "sft":
        for key in ("response_mask", "attention_mask"):
            tu.pop(data, key)
    settings: dict[str, Any] = {"temperature": 0.8, "calculate_entropy": case.loss == "entropy"}
    if case.token_budget is not None:
        settings |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": case.token_budget}
    else:
        settings |= {"micro_batch_size_per_gpu": case.micro_batch_size}
    return tu.assign_non_tensor(data, **settings)


def rows_of_rank(case: Case, engine: Any) -> list[int]:
    """Row numbers of the whole batch that :func:`rank_batch` gives this rank."""
    return list(range(engine.get_data_parallel_rank(), len(case.lengths), engine.get_data_parallel_size()))
