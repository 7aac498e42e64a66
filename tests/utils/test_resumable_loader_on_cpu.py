# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.utils.resumable_loader import ResumableLoader, check_warmup, resolve_total_steps


def _loader(rows=10, batch_size=4, **kwargs):
    return ResumableLoader(list(range(rows)), batch_size, collate_fn=list, **kwargs)


def test_epochs_differ_and_each_row_comes_at_most_once_per_epoch():
    loader = _loader(rows=8)
    batches = list(itertools.islice(iter(loader), 4))
    first, second = batches[0] + batches[1], batches[2] + batches[3]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert list(itertools.islice(iter(_loader(rows=8)), 4)) == batches
    assert list(itertools.islice(iter(_loader(rows=8, seed=2)), 4)) != batches


@pytest.mark.parametrize("consumed", [1, 2, 3, 5])
def test_resumed_loader_continues_where_the_first_stopped(consumed):
    whole = list(itertools.islice(iter(_loader()), 9))
    first = _loader()
    for _ in zip(range(consumed), first, strict=False):
        pass
    resumed = _loader()
    resumed.load_state_dict(first.state_dict())
    assert list(itertools.islice(iter(resumed), 3)) == whole[consumed : consumed + 3]


def test_read_ahead_does_not_move_the_position():
    loader = _loader(rows=12, num_workers=1)
    batch = next(iter(loader))
    assert loader.state_dict()["position"] == 1
    assert batch == next(iter(_loader(rows=12)))


def test_shards_are_the_parts_of_the_same_global_batch():
    whole = list(itertools.islice(iter(_loader()), 3))
    parts = [list(itertools.islice(iter(_loader(shard=(rank, 2))), 3)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_wrong_sizes_and_changed_data_are_named():
    with pytest.raises(ValueError, match="data.train_batch_size=11.*largest possible value is 10"):
        _loader(batch_size=11)
    with pytest.raises(ValueError, match="nearest right value is 6"):
        _loader(batch_size=5, shard=(0, 3))
    with pytest.raises(ValueError, match="num_rows was 10 and is 12"):
        _loader(rows=12).load_state_dict(_loader().state_dict())


def test_no_shuffle_keeps_the_order():
    assert next(iter(_loader(shuffle=False))) == [0, 1, 2, 3]


def test_steps_beyond_the_epochs_are_run_with_a_warning():
    with pytest.warns(UserWarning, match="total_training_steps=100 needs 4 epochs of 25 steps"):
        assert resolve_total_steps(25, 1, 100) == 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_total_steps(25, 2, None) == 50
        assert resolve_total_steps(25, 4, 100) == 100
        assert resolve_total_steps(25, 9, 7) == 7
    for steps, epochs in ((0, 1), (None, 0)):
        with pytest.raises(ValueError, match="trains nothing"):
            resolve_total_steps(25, epochs, steps)


def test_warmup_longer_than_the_schedule_is_refused_before_workers_start():
    optim = SimpleNamespace(lr_warmup_steps=5, lr_decay_steps=None, lr_decay_style="linear")
    check_warmup("optim", optim, 6)
    with pytest.raises(ValueError, match="optim.lr_warmup_steps=5 .* use at most 4"):
        check_warmup("optim", optim, 5)
    optim.lr_decay_style = "constant"
    check_warmup("optim", optim, 5)


_KILLED = """
import multiprocessing, os, signal
from tests.utils.test_resumable_loader_on_cpu import _loader

if __name__ == "__main__":
    batches = iter(_loader(rows=12, num_workers=1))
    print(next(batches)[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_readers_end_with_a_killed_trainer(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_KILLED)
    # The readers inherit the pipe: it closes when the last of them has ended.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9 and done.stdout, done.stderr
