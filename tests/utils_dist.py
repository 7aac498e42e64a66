# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a world of gloo processes and brings the results, or the first traceback, back to the test."""

import datetime
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.02
LOG_TAIL_CHARS = 4000


class WorldError(RuntimeError):
    """A rank raised, died or ran out of time. The text holds its traceback or the end of its log."""


def run_world(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, on_accelerators: bool = False
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in `world_size` fresh processes that share a gloo process group.

    Each process has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, one torch thread, and the default
    process group initialised. The rendezvous store is opened here on a port that the system chooses and is held until
    the world ends, so no other program can take the port in between. Ranks write to log files, never to pipes that
    could fill up.

    Args:
        fn: function at the top level of a module that can be imported (processes receive its name, not its code).
        world_size: number of processes.
        args: picklable arguments, the same for every rank.
        timeout_s: limit for the whole call, start of the processes included.
        on_accelerators: give each rank one accelerator, and the group their collectives beside gloo's.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        WorldError: a rank raised an exception, died, or the time ran out. All ranks are killed first.
    """
    from torch.distributed import TCPStore

    timeout = datetime.timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="verl_world_") as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(pickle.dumps((fn, args, timeout_s, on_accelerators)))
        processes = [_start_rank(folder, rank, world_size, store.port) for rank in range(world_size)]
        try:
            _wait_for_all(processes, folder, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                _kill(process)
        return [pickle.loads((folder / f"result_{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _start_rank(folder: Path, rank: int, world_size: int, port: int) -> subprocess.Popen:
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    env.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    # With this, torch's env:// rendezvous joins the store we hold instead of letting rank 0 open another on its port.
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO_ROOT), os.environ.get("PYTHONPATH")]))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / f"log_{rank}.txt", "wb") as log:
        command = [sys.executable, "-m", "tests.utils_dist", str(folder)]
        # A session of its own, so that killing a rank also ends whatever it started.
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait_for_all(processes: list[subprocess.Popen], folder: Path, deadline: float, timeout_s: float) -> None:
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):  # neither None (running) nor 0 (done)
            raise WorldError(_describe_failure(folder, codes))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            logs = "\n".join(f"--- log of rank {rank}\n{_log_tail(folder, rank)}" for rank in late)
            raise WorldError(f"ranks {late} did not finish within {timeout_s:g} s\n{logs}")
        time.sleep(POLL_SECONDS)


def _describe_failure(folder: Path, codes: list[int | None]) -> str:
    """Text on the rank that failed first; the others often fail only because it left."""
    errors = sorted(folder.glob("error_*.txt"), key=lambda path: path.stat().st_mtime_ns)
    silent = [rank for rank, code in enumerate(codes) if code and not (folder / f"error_{rank}.txt").exists()]
    if silent:
        rank = silent[0]
        return f"rank {rank} died with exit code {codes[rank]}\n--- end of its log\n{_log_tail(folder, rank)}"
    rank = int(errors[0].stem.removeprefix("error_"))
    return f"rank {rank} raised\n{errors[0].read_text(encoding='utf-8')}"


def _log_tail(folder: Path, rank: int) -> str:
    return (folder / f"log_{rank}.txt").read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _exit_with_parent(parent: int) -> None:
    """End this rank when the test process is gone, so that a killed test run leaves nothing behind."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _take_accelerator(rank: int) -> str:
    from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device

    get_torch_device().set_device(rank)
    return f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"


def _rank_main(folder: Path) -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        fn, args, timeout_s, on_accelerators = pickle.loads((folder / "call.pkl").read_bytes())
        # Shortly before the world is killed for being late, write down where this rank stands.
        faulthandler.dump_traceback_later(0.8 * timeout_s)
        backend = _take_accelerator(rank) if on_accelerators else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        result = fn(rank, world_size, *args)
        _replace(folder / f"result_{rank}.pkl", pickle.dumps(result))
        # Leave together: a rank that is gone while another still talks to it looks like a failure of the latter.
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        _replace(folder / f"error_{rank}.txt", traceback.format_exc().encode())
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    code = _rank_main(Path(sys.argv[1]))
    sys.stdout.flush()
    # Skip the interpreter's teardown: threads of gloo and of libraries under test can hang or crash in it.
    os._exit(code)
