# SPDX-License-Identifier: Apache-2.0
"""What the reward managers share: from a batch to calls of the score function, and from its answers to scores."""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score import AllRowsFailedError, UnscorableError, default_compute_score
from verl.utils.timed_process import Outcome

logger = logging.getLogger(__name__)

__all__ = ["RewardManager"]


class RewardManager(ABC):
    """Decodes responses, has each one scored, puts the score on its last token.

    The score function gets `data_source, solution_str, ground_truth, extra_info`. `solution_str` has no special tokens,
    so `extra_info["finished"]` tells whether the response ended with EOS. It returns a number, or a dict with `score`
    and further values, which end up in `reward_extra_info`; the two may be mixed.

    A call that raises, gives no finite number or takes too long counts as score 0 and is logged with the row number;
    the run goes on. What stops it is a data source that cannot be scored at all, and a batch of several rows of which
    none could be scored: a run on zeros only would learn nothing and look as if it trained.

    Args:
        tokenizer: decodes the responses.
        num_examine: how many responses of each data source to print per call.
        compute_score: the score function; `default_compute_score` when None.
        reward_fn_key: the column that names the data source.

    Attributes:
        metrics: of the last call: `reward/num_failures` and `reward/num_timeouts`, rows that count 0 for that reason,
            and `reward/failed_share`, the share of both in all rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
    ):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.metrics: dict[str, float] = {}

    @abstractmethod
    def _outcomes(self, calls: list[dict[str, Any]]) -> list[Outcome]:
        """Score all rows; each call holds the four keywords of a row."""

    def _adjust(self, results: list[dict[str, Any]], lengths: list[int]) -> list[float]:
        """Scores that go into the reward tensor, from results (each with a finite `score`) and response lengths;
        may add values to the results."""
        return [result["score"] for result in results]

    def _describe_timeout(self) -> str:
        return "its time was up"

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
            value for some extra info has None there; a row that could not be scored has `acc` 0 if others of its
            data source have one.

        Raises:
            ValueError: a column is missing.
            UnscorableError: no rule scores a row's data source, or the rule's package is missing.
            AllRowsFailedError: no row of several could be scored.
        """
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(dim=-1).tolist()
        calls = self._calls(data, lengths)
        outcomes = self._outcomes(calls)
        results, faults = [], {}
        for i, outcome in enumerate(outcomes):
            result, fault = self._result(outcome)
            results.append(result)
            if fault is not None:
                faults[i] = f"row {i} (data_source {calls[i]['data_source']!r}): {fault}"
        self._report(faults, outcomes)
        scores = self._adjust(results, lengths)
        self._print_examples(data, calls, scores)

        last = torch.tensor(lengths, device=responses.device).clamp(min=1).unsqueeze(-1) - 1
        values = torch.tensor(scores, dtype=torch.float32, device=responses.device).unsqueeze(-1)
        reward_tensor = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        reward_tensor.scatter_(1, last, values)
        if not return_dict:
            return reward_tensor
        names = dict.fromkeys(name for result in results for name in result)
        with_accuracy = {call["data_source"] for call, result in zip(calls, results, strict=True) if "acc" in result}
        for i in faults:  # what counts 0 as a score is no correct answer either
            if calls[i]["data_source"] in with_accuracy:
                results[i]["acc"] = 0.0
        has_extra = len(names) > 1
        extra = {name: [result.get(name) for result in results] for name in names} if has_extra else {}
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra}

    def _calls(self, data: DataProto, lengths: list[int]) -> list[dict[str, Any]]:
        """The keywords of each row's call."""
        sources = self._column(data, self.reward_fn_key)
        tokens = [row[:length].tolist() for row, length in zip(data.batch["responses"], lengths, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        truths = [reward_model["ground_truth"] for reward_model in self._column(data, "reward_model")]
        infos = data.non_tensor_batch.get("extra_info", [None] * len(data))
        eos_ids = self._eos_token_ids(data)
        return [
            {
                "data_source": source,
                "solution_str": text,
                "ground_truth": truth,
                "extra_info": {**(info or {}), "finished": bool(row) and row[-1] in eos_ids},
            }
            for source, text, truth, info, row in zip(sources, texts, truths, infos, tokens, strict=True)
        ]

    def _column(self, data: DataProto, name: str) -> Any:
        if name not in data.non_tensor_batch:
            raise ValueError(
                f"the batch has no column {name!r}, which the reward needs; it has {', '.join(data.non_tensor_batch)}"
            )
        return data.non_tensor_batch[name]

    def _eos_token_ids(self, data: DataProto) -> set[int]:
        ids = data.meta_info.get("eos_token_id", self.tokenizer.eos_token_id)
        return {ids} if ids is None or isinstance(ids, int) else set(ids)

    def _result(self, outcome: Outcome) -> tuple[dict[str, Any], str | None]:
        """Outcome of a row as a dict with a finite float under `score`, and why that is a stand-in, if it is one."""
        if isinstance(outcome.error, UnscorableError):
            raise outcome.error
        reason = self._describe_timeout() if outcome.timed_out else repr(outcome.error)
        if not outcome.timed_out and outcome.error is None:
            try:
                value = outcome.value
                result = dict(value) if isinstance(value, dict) else {"score": value}
                score = float(result["score"])
                if math.isfinite(score):
                    return result | {"score": score}, None
                reason = f"the score is {score}"
            except Exception as error:  # what the user's function returned is not a score
                reason = repr(error)
        return {"score": 0.0}, reason

    def _report(self, faults: dict[int, str], outcomes: list[Outcome]) -> None:
        """Log and count the rows that could not be scored, or stop the run if none of several could."""
        if len(faults) == len(outcomes) > 1:
            first = min(faults)
            raise AllRowsFailedError(
                f"the reward function failed on all {len(faults)} rows of a batch, first on {faults[first]}"
            ) from outcomes[first].error
        for fault in faults.values():
            logger.warning("compute_score failed, score 0: %s", fault)
        timeouts = sum(outcome.timed_out for outcome in outcomes)
        self.metrics = {
            "reward/num_failures": float(len(faults) - timeouts),
            "reward/num_timeouts": float(timeouts),
            "reward/failed_share": len(faults) / max(len(outcomes), 1),
        }

    def _print_examples(self, data: DataProto, calls: list[dict[str, Any]], scores: list[float]) -> None:
        seen: Counter[str] = Counter()
        for i, call in enumerate(calls):
            if seen[call["data_source"]] >= self.num_examine:
                continue
            seen[call["data_source"]] += 1
            width = data.batch["prompts"].shape[1]
            is_token = data.batch["attention_mask"][i, :width].bool()
            prompt = self.tokenizer.decode(data.batch["prompts"][i][is_token].tolist())
            for label, value in (
                ("prompt", prompt),
                ("response", call["solution_str"]),
                ("truth", call["ground_truth"]),
                ("score", scores[i]),
            ):
                print(f"[{label}] {value}")
