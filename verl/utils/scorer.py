# SPDX-License-Identifier: Apache-2.0
"""Many calls of a score function, each within a time limit, in threads or in processes. Needs no torch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from verl.utils.timed_process import Outcome, TimedProcess, call_guarded

__all__ = ["Scorer"]


class Scorer:
    """Calls a function once for each set of arguments and keeps the order.

    Args:
        function: called with keywords.
        timeout: seconds for one call; None for no limit.
        num_workers: calls at a time.
        executor: "thread": calls that wait (for a sandbox, a server) run side by side. A late thread is left behind: it
            goes on in the background, as threads cannot be stopped. "process": for calls that compute; a late process
            is killed. The processes are started at the first use and kept.

    Raises:
        ValueError: a function for processes does not pickle.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout: float | None = None,
        num_workers: int = 1,
        executor: str = "thread",
    ):
        assert executor in ("thread", "process") and num_workers > 0, (executor, num_workers)
        self.function = function
        self.timeout = timeout
        self.num_workers = num_workers
        self.processes = [TimedProcess(function) for _ in range(num_workers)] if executor == "process" else []

    def __call__(self, calls: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcome of each call, in the order of ``calls``."""
        if self.processes:
            return self._in_processes(calls)
        if self.timeout is None and self.num_workers == 1:
            return [call_guarded(self.function, kwargs) for kwargs in calls]
        return _in_threads(self.function, calls, self.timeout, self.num_workers)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.close()

    def _in_processes(self, calls: Sequence[dict[str, Any]]) -> list[Outcome]:
        pending, outcomes = deque(enumerate(calls)), {}

        def drive(process: TimedProcess) -> None:
            while True:
                try:
                    i, kwargs = pending.popleft()
                except IndexError:
                    return
                outcomes[i] = process.call(kwargs, self.timeout)

        threads = [threading.Thread(target=drive, args=(p,)) for p in self.processes[: len(calls)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outcomes[i] for i in range(len(calls))]


def _in_threads(
    function: Callable[..., Any], calls: Sequence[dict[str, Any]], timeout: float | None, num_workers: int
) -> list[Outcome]:
    pending, lock = deque(enumerate(calls)), threading.Lock()
    done: SimpleQueue = SimpleQueue()
    deadlines: dict[int, float] = {}
    outcomes: dict[int, Outcome] = {}

    def work() -> None:
        i = None
        while True:
            with lock:
                # A call that was given up on has had its thread replaced.
                if not pending or (i is not None and i in outcomes and outcomes[i].timed_out):
                    return
                i, kwargs = pending.popleft()
                deadlines[i] = time.monotonic() + (float("inf") if timeout is None else timeout)
            done.put((i, call_guarded(function, kwargs)))

    def start() -> None:
        # Daemons, so that one that never returns does not keep the program from ending.
        threading.Thread(target=work, daemon=True).start()

    for _ in range(min(num_workers, len(calls))):
        start()
    while len(outcomes) < len(calls):
        with lock:
            running = [deadline for i, deadline in deadlines.items() if i not in outcomes]
        wait = min(running, default=time.monotonic() + 0.1) - time.monotonic()
        try:
            i, outcome = done.get(timeout=None if wait == float("inf") else max(0.0, wait))
            with lock:
                outcomes.setdefault(i, outcome)
        except Empty:
            with lock:
                now = time.monotonic()
                late = [i for i, deadline in deadlines.items() if i not in outcomes and deadline <= now]
                outcomes |= dict.fromkeys(late, Outcome(timed_out=True))
            for _ in late:
                start()
    return [outcomes[i] for i in range(len(calls))]
