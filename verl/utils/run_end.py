# SPDX-License-Identifier: Apache-2.0
"""How a run that fails or is stopped takes its leave: the cause in one sentence, as the last line on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CTRL_C_EXIT_CODE", "cause_of", "last_words"]

CTRL_C_EXIT_CODE = 130  # what a shell reports for a program that Ctrl-C ended
_MAX_CHARS = 600


def cause_of(error: BaseException) -> str:
    """The error in one line: its ``summary`` if it has one, else its type and its text."""
    text = getattr(error, "summary", None) or f"{type(error).__name__}: {error}".removesuffix(": ")
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]}..."


@contextmanager
def last_words() -> Iterator[None]:
    """Run the body. If it raises, print the traceback and then its cause in one line, and exit with 1.

    Ctrl-C exits with 130 and says only that. The ranks of a launcher say nothing then, since it speaks for them.

    Raises:
        SystemExit: the body raised, or was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        if "RANK" not in os.environ:
            print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
        raise SystemExit(CTRL_C_EXIT_CODE) from None
    except Exception as error:
        sys.stdout.flush()
        traceback.print_exc()
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"error: {rank}{cause_of(error)}", file=sys.stderr, flush=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            _tell_launcher(error)
        raise SystemExit(1) from None


def _tell_launcher(error: Exception) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
