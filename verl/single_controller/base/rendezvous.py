# SPDX-License-Identifier: Apache-2.0
"""How the workers of a group find each other, and how the driver learns how far they have come.

Rank 0 opens a TCPStore on port 0, so the system picks a free port at the moment of binding and nobody can take it in
between; it keeps the store for its lifetime. The address travels through Ray's key-value store under the id of the
group, so groups cannot meet each other's stores. The same place holds the stage of each rank during the start.
"""

import os
import time
from datetime import timedelta
from typing import Any

GROUP_ENV = "VERL_WORKER_GROUP_ID"

_NAMESPACE = b"verl_single_controller"
_POLL_S = 0.02

# A store lives as long as its process: peers of rank 0 may connect at any later time.
_open_stores: dict[str, Any] = {}
_last_stage: str | None = None


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def _put(group_id: str, key: str, value: str) -> None:
    _kv()._internal_kv_put(f"{group_id}/{key}".encode(), value.encode(), overwrite=True, namespace=_NAMESPACE)


def _get(group_id: str, key: str) -> str | None:
    value = _kv()._internal_kv_get(f"{group_id}/{key}".encode(), namespace=_NAMESPACE)
    return None if value is None else value.decode()


def forget_group(group_id: str) -> None:
    """Remove everything that a group wrote."""
    _kv()._internal_kv_del(f"{group_id}/".encode(), del_by_prefix=True, namespace=_NAMESPACE)


def report_stage(stage: str) -> None:
    """Tell the driver what this worker is doing; outside a Ray worker group it does nothing."""
    global _last_stage
    group_id = os.environ.get(GROUP_ENV)
    if group_id is None or stage == _last_stage:
        return
    _put(group_id, f"stage/{os.environ['RANK']}", stage)
    _last_stage = stage


def read_stage(group_id: str, rank: int) -> str:
    """What a rank last reported, in words."""
    return _get(group_id, f"stage/{rank}") or "process not started"


def open_store(group_id: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """Connect this rank to the store of its group and wait until all ranks are there.

    Args:
        group_id: Id shared by all ranks of the group and by no other group.
        rank: This rank; rank 0 opens the store.
        world_size: Number of ranks.
        timeout_s: Seconds after which to give up, for each of the two waits.

    Returns:
        A ``torch.distributed.TCPStore``, the same one when called again.

    Raises:
        TimeoutError: Rank 0 did not open the store, or some ranks did not come; the message names them.
    """
    if group_id not in _open_stores:
        _open_stores[group_id] = _connect(group_id, rank, world_size, timeout_s)
        report_stage("past the rendezvous, in __init__")
    return _open_stores[group_id]


def _connect(group_id: str, rank: int, world_size: int, timeout_s: float) -> Any:
    import ray
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout_s)
    if rank == 0:
        host = ray.util.get_node_ip_address()
        store = TCPStore(host, 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)
        _put(group_id, "store", f"{host}|{store.port}")
    else:
        host, port = _wait_for_address(group_id, rank, timeout_s).split("|")
        store = TCPStore(host, int(port), world_size, is_master=False, timeout=limit, wait_for_workers=False)
    store.set(f"joined/{rank}", "1")
    _wait_for_peers(store, rank, world_size, timeout_s)
    return store


def _wait_for_address(group_id: str, rank: int, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        address = _get(group_id, "store")
        if address is not None:
            return address
        time.sleep(_POLL_S)
    raise TimeoutError(
        f"rank {rank} waited {timeout_s:g} s for rank 0 to open the rendezvous store; rank 0: {read_stage(group_id, 0)}"
    )


def _wait_for_peers(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    keys = [f"joined/{peer}" for peer in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch raises its DistStoreError, a RuntimeError
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"rank {rank} waited {timeout_s:g} s in the rendezvous for ranks {missing} of {world_size}"
        ) from error
