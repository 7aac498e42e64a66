# SPDX-License-Identifier: Apache-2.0
"""Rollout with a transformers model inside the worker: no server, no sharding, the same on CPUs and accelerators."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from verl.protocol import DataProto
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.hf_weights import InPlaceLoader
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.sampling import SamplingParams, draw_tokens

# Finished rows are dropped from the batch once this share of it is finished: dropping copies the whole KV cache.
_DROP_SHARE = 0.25


class HFRollout(BaseRollout):
    """Generates with a whole transformers model per worker, in its own decode loop.

    The loop does what `generate` does for sampling and greedy search, and three things that it does not: identical
    prompts (the n samples of one) are prefilled once, finished rows leave the batch, and log-probs of drawn tokens
    are kept without keeping the logits. The model's `generation_config` is read for the EOS and pad ids only: its
    top_k, temperature and the like never change the distribution.

    Args:
        config: reads `prompt_length, response_length, dtype, seed, calculate_log_probs, temperature, top_k, top_p,
            do_sample, val_kwargs`, and `max_num_seqs`: how many rows are generated at a time (None: all).
        model_config: reads `path, hf_config_path, trust_remote_code, override_config`.

    Raises:
        ValueError: prompt and response do not fit into the model's positions.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None):
        super().__init__(config, model_config, device_mesh)
        self.device = get_device_name()
        self.model = _build_model(model_config, getattr(torch, config.dtype)).to(self.device).eval()
        self.model.requires_grad_(False)
        _check_positions(config, self.model.config)
        # Model code from the hub builds multi-token prediction layers too; generation never runs them.
        self._loader = InPlaceLoader(self.model, may_stay=("mtp",))
        self._step, self._calls = None, Counter()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        """Copy the whole model in place from (hub name, tensor) pairs; see `InPlaceLoader.load` for the errors."""
        self._loader.load(weights)

    def resume(self, tags: list[str] | None = None) -> None:
        """Move the model back to the device. There is no lasting KV cache, so `tags` makes no difference."""
        self.model.to(self.device)

    def release(self) -> None:
        """Move the model to host memory and give freed device memory back; weights may be updated there."""
        if self.device != "cpu":
            self.model.to("cpu")
            get_torch_device().empty_cache()

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response per row.

        Args:
            prompts: batch `input_ids, attention_mask, position_ids` [B, P], left-padded, already repeated n times.
                meta_info, all optional: `eos_token_id` (int or list), `pad_token_id`, `validate`, `temperature`,
                `top_k`, `top_p`, `do_sample`, `global_steps` (the seed's step; the same step gives the same numbers).

        Returns:
            DataProto with `prompts` [B, P], `responses` and `response_mask` [B, R], `input_ids, attention_mask,
            position_ids` [B, P+R] and, with `calculate_log_probs`, `rollout_log_probs` [B, R] float32 (0 where the
            mask is 0; see `draw_tokens` for which distribution). The mask ends at the first EOS, inclusive; after it
            comes the pad id. Non-tensor columns are passed through.

        Raises:
            ValueError: a prompt without a token, no pad id, sampling settings out of range.
        """
        params = SamplingParams.from_request(self.config, prompts.meta_info)
        eos, pad = _end_and_pad_ids(self.model, prompts.meta_info)
        ids, mask, positions = (
            prompts.batch[key].to(self.device) for key in ("input_ids", "attention_mask", "position_ids")
        )
        empty = (mask.sum(dim=-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"prompts without a single token in rows {empty[:10]} of this worker's batch")
        responses = ids.new_full((len(ids), self.config.response_length), pad)
        response_mask = torch.zeros_like(responses)
        log_probs = torch.zeros_like(responses, dtype=torch.float32) if self.config.calculate_log_probs else None
        generator = torch.Generator(self.device).manual_seed(self._next_seed(prompts.meta_info))
        rows_at_a_time = self.config.max_num_seqs or max(1, len(ids))
        for start in range(0, len(ids), rows_at_a_time):
            part = slice(start, start + rows_at_a_time)
            decode(
                self.model,
                (ids[part], mask[part], positions[part]),
                responses[part],
                response_mask[part],
                None if log_probs is None else log_probs[part],
                eos,
                params,
                generator,
            )
        return _pack(prompts, responses, response_mask, log_probs)

    def _next_seed(self, meta_info: dict[str, Any]) -> int:
        """A seed that differs by config seed, rank, step, kind and call, and that a resumed run finds again.

        Mixed, not summed: with a sum, rank 1 at step 0 would draw what rank 0 draws at step 1.
        """
        step, validate = meta_info.get("global_steps"), bool(meta_info.get("validate", False))
        if step is not None and step != self._step:
            self._step = step
            self._calls.clear()
        key = (self.config.seed, _rank(), step or 0, validate, self._calls[validate])
        self._calls[validate] += 1
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


@torch.no_grad()
def decode(
    model: torch.nn.Module,
    prompt: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    log_probs: torch.Tensor | None,
    eos: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator,
) -> None:
    """Fill `responses`, `response_mask` [B, R] and `log_probs` [B, R] in place, token by token.

    Args:
        prompt: ids, attention mask and positions, each [B, P], left-padded.
        responses: [B, R], filled with the pad id.
        response_mask: [B, R], zeros.
        eos: 1-D tensor of the ids that end a response; may be empty.
    """
    logits, cache, mask, position = _prefill(model, *prompt)
    rows = torch.arange(len(responses), device=responses.device)
    live = torch.ones_like(rows, dtype=torch.bool)
    for t in range(responses.shape[1]):
        tokens, drawn = draw_tokens(logits, params, generator, log_probs is not None)
        responses[rows, t] = torch.where(live, tokens, responses[rows, t])
        response_mask[rows, t] = live.to(response_mask.dtype)
        if log_probs is not None:
            log_probs[rows, t] = torch.where(live, drawn, 0.0)
        live = live & ~torch.isin(tokens, eos)
        num_live = int(live.sum())
        if num_live == 0 or t + 1 == responses.shape[1]:
            return
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if num_live <= (1 - _DROP_SHARE) * len(rows):
            keep = live.nonzero().flatten()
            cache.reorder_cache(keep)
            rows, live, tokens, mask, position = (x[keep] for x in (rows, live, tokens, mask, position))
        position = position + 1
        logits = _last_logits(model, tokens[:, None], mask, position, cache)


def _prefill(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
    """Run the distinct prompts once; returns logits [B, V], the cache, the mask [B, P'], the last positions [B, 1]."""
    # Columns that are padding in every row would only cost time.
    first = int(mask.any(dim=0).int().argmax())
    ids, mask, positions = ids[:, first:], mask[:, first:], positions[:, first:]
    distinct, place = torch.unique(torch.stack((ids, mask, positions), dim=1), dim=0, return_inverse=True)
    cache = DynamicCache(config=model.config)
    if len(distinct) == len(ids):
        return _last_logits(model, ids, mask, positions, cache), cache, mask, positions[:, -1:]
    logits = _last_logits(model, *distinct.unbind(dim=1), cache)
    cache.reorder_cache(place)
    return logits[place], cache, mask, positions[:, -1:]


def _last_logits(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def _pack(
    prompts: DataProto, responses: torch.Tensor, response_mask: torch.Tensor, log_probs: torch.Tensor | None
) -> DataProto:
    """Put prompt and response side by side, on the device that the prompts came from."""
    ids, mask, positions = (prompts.batch[key] for key in ("input_ids", "attention_mask", "position_ids"))
    responses, response_mask = responses.to(ids.device), response_mask.to(ids.device)
    after = torch.arange(1, responses.shape[1] + 1, device=ids.device, dtype=positions.dtype)
    tensors = {
        "prompts": ids,
        "responses": responses,
        "input_ids": torch.cat((ids, responses), dim=1),
        "attention_mask": torch.cat((mask, response_mask.to(mask.dtype)), dim=1),
        "position_ids": torch.cat((positions, positions[:, -1:] + after), dim=1),
        "response_mask": response_mask,
    }
    if log_probs is not None:
        tensors["rollout_log_probs"] = log_probs.to(ids.device)
    return DataProto(
        batch=TensorDict(tensors, batch_size=[len(ids)]), non_tensor_batch=dict(prompts.non_tensor_batch), meta_info={}
    )


def _build_model(model_config: Any, dtype: torch.dtype) -> torch.nn.Module:
    path, trust = os.path.expanduser(model_config.path), model_config.trust_remote_code
    config_path = os.path.expanduser(model_config.hf_config_path or path)
    hf_config = AutoConfig.from_pretrained(config_path, trust_remote_code=trust)
    for key, value in model_config.override_config.items():
        setattr(hf_config, key, value)
    return AutoModelForCausalLM.from_pretrained(path, config=hf_config, dtype=dtype, trust_remote_code=trust)


def _check_positions(config: Any, hf_config: Any) -> None:
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.prompt_length + config.response_length > limit:
        raise ValueError(
            f"rollout.prompt_length={config.prompt_length} plus rollout.response_length={config.response_length} is "
            f"more than the model's {limit} positions: response_length can be {limit - config.prompt_length} at most"
        )


def _end_and_pad_ids(model: torch.nn.Module, meta_info: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """EOS ids as a 1-D tensor and the pad id: from the request, else the model; without a pad id, the first EOS."""

    def find(name: str) -> Any:
        places = (meta_info.get(name), getattr(model.generation_config, name, None), getattr(model.config, name, None))
        return next((value for value in places if value is not None), None)

    eos = find("eos_token_id")
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = find("pad_token_id")
    if pad is None:
        if not eos:
            raise ValueError("no pad_token_id: neither the request nor the model names one, and there is no EOS either")
        pad = eos[0]
    return torch.tensor(eos, dtype=torch.int64, device=model.device), pad


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
