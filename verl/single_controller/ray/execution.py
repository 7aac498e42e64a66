# SPDX-License-Identifier: Apache-2.0
"""Calls on a set of Ray actors that stand or fall together.

A rank that fails while its peers wait for it in a collective must not leave the driver waiting: every call watches all
ranks, ends at the first failure, and stops the workers if one of them is dead or stuck.
"""

import logging
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import join_data
from verl.single_controller.base.worker import for_sending

logger = logging.getLogger(__name__)

# After a first failure the others get this long to fail as well (a peer's broken connection is seen before Ray
# notices the dead process behind it) or to finish; who has not is stuck.
GRACE_S = 5.0

# Arguments and results up to this size travel in Ray's messages instead of through its object store: for two workers
# and a quarter of a megabyte 2 ms instead of 8 ms. Ray reads the variable when it starts, its workers inherit it.
_INLINE_ENV = "RAY_max_direct_call_object_size"
if not ray.is_initialized():
    os.environ.setdefault(_INLINE_ENV, "4000000")
_INLINE_BYTES = int(os.environ.get(_INLINE_ENV, 100_000))

_SMALL_TYPES = (type(None), bool, int, float, str, ray.ObjectRef)


class WorkerGroupError(RuntimeError):
    """A call on a worker group failed; the text holds the workers' tracebacks.

    Attributes:
        failures: Exception by rank, as Ray raised it; the first one is also the ``__cause__``.
        summary: The first one in one line: method, rank, and what was raised or that the process died.
    """

    def __init__(self, message: str, failures: dict[int, BaseException] | None = None, summary: str | None = None):
        super().__init__(message)
        self.failures = failures or {}
        self.summary = summary or message.splitlines()[0]


@dataclass(frozen=True)
class RunningCall:
    """A method that runs on some workers: references to its results, by rank, and the ranks whose results are wanted.

    ``done`` holds references that end together with the results but carry no data.
    """

    method: str
    results: dict[int, ray.ObjectRef]
    done: dict[int, ray.ObjectRef]
    wanted: list[int]


class WorkerSet:
    """The actors of a worker group, shared by the groups that are spawned from it.

    Args:
        name: Shown in errors.
        handles: One actor per rank.
    """

    def __init__(self, name: str, handles: list):
        self.name = name
        self.handles = handles
        self.failure: str | None = None
        self._lock = threading.Lock()

    def submit(
        self, member: str | None, method: str, args: tuple, kwargs: dict, ranks: list[int], wanted: list[int]
    ) -> RunningCall:
        """Start a method on ``ranks``; every argument is a list of one entry per rank."""
        self._check_alive()
        args, kwargs = tuple(_share(arg) for arg in args), {key: _share(value) for key, value in kwargs.items()}
        results, done = {}, {}
        for rank in ranks:
            own_args = [arg[rank] for arg in args]
            own_kwargs = {key: value[rank] for key, value in kwargs.items()}
            results[rank], done[rank] = (
                self.handles[rank]
                ._call.options(num_returns=2)
                .remote(member, method, rank in wanted, *own_args, **own_kwargs)
            )
        return RunningCall(method, results, done, wanted)

    def gather(self, call: RunningCall) -> list:
        """Wait for a call and return the results of its wanted ranks.

        Raises:
            WorkerGroupError: A rank raised an exception or died. Ranks that then neither finish nor fail within
                `GRACE_S` seconds are stopped, and with a dead or stopped rank the whole set is.
        """
        self._wait(call)
        return ray.get([call.results[rank] for rank in call.wanted])

    def watch(self, call: RunningCall) -> list[ray.ObjectRef]:
        """Watch a call in the background, so that a failure ends all of it, and return the wanted references."""

        def run() -> None:
            try:
                self._wait(call)
            except WorkerGroupError as error:
                logger.error("%s", error)

        threading.Thread(target=run, name=f"watch-{call.method}", daemon=True).start()
        return [call.results[rank] for rank in call.wanted]

    def wait_until(self, refs: dict[int, ray.ObjectRef], deadline: float | None, method: str) -> list[int]:
        """Wait for references by rank, at most until ``time.monotonic()`` says ``deadline``.

        Returns the ranks that did not answer.
        """
        pending = {ref: rank for rank, ref in refs.items()}
        while pending:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=left)
            if not ready:
                return sorted(pending.values())
            rank = pending.pop(ready[0])
            failure = _failure_of(ready[0])
            if failure is not None:
                self._fail(method, {rank: failure}, pending)
        return []

    def kill(self, reason: str) -> None:
        """End all workers; later calls fail and give the reason."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        for handle in self.handles:
            ray.kill(handle, no_restart=True)

    def _wait(self, call: RunningCall) -> None:
        self.wait_until(call.done, None, call.method)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise WorkerGroupError(f"the workers of {self.name} were stopped earlier: {self.failure}")

    def _fail(self, method: str, failures: dict[int, BaseException], pending: dict[ray.ObjectRef, int]) -> None:
        deadline = time.monotonic() + GRACE_S
        pending = dict(pending)
        while pending and (left := deadline - time.monotonic()) > 0:
            for ref in ray.wait(list(pending), num_returns=1, timeout=left)[0]:
                rank = pending.pop(ref)
                failure = _failure_of(ref)
                if failure is not None:
                    failures[rank] = failure
        # A dead process explains its peers' broken connections, so it comes first.
        failures = dict(sorted(failures.items(), key=lambda item: (not isinstance(item[1], RayActorError), item[0])))
        stuck = sorted(pending.values())
        message = _describe(self.name, len(self.handles), method, failures, stuck)
        if stuck or any(isinstance(failure, RayActorError) for failure in failures.values()):
            self.kill(message)
        rank, first = next(iter(failures.items()))
        raise WorkerGroupError(message, failures, f"{method} failed: {_in_one_line(rank, first)}") from first


class RunningData(DataProtoFuture):
    """The DataProtoFuture of a call on a worker set; on the driver, a failure shows all of the set's tracebacks."""

    def __init__(self, workers: WorkerSet, call: RunningCall):
        super().__init__(collect_fn=join_data, futures=workers.watch(call))
        self._workers = workers
        self._call = call

    def __reduce__(self) -> tuple:
        return DataProtoFuture, (self.collect_fn, self.futures, self.dispatch_fn)

    def get(self) -> Any:
        """Wait for the results and return them joined; WorkerGroupError as for a blocking call."""
        return self.collect_fn(self._workers.gather(self._call))


class _Pickled:
    """Data that is pickled once and sent to several workers, which receive the data itself."""

    def __init__(self, payload: bytes):
        self.payload = payload

    def __reduce__(self) -> tuple:
        return ray.cloudpickle.loads, (self.payload,)


def _share(values: list) -> list:
    """Prepare one argument, given by rank, for sending: what several ranks get is serialized only once."""
    count = Counter(id(value) for value in values)
    prepared: dict[int, Any] = {}
    for value in values:
        if id(value) not in prepared:
            prepared[id(value)] = _for_many(value) if count[id(value)] > 1 else for_sending(value)
    return [prepared[id(value)] for value in values]


def _for_many(value: Any) -> Any:
    if isinstance(value, _SMALL_TYPES):
        return value
    if isinstance(value, DataProtoFuture) or not _is_data(value):
        return ray.put(value)  # may hold references to objects and actors, which only Ray can pickle
    pickled = _Pickled(ray.cloudpickle.dumps(for_sending(value), protocol=5))
    # Beyond Ray's limit each call would store its own copy.
    return pickled if len(pickled.payload) < _INLINE_BYTES else ray.put(pickled)


def _is_data(value: Any) -> bool:
    from tensordict import TensorDictBase

    from verl.protocol import DataProto

    return isinstance(value, DataProto | TensorDictBase)


def _failure_of(ref: ray.ObjectRef) -> BaseException | None:
    try:
        ray.get(ref)
    except Exception as error:  # whatever a worker may raise
        return error
    return None


def _is_dead(failure: BaseException) -> bool:
    return isinstance(failure, RayActorError) and not failure.actor_init_failed


def _in_one_line(rank: int, failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    if _is_dead(failure):
        # Ray's text goes on with everything that can kill a process.
        found = re.search(r"Worker exit detail: (.*?)( Some common causes|$)", " ".join(lines))
        how = found[1] if found else lines[-1] if lines else "its process ended"
        return f"rank {rank} died: {how} (a process that is killed was most often out of memory)"
    cause = getattr(failure, "cause", None)  # what the worker raised, behind Ray's wrapping
    if isinstance(cause, BaseException):
        return f"rank {rank} raised {type(cause).__name__}: {cause}"
    return f"rank {rank}: {lines[-1] if lines else type(failure).__name__}"


def _describe(name: str, world_size: int, method: str, failures: dict[int, BaseException], stuck: list[int]) -> str:
    lines = [f"{name} ({world_size} workers): {method} failed on rank {', '.join(str(rank) for rank in failures)}"]
    seen: set[tuple[type, str]] = set()
    for rank, failure in failures.items():
        text = str(failure).rstrip()
        kind = (type(failure), text.splitlines()[-1] if text else "")
        if kind in seen:
            lines.append(f"--- rank {rank}: as above: {kind[1]}")
            continue
        seen.add(kind)
        lines.append(f"--- rank {rank}{' died' if _is_dead(failure) else ''}:\n{text}")
    if stuck:
        lines.append(f"--- ranks {stuck} neither finished nor failed within {GRACE_S:g} s after that and were stopped")
    return "\n".join(lines)
