# SPDX-License-Identifier: Apache-2.0
"""How one call on a worker group becomes one call on each worker, and their results one result.

``@register`` marks a worker's method; the group then offers a method of the same name. The dispatch mode says how the
arguments are spread over the ranks and how the results come back; the execute mode says which ranks run.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

# verl's name for the attribute that marks a registered method; recipes look for it.
MAGIC_ATTR = "attrs_3141562937"

_PLAIN_TYPES = (type(None), bool, int, float, str)


class Execute(Enum):
    """Which ranks run a registered method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class DispatchMode:
    """One way to spread a call over the workers of a group.

    Attributes:
        name: Shown in errors.
        dispatch_fn: ``(group, *args, **kwargs) -> (args, kwargs)``; every argument becomes a list with one entry per
            rank.
        collect_fn: ``(group, results) -> result``; ``results`` are those of the ranks that `select_fn` names.
        select_fn: ``(group) -> ranks`` whose results are wanted, in the order of collection; ``None`` means all. The
            other ranks run too, but send nothing back.
        is_data: The collected result is a DataProto or TensorDict, so that a non-blocking call gives a DataProtoFuture.
    """

    name: str
    dispatch_fn: Callable[..., tuple[tuple, dict]]
    collect_fn: Callable[[Any, list], Any]
    select_fn: Callable[[Any], list[int]] | None = None
    is_data: bool = False


class Dispatch:
    """The known dispatch modes, as attributes; :func:`register_dispatch_mode` adds one.

    RANK_ZERO: same arguments for all; only rank 0 runs and its value is returned.
    ONE_TO_ALL: same arguments for all, list of results.
    ALL_TO_ALL: arguments that are all lists of one entry per rank are spread, others go to all; list of results.
    DP_COMPUTE: every argument is a list of one entry per rank; list of results.
    DP_COMPUTE_PROTO: data is cut into one piece per rank, the pieces of the result are joined.
    DP_COMPUTE_PROTO_WITH_FUNC: the first argument is a function for all ranks, the rest as in DP_COMPUTE_PROTO.
    DP_COMPUTE_METRIC: arguments as in DP_COMPUTE_PROTO, list of results.
    """

    RANK_ZERO: DispatchMode
    ONE_TO_ALL: DispatchMode
    ALL_TO_ALL: DispatchMode
    DP_COMPUTE: DispatchMode
    DP_COMPUTE_PROTO: DispatchMode
    DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode
    DP_COMPUTE_METRIC: DispatchMode


def register_dispatch_mode(name: str, dispatch_fn: Callable, collect_fn: Callable, **kwargs: Any) -> DispatchMode:
    """Add ``Dispatch.<name>``; keywords are those of :class:`DispatchMode`. ValueError if the name is taken."""
    if hasattr(Dispatch, name):
        raise ValueError(f"Dispatch.{name} exists already; use update_dispatch_mode to replace it")
    mode = DispatchMode(name, dispatch_fn, collect_fn, **kwargs)
    setattr(Dispatch, name, mode)
    return mode


def update_dispatch_mode(name: str, dispatch_fn: Callable, collect_fn: Callable, **kwargs: Any) -> DispatchMode:
    """Replace the mode ``Dispatch.<name>`` for methods registered from now on. ValueError if there is no such mode."""
    if not isinstance(getattr(Dispatch, name, None), DispatchMode):
        raise ValueError(f"Dispatch.{name} does not exist; known modes: {', '.join(known_dispatch_modes())}")
    mode = DispatchMode(name, dispatch_fn, collect_fn, **kwargs)
    setattr(Dispatch, name, mode)
    return mode


def known_dispatch_modes() -> list[str]:
    """Names of all dispatch modes, sorted."""
    return sorted(name for name, value in vars(Dispatch).items() if isinstance(value, DispatchMode))


def _map_arguments(fn: Callable[[Any], list], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tuple(fn(arg) for arg in args), {key: fn(value) for key, value in kwargs.items()}


def dispatch_one_to_all(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Give every rank the same arguments."""
    return _map_arguments(lambda x: [x] * group.world_size, args, kwargs)


def dispatch_all_to_all(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Spread the arguments if all of them are lists with one entry per rank; otherwise give every rank the same."""
    values = [*args, *kwargs.values()]
    if values and all(isinstance(x, list) and len(x) == group.world_size for x in values):
        return args, kwargs
    return dispatch_one_to_all(group, *args, **kwargs)


def dispatch_dp_compute(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Spread arguments that are lists with one entry per rank; ValueError for any other."""
    for value in (*args, *kwargs.values()):
        if not isinstance(value, list | tuple) or len(value) != group.world_size:
            got = f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__
            raise ValueError(
                f"Dispatch.DP_COMPUTE takes lists with one entry for each of the {group.world_size} workers, got {got}"
            )
    return _map_arguments(list, args, kwargs)


def split_data(x: Any, pieces: int) -> list:
    """Cut a DataProto, TensorDict or DataProtoFuture into equal pieces; None, numbers and strings go to all pieces.

    Raises:
        TypeError: ``x`` is of another type.
        ValueError: Its number of rows is not a multiple of ``pieces``.
    """
    if isinstance(x, _PLAIN_TYPES):
        return [x] * pieces
    from tensordict import TensorDict

    from verl.protocol import DataProto, chunk_data

    if pieces == 1 and isinstance(x, DataProto | TensorDict):
        return [x]  # being sent copies it
    return chunk_data(x, pieces)


def join_data(results: Sequence) -> Any:
    """Join pieces of DataProto or TensorDict along the batch; all None gives None. TypeError for anything else."""
    if all(result is None for result in results):
        return None
    from verl.protocol import concat_data

    return concat_data(list(results))


def dispatch_dp_compute_data_proto(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Cut data into one piece per rank."""
    return _map_arguments(lambda x: split_data(x, group.world_size), args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Give every rank the function that comes first, and its piece of the data that follows."""
    if not args or not callable(args[0]):
        got = type(args[0]).__name__ if args else "nothing"
        raise ValueError(f"Dispatch.DP_COMPUTE_PROTO_WITH_FUNC takes a function as first argument, got {got}")
    rest, kwargs = dispatch_dp_compute_data_proto(group, *args[1:], **kwargs)
    return ([args[0]] * group.world_size, *rest), kwargs


def collect_list(group: Any, results: list) -> list:
    """Return the results as they are, in rank order."""
    return results


def collect_rank_zero(group: Any, results: list) -> Any:
    """Return the value of rank 0."""
    return results[0]


def collect_data(group: Any, results: list) -> Any:
    """Join the pieces in the order given."""
    return join_data(results)


def _select_rank_zero(group: Any) -> list[int]:
    return [0]


def _dispatch_mesh(mesh_name: str, group: Any, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    dp_ranks = group.dispatch_info(mesh_name).dp_ranks
    dp_size = max(dp_ranks) + 1

    def spread(x: Any) -> list:
        pieces = split_data(x, dp_size)
        return [pieces[dp_rank] for dp_rank in dp_ranks]  # ranks of one model-parallel group share one object

    return _map_arguments(spread, args, kwargs)


def _select_mesh(mesh_name: str, group: Any) -> list[int]:
    ranks: list[int] = group.dispatch_info(mesh_name).collect_ranks
    return ranks


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Make the mode for a mesh of data-parallel and model-parallel ranks.

    Each worker says where it stands with ``Worker._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)``;
    the group asks for it at the first call. Every rank gets the piece of its data-parallel rank; one rank of each
    data-parallel rank sends its result back, and the pieces are joined in data-parallel order.
    """
    return DispatchMode(
        name=f"nd_compute[{mesh_name}]",
        dispatch_fn=partial(_dispatch_mesh, mesh_name),
        collect_fn=collect_data,
        select_fn=partial(_select_mesh, mesh_name),
        is_data=True,
    )


register_dispatch_mode("RANK_ZERO", dispatch_one_to_all, collect_rank_zero, select_fn=_select_rank_zero)
register_dispatch_mode("ONE_TO_ALL", dispatch_one_to_all, collect_list)
register_dispatch_mode("ALL_TO_ALL", dispatch_all_to_all, collect_list)
register_dispatch_mode("DP_COMPUTE", dispatch_dp_compute, collect_list)
register_dispatch_mode("DP_COMPUTE_PROTO", dispatch_dp_compute_data_proto, collect_data, is_data=True)
register_dispatch_mode(
    "DP_COMPUTE_PROTO_WITH_FUNC", dispatch_dp_compute_data_proto_with_func, collect_data, is_data=True
)
register_dispatch_mode("DP_COMPUTE_METRIC", dispatch_dp_compute_data_proto, collect_list)


@dataclass(frozen=True)
class Registration:
    """What ``@register`` was told about a method; see there."""

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool


def _as_dispatch_mode(mode: Any) -> DispatchMode:
    if isinstance(mode, DispatchMode):
        return mode
    if isinstance(mode, dict) and {"dispatch_fn", "collect_fn"} <= mode.keys():
        return DispatchMode(**{"name": "custom", **mode})
    raise ValueError(
        f"dispatch_mode={mode!r} is not a mode: use Dispatch.{{{','.join(known_dispatch_modes())}}}, "
        "make_nd_compute_dataproto_dispatch_fn(mesh_name) or a dict with dispatch_fn and collect_fn"
    )


def register(
    dispatch_mode: DispatchMode | dict | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable], Callable]:
    """Mark a worker's method as callable on its whole group.

    Args:
        dispatch_mode: How arguments and results travel, ``Dispatch.ALL_TO_ALL`` if not given; a dict holds the fields
            of :class:`DispatchMode`.
        execute_mode: Which ranks run. With ``Execute.RANK_ZERO`` the call returns rank 0's value.
        blocking: Wait for the result. If not, the call returns at once: a DataProtoFuture where data is collected,
            else Ray object references in the shape of the result.
        materialize_futures: Replace a DataProtoFuture argument by its data before the method runs.

    Raises:
        ValueError: The mode is unknown, or the method is a coroutine.
    """
    mode = _as_dispatch_mode(Dispatch.ALL_TO_ALL if dispatch_mode is None else dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"execute_mode={execute_mode!r} is not one of {', '.join(str(e) for e in Execute)}")
    if mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO

    def mark(func: Callable) -> Callable:
        if inspect.iscoroutinefunction(func):
            raise ValueError(f"@register: {func.__qualname__} is a coroutine; a worker's methods run one at a time")
        setattr(func, MAGIC_ATTR, Registration(mode, execute_mode, blocking, materialize_futures))
        return func

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """All methods of a class, inherited ones included, that ``@register`` marked."""
    found = {}
    for name in dir(cls):
        registration = getattr(getattr(cls, name, None), MAGIC_ATTR, None)
        if isinstance(registration, Registration):
            found[name] = registration
    return found
