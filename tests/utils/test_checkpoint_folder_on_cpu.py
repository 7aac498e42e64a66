# SPDX-License-Identifier: Apache-2.0
import os

import pytest

from verl.utils.checkpoint_folder import MARKER, CheckpointFolder, step_of


def _write(text):
    def write(folder):
        with open(os.path.join(folder, "weights"), "w") as f:
            f.write(text)

    return write


def _read(folder):
    with open(os.path.join(folder, "weights")) as f:
        return f.read()


def _failing(folder):
    _write("half")(folder)
    raise OSError("disk full")


def test_failed_save_keeps_the_old_checkpoint_and_its_marker(tmp_path):
    folder = CheckpointFolder(tmp_path / "run", max_to_keep=1)
    first = folder.save(10, _write("first"))
    with pytest.raises(OSError, match="disk full"):
        folder.save(20, _failing)
    assert folder.steps() == [10]
    assert folder.latest() == first and _read(first) == "first"
    with pytest.raises(OSError):
        folder.save(10, _failing)
    assert _read(folder.latest()) == "first"
    # The next attempt finds no leftovers of the failed one.
    assert sorted(os.listdir(folder.save(20, _write("second")))) == ["weights"]


def test_keep_one_deletes_only_after_the_marker_names_the_new_one(tmp_path, monkeypatch):
    import shutil

    folder = CheckpointFolder(tmp_path, max_to_keep=1)
    folder.save(1, _write("a"))
    seen = []
    real = shutil.rmtree

    def spy(path, **kwargs):
        if str(path).endswith("global_step_1"):
            seen.append(((tmp_path / MARKER).read_text(), os.path.exists(folder.path(2))))
        return real(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", spy)
    folder.save(2, _write("b"))
    assert seen == [("2", True)]
    assert folder.steps() == [2]


def test_keeps_newest_and_leaves_later_steps_of_another_run(tmp_path):
    folder = CheckpointFolder(tmp_path, max_to_keep=2)
    for step in (10, 20, 30):
        folder.save(step, _write(str(step)))
    assert folder.steps() == [20, 30]
    CheckpointFolder(tmp_path, max_to_keep=1).save(25, _write("25"))
    assert folder.steps() == [25, 30]
    assert step_of(folder.latest()) == 25
    assert CheckpointFolder(tmp_path).max_to_keep is None
    CheckpointFolder(tmp_path).save(40, _write("40"))
    assert folder.steps() == [25, 30, 40]


def test_saving_a_step_again_replaces_it(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(5, _write("old"))
    folder.save(5, _write("new"))
    assert _read(folder.latest()) == "new"
    assert sorted(os.listdir(tmp_path)) == ["global_step_5", MARKER]


def test_resume_modes(tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    assert folder.resume_from("auto") is None
    saved = folder.save(7, _write("x"))
    assert folder.resume_from("auto") == saved
    assert folder.resume_from("disable") is None
    assert folder.resume_from("resume_path", saved + "/") == saved
    with pytest.raises(ValueError, match="resume_from_path"):
        folder.resume_from("resume_path")
    with pytest.raises(ValueError, match="does not exist"):
        folder.resume_from("resume_path", str(tmp_path / "global_step_9"))
    with pytest.raises(ValueError, match="global_step_"):
        folder.resume_from("resume_path", str(tmp_path))
    with pytest.raises(ValueError, match="auto, disable or resume_path"):
        folder.resume_from("always")


def test_marker_without_its_folder_is_an_error_not_a_silent_restart(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(3, _write("x"))
    os.rename(folder.path(3), tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="names step 3"):
        folder.latest()


def test_crash_between_the_two_renames_is_mended(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(3, _write("x"))
    os.rename(folder.path(3), folder.path(3) + ".replaced")
    assert _read(folder.latest()) == "x"
