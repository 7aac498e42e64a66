# SPDX-License-Identifier: Apache-2.0
"""Training engines. ``BaseEngine`` and ``EngineRegistry`` can be imported from here; this alone loads nothing heavy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine, EngineRegistry

__all__ = ["BaseEngine", "EngineRegistry"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.engine import base

    return getattr(base, name)
