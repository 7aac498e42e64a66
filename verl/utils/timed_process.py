# SPDX-License-Identifier: Apache-2.0
"""A function in a process of its own, so that a call that takes too long can be ended. Needs no torch.

A thread that computes cannot be stopped, and one that sits in a long C call (a power of huge integers, say) does not
even let other threads look at the clock. A process can be killed at any time.
"""

import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Outcome", "TimedProcess", "call_guarded"]

# Starting an interpreter and importing what the function needs, on a busy machine.
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What one call came to: a value, an exception, or neither because its time was up."""

    value: Any = None
    error: Exception | None = None
    timed_out: bool = False


def call_guarded(function: Callable[..., Any], kwargs: dict[str, Any]) -> Outcome:
    """Call ``function(**kwargs)`` in this thread and catch what it raises."""
    try:
        return Outcome(value=function(**kwargs))
    except SystemExit as error:  # a score function that ends the program costs its row, not the run
        return Outcome(error=RuntimeError(f"the function called sys.exit({error.code!r})"))
    except Exception as error:
        return Outcome(error=error)


class TimedProcess:
    """Calls one function in a child process, one call at a time; a late child is killed and replaced.

    The child is started by the first call. It starts from a fresh interpreter: forking this process, which may hold
    Ray's threads, can deadlock.

    Args:
        function: must pickle: a function at the top level of a module, or an object of an importable class.

    Raises:
        ValueError: the function does not pickle.
    """

    def __init__(self, function: Callable[..., Any]):
        try:
            self._pickled = pickle.dumps(function)
        except Exception as error:  # pickle raises what it likes: PicklingError, AttributeError, TypeError
            raise ValueError(
                f"{function!r} cannot be sent to another process ({error}); define it at the top level of a file"
            ) from error
        self._process: Any = None
        self._pipe: Connection | None = None

    def call(self, kwargs: dict[str, Any], timeout: float | None) -> Outcome:
        """Call the function with ``kwargs``; after ``timeout`` seconds (None: no limit) the child is killed.

        A child that cannot be started, or that dies in the call, gives an outcome with a RuntimeError.
        """
        try:
            pipe = self._start()
            pipe.send(kwargs)
            if not pipe.poll(timeout):
                self.close()
                return Outcome(timed_out=True)
            outcome: Outcome = pipe.recv()
            return outcome
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            code = self._process.exitcode
            self.close()
            return Outcome(error=RuntimeError(f"the process of the call ended with exit code {code} ({error!r})"))
        except Exception as error:  # the arguments do not pickle, or the child did not start
            self.close()
            return Outcome(error=RuntimeError(f"the call could not be made: {error!r}"))

    def close(self) -> None:
        """End the child, if there is one; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> Connection:
        """The pipe to the child, which is started if there is none."""
        if self._pipe is not None:
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, self._pickled), daemon=True)
        self._process.start()
        child.close()
        if not self._pipe.poll(START_TIMEOUT_S):
            raise TimeoutError(f"no sign of the process within {START_TIMEOUT_S:g} s")
        ready = self._pipe.recv()
        if ready.error is not None:
            raise ready.error
        return self._pipe


def _serve(pipe: Connection, pickled: bytes) -> None:
    """Life of the child: load the function, say so, then answer calls until the parent hangs up."""
    try:
        function = pickle.loads(pickled)
    except Exception as error:
        pipe.send(Outcome(error=RuntimeError(f"loading the function failed: {error!r}")))
        return
    pipe.send(Outcome())
    while True:
        try:
            kwargs = pipe.recv()
        except EOFError:
            return
        pipe.send(_portable(call_guarded(function, kwargs)))


def _portable(outcome: Outcome) -> Outcome:
    """The outcome itself if it survives a pipe, otherwise one that describes it."""
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception:
        if outcome.error is not None:
            return Outcome(error=RuntimeError(repr(outcome.error)))
        return Outcome(error=TypeError(f"a {type(outcome.value).__name__} cannot be sent back from another process"))
    return outcome
