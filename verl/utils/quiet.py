# SPDX-License-Identifier: Apache-2.0
"""Keeping the chatter of libraries off the terminal, so that what a run says itself can be seen.

``VERL_LOGGING_LEVEL=INFO`` (or DEBUG) leaves everything as the libraries have it.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_imports", "quiet_libraries"]

_LOGGERS = ("megatron", "nv_one_logger", "torch.fx._symbolic_trace", "torch.utils.cpp_extension", "transformers")


def _wants_everything() -> bool:
    return os.environ.get("VERL_LOGGING_LEVEL", "WARN").upper() in ("INFO", "DEBUG")


def quiet_libraries() -> None:
    """Show only errors of Megatron, transformers and parts of torch, and no warnings that they raise."""
    if _wants_everything():
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in (*_LOGGERS, *(n for n in logging.root.manager.loggerDict if n.startswith("megatron"))):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("megatron", "transformer_engine", "torch"):
        warnings.filterwarnings("ignore", module=module)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Within it, libraries that set the levels of their own loggers may be imported; only errors are shown."""
    quiet_libraries()
    before = logging.root.manager.disable
    if not _wants_everything():
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        quiet_libraries()
