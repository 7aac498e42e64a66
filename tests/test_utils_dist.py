# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.utils_dist import WorldError, run_world

pytestmark = pytest.mark.gloo


def summed_ranks(rank, world_size, weight):
    total = torch.tensor([float(rank + 1)]) * weight
    dist.all_reduce(total)
    sizes = (world_size, dist.get_world_size(), int(os.environ["WORLD_SIZE"]))
    return rank, dist.get_rank(), sizes, total, torch.get_num_threads(), dist.get_backend()


def reinitialised(rank, world_size, meeting_point):
    dist.destroy_process_group()
    # A place of its own: at the old one a fast rank could still meet the store that a slow rank is about to leave.
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def raising_on_rank_1(rank, world_size, started_file):
    if rank == 1:
        raise ValueError("planted on rank 1")
    dist.barrier()  # rank 0 would wait for the whole time limit


def dying_on_rank_0(rank, world_size):
    print("last words", flush=True)
    if rank == 0:
        os._exit(17)
    dist.barrier()


def sleeping(rank, world_size, pid_folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (pid_folder / str(rank)).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_back_by_rank():
    results = run_world(summed_ranks, 2, 10)
    for rank, result in enumerate(results):
        assert result == (rank, rank, (2, 2, 2), torch.tensor([30.0]), 1, "gloo")


def test_the_function_may_make_its_own_process_group(tmp_path):
    assert run_world(reinitialised, 2, tmp_path / "store") == [2.0, 2.0]


def test_an_exception_ends_the_world_with_its_traceback(tmp_path):
    start = time.monotonic()
    with pytest.raises(WorldError, match="(?s)rank 1 raised.*raising_on_rank_1.*planted on rank 1"):
        run_world(raising_on_rank_1, 2, tmp_path, timeout_s=60)
    assert time.monotonic() - start < 30


def test_a_dead_rank_is_named_with_the_end_of_its_log():
    with pytest.raises(WorldError, match="(?s)rank 0 died with exit code 17.*last words"):
        run_world(dying_on_rank_0, 2, timeout_s=60)


def test_a_late_world_is_killed_with_all_it_started(tmp_path):
    with pytest.raises(WorldError, match=r"(?s)ranks \[0\] did not finish within 20 s.*in sleeping"):
        run_world(sleeping, 1, tmp_path, timeout_s=20)
    pids = [int(pid) for pid in (tmp_path / "0").read_text().split()]
    assert not any(is_running(pid) for pid in pids)
