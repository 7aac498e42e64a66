# SPDX-License-Identifier: Apache-2.0
"""Keeping the chatter of libraries off the terminal, so that what a run says itself can be seen.

``VERL_LOGGING_LEVEL=INFO`` (or DEBUG) leaves everything as the libraries have it.
"""

import logging
import os
import warnings

__all__ = ["quiet_libraries"]

_LOGGERS = ("megatron", "megatron.bridge", "megatron.core", "nv_one_logger", "torch.fx._symbolic_trace", "transformers")


def quiet_libraries() -> None:
    """Show only errors of Megatron, transformers and torch's tracer, and no warnings that they raise on import.

    Call it before the libraries are used, and again after megatron-bridge is imported, which sets levels of its own.
    """
    if os.environ.get("VERL_LOGGING_LEVEL", "WARN").upper() in ("INFO", "DEBUG"):
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("megatron", "transformer_engine", "torch"):
        warnings.filterwarnings("ignore", module=module)
