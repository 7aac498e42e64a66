# SPDX-License-Identifier: Apache-2.0
"""How the next token is drawn: the request's settings, the cuts of top-k and top-p, and the draw itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one `generate_sequences` call.

    Args:
        temperature: logits are divided by it; 0 means greedy.
        top_k: only the k most likely tokens may be drawn; -1 or 0 is off.
        top_p: only the smallest set of most likely tokens whose mass reaches it may be drawn; 1 is off.
        do_sample: False means greedy.

    Raises:
        ValueError: a value out of its range, by name.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    do_sample: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < -1 or self.top_k != int(self.top_k):
            raise ValueError(f"top_k={self.top_k}: must be -1 or 0 (off) or a whole number of tokens from 1 up")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1 (off)")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0

    @property
    def log_prob_temperature(self) -> float:
        """The temperature that log-probs are reported at: that of sampling, 1 where it is 0."""
        return self.temperature or 1.0

    @classmethod
    def from_request(cls, config: Any, meta_info: Mapping[str, Any]) -> "SamplingParams":
        """Take each setting from `meta_info`, else from `config` (`config.val_kwargs` if `meta_info["validate"]`)."""
        defaults = config.val_kwargs if meta_info.get("validate", False) else config
        names = ("temperature", "top_k", "top_p", "do_sample")
        given = {name: meta_info.get(name) for name in names}
        return cls(**{name: getattr(defaults, name) if value is None else value for name, value in given.items()})


def cut_logits(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set the logits that top-k, then top-p on what is left, rule out to -inf.

    Args:
        logits: [B, V], already divided by the temperature.
        top_k: -1 or 0 is off. Ties with the k-th logit stay in.
        top_p: 1 is off. The most likely token always stays in. (Holtzman et al. 2019, arXiv:1904.09751)

    Returns:
        [B, V]; the input itself when both are off.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        # Compared to the sum with the token left out, so that the token that crosses the bound is kept.
        out = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        logits = logits.masked_fill(out, float("-inf"))
    return logits


def draw_tokens(
    logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None, with_log_probs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw one token per row.

    Args:
        logits: [B, V] as the model gives them, any float dtype; computed in float32.
        generator: source of randomness on the logits' device; unused when greedy.
        with_log_probs: whether log-probs are wanted.

    Returns:
        tokens [B] int64, and their log-probs [B] float32 or None. A log-prob is that of the model's whole
        distribution at the sampling temperature (1 when that is 0), NOT renormalised over the tokens that top-k and
        top-p let through: this is what the trainer's forward pass computes, so the two can be compared token by
        token.
    """
    logits = logits.float()
    if params.log_prob_temperature != 1:
        logits = logits / params.log_prob_temperature
    if params.greedy:
        tokens = logits.argmax(dim=-1)
    else:
        probs = cut_logits(logits, params.top_k, params.top_p).softmax(dim=-1)
        tokens = torch.multinomial(probs, num_samples=1, generator=generator).squeeze(-1)
    if not with_log_probs:
        return tokens, None
    return tokens, logits.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
