# SPDX-License-Identifier: Apache-2.0
"""What every worker group has, whatever runs the workers: a world size and the methods of its workers' class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.single_controller.base.decorator import Execute, Registration, dispatch_all_to_all, registered_methods


class ClassWithInitArgs:
    """A class and the arguments to construct it with, later and elsewhere."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any):
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Construct it here."""
        return self.cls(*self.args, **self.kwargs)


class ResourcePool:
    """How many worker processes run on each node.

    Args:
        process_on_nodes: Processes per node, one entry per node.
        max_colocate_count: How many worker groups may share one pool.

    Raises:
        ValueError: There is no process, or a count is not positive.
    """

    def __init__(self, process_on_nodes: list[int], max_colocate_count: int = 10):
        process_on_nodes = list(process_on_nodes)
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(f"process_on_nodes={process_on_nodes} must hold one positive number for each node")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count={max_colocate_count} must be at least 1")
        self.store = process_on_nodes
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return sum(self.store)

    def local_ranks(self) -> list[tuple[int, int]]:
        """``(LOCAL_RANK, LOCAL_WORLD_SIZE)`` of every rank."""
        return [(local_rank, count) for count in self.store for local_rank in range(count)]


@dataclass(frozen=True)
class DispatchInfo:
    """Where the ranks of a group stand in a mesh.

    Attributes:
        dp_ranks: Data-parallel rank of every rank.
        collect_ranks: The ranks that return results, one per data-parallel rank, in data-parallel order.
    """

    dp_ranks: list[int]
    collect_ranks: list[int]

    @classmethod
    def from_answers(cls, mesh_name: str, answers: list[tuple[int, bool]]) -> "DispatchInfo":
        """Build it from every rank's ``(dp_rank, is_collect)``; ValueError where they do not fit together."""
        dp_ranks = [dp_rank for dp_rank, _ in answers]
        collecting = sorted((dp_rank, rank) for rank, (dp_rank, is_collect) in enumerate(answers) if is_collect)
        if [dp_rank for dp_rank, _ in collecting] != list(range(max(dp_ranks) + 1)):
            raise ValueError(
                f"mesh {mesh_name!r}: exactly one rank of every data-parallel rank must collect; "
                f"(dp_rank, is_collect) by rank: {answers}"
            )
        return cls(dp_ranks, [rank for _, rank in collecting])


class WorkerGroup:
    """Base of worker groups. A subclass runs calls with :meth:`_submit` and waits for them with :meth:`_gather`."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._dispatch_infos: dict[str, DispatchInfo] = {}

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._world_size

    def _submit(self, method: str, args: tuple, kwargs: dict, ranks: list[int], wanted: list[int]) -> Any:
        """Start a method on ``ranks`` and return the running call.

        Every argument is a list of one entry per rank; only the ranks in ``wanted`` send their result back.
        """
        raise NotImplementedError

    def _gather(self, call: Any) -> list:
        """Wait for a running call and return the results of the wanted ranks, in the order of ``wanted``."""
        raise NotImplementedError

    def _defer(self, call: Any) -> list:
        """Return one handle per wanted rank of a running call, for a user who waits later."""
        raise NotImplementedError

    def _defer_data(self, call: Any) -> Any:
        """Return the DataProtoFuture of a running call."""
        raise NotImplementedError

    def dispatch_info(self, mesh_name: str) -> DispatchInfo:
        """Where the ranks stand in a mesh; asked of the workers at the first use."""
        if mesh_name not in self._dispatch_infos:
            answers = self.execute_all_sync("_query_dispatch_info", mesh_name)
            self._dispatch_infos[mesh_name] = DispatchInfo.from_answers(mesh_name, answers)
        return self._dispatch_infos[mesh_name]

    def _bind_worker_methods(self, cls: type) -> None:
        """Give this group a method for every registered method of the workers' class.

        ``group.method(...)`` waits for the result. ``group.method.start(...)`` returns at once; calling what it returns
        waits. The workers run what was started in the order in which it was started.
        """
        for name, registration in registered_methods(cls).items():
            if hasattr(type(self), name):
                raise ValueError(
                    f"{cls.__name__}.{name} cannot be registered: {type(self).__name__} has a method {name}"
                )
            setattr(self, name, self._make_method(name, registration))

    def _make_method(self, name: str, registration: Registration) -> Callable:
        mode = registration.dispatch_mode
        only_zero = registration.execute_mode is Execute.RANK_ZERO

        def start(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            args, kwargs = mode.dispatch_fn(self, *args, **kwargs)
            ranks = [0] if only_zero else list(range(self.world_size))
            wanted = ranks if only_zero or mode.select_fn is None else mode.select_fn(self)
            running = self._submit(name, args, kwargs, ranks, wanted)

            def finish() -> Any:
                if not registration.blocking and mode.is_data and not only_zero:
                    return self._defer_data(running)
                results = self._gather(running) if registration.blocking else self._defer(running)
                return results[0] if only_zero else mode.collect_fn(self, results)

            return finish

        def call(*args: Any, **kwargs: Any) -> Any:
            return start(*args, **kwargs)()

        method: Any = call  # a function that carries what others look for
        method.__name__ = name
        method.start = start
        method.is_worker_method = True
        return call

    def _submit_by_name(self, method_name: str, args: tuple, kwargs: dict) -> Any:
        args, kwargs = dispatch_all_to_all(self, *args, **kwargs)
        ranks = list(range(self.world_size))
        return self._submit(method_name, args, kwargs, ranks, ranks)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list:
        """Start a method on every worker by name (arguments as in Dispatch.ALL_TO_ALL); returns one handle per rank."""
        return self._defer(self._submit_by_name(method_name, args, kwargs))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list:
        """Run a method on every worker by name; returns the results in rank order."""
        return self._gather(self._submit_by_name(method_name, args, kwargs))

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on rank 0 by name; returns its value."""
        spread = tuple([arg] for arg in args), {key: [value] for key, value in kwargs.items()}
        return self._gather(self._submit(method_name, *spread, [0], [0]))[0]
