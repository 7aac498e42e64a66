# SPDX-License-Identifier: Apache-2.0
"""Helpers. ``hf_tokenizer`` and ``hf_processor`` can be imported from here; this alone loads nothing heavy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.utils import tokenizer

    return getattr(tokenizer, name)
