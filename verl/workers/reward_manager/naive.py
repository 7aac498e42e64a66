# SPDX-License-Identifier: Apache-2.0
"""The plain reward manager: one call of the score function per response, one after the other, in this process."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score import UnknownDataSourceError, default_compute_score
from verl.workers.reward_manager.registry import register

logger = logging.getLogger(__name__)

__all__ = ["NaiveRewardManager"]


@register("naive")
class NaiveRewardManager:
    """Decode responses, score each one, put the score on its last token.

    The score function is called as `compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`.
    `solution_str` has no special tokens, so `extra_info["finished"]` tells whether the response ended with EOS.
    A call that raises, or gives no finite number, counts as score 0 and is logged with the row number; the run goes on.
    Only a data source without a rule stops it, since no response of that source could ever be scored.

    Args:
        tokenizer: decodes the responses.
        num_examine: how many responses of each data source to print per call.
        compute_score: the score function; `default_compute_score` when None. It returns a number, or a dict with
            `score` and further values, which end up in `reward_extra_info`.
        reward_fn_key: the column that names the data source.
        **reward_kwargs: what `reward.reward_kwargs` holds; this manager takes none.

    Raises:
        ValueError: a reward_kwarg was given.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ):
        if reward_kwargs:
            names = ", ".join(f"reward.reward_kwargs.{name}" for name in sorted(reward_kwargs))
            raise ValueError(f"the reward manager 'naive' has no use for {names}; leave it out")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score a batch.

        Args:
            data: batch tensors prompts [B, P], responses [B, R] (right-padded), attention_mask [B, P+R]; non-tensors
                `reward_fn_key`, reward_model (with ground_truth), extra_info (optional). `meta_info["eos_token_id"]`
                (one or several ids) goes before the tokenizer's.
            return_dict: see below.

        Returns:
            float32 [B, R] with each score at the response's last token (an empty response: at its first place); with
            `return_dict`, {"reward_tensor": that, "reward_extra_info": dict of lists of length B}. A row without a
            value for some extra info has None there.

        Raises:
            ValueError: a column is missing.
            UnknownDataSourceError: no rule scores a row's data source.
        """
        responses, sources = data.batch["responses"], self._column(data, self.reward_fn_key)
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(dim=-1).tolist()
        tokens = [row[:length].tolist() for row, length in zip(responses, lengths, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        truths = [reward_model["ground_truth"] for reward_model in self._column(data, "reward_model")]
        infos = data.non_tensor_batch.get("extra_info", [None] * len(data))

        eos_ids = self._eos_token_ids(data)
        results = []
        for i, (source, text, truth, info) in enumerate(zip(sources, texts, truths, infos, strict=True)):
            finished = bool(tokens[i]) and tokens[i][-1] in eos_ids
            results.append(self._score(i, source, text, truth, {**(info or {}), "finished": finished}))
        scores = [result["score"] for result in results]
        self._print_examples(data, sources, texts, truths, scores)

        last = torch.tensor(lengths, device=responses.device).clamp(min=1).unsqueeze(-1) - 1
        values = torch.tensor(scores, dtype=torch.float32, device=responses.device).unsqueeze(-1)
        reward_tensor = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        reward_tensor.scatter_(1, last, values)
        if not return_dict:
            return reward_tensor
        names = dict.fromkeys(name for result in results for name in result)
        has_extra = len(names) > 1
        extra = {name: [result.get(name) for result in results] for name in names} if has_extra else {}
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra}

    def _column(self, data: DataProto, name: str) -> Any:
        if name not in data.non_tensor_batch:
            raise ValueError(
                f"the batch has no column {name!r}, which the reward needs; it has {', '.join(data.non_tensor_batch)}"
            )
        return data.non_tensor_batch[name]

    def _eos_token_ids(self, data: DataProto) -> set[int]:
        ids = data.meta_info.get("eos_token_id", self.tokenizer.eos_token_id)
        return {ids} if ids is None or isinstance(ids, int) else set(ids)

    def _score(self, i: int, source: str, text: str, truth: Any, info: dict[str, Any]) -> dict[str, Any]:
        """Result of one call as a dict with a float under `score`."""
        try:
            result = self.compute_score(data_source=source, solution_str=text, ground_truth=truth, extra_info=info)
            result = dict(result) if isinstance(result, dict) else {"score": result}
            score = float(result["score"])
            if not math.isfinite(score):
                raise ValueError(f"the score is {score}")
            return result | {"score": score}
        except UnknownDataSourceError:
            raise
        except Exception as error:  # the score function is the user's; one bad response must not end the run
            logger.warning("compute_score failed for row %d (data_source %r), score 0: %r", i, source, error)
            return {"score": 0.0}

    def _print_examples(self, data: DataProto, sources: Any, texts: list[str], truths: list, scores: list) -> None:
        seen: Counter[str] = Counter()
        for i, source in enumerate(sources):
            if seen[source] >= self.num_examine:
                continue
            seen[source] += 1
            width = data.batch["prompts"].shape[1]
            is_token = data.batch["attention_mask"][i, :width].bool()
            prompt = self.tokenizer.decode(data.batch["prompts"][i][is_token].tolist())
            for label, value in (
                ("prompt", prompt),
                ("response", texts[i]),
                ("truth", truths[i]),
                ("score", scores[i]),
            ):
                print(f"[{label}] {value}")
