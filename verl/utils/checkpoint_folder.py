# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of training checkpoints on disk: which one is complete, which one is the latest, which may be deleted.

A checkpoint of step N lives in ``<root>/global_step_N``. It is written to ``<root>/global_step_N.incomplete`` and
renamed once every part of it is on disk; then ``latest_checkpointed_iteration.txt`` names it; only then are older
ones deleted. A crash at any point leaves the previous checkpoint and its marker as they were. ``root`` must be a
folder that every node sees. Only names and files are handled here, so the module needs neither torch nor Ray.
"""

import os
import re
import shutil
from collections.abc import Callable

MARKER = "latest_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"global_step_(\d+)$")


def step_of(folder: str) -> int:
    """Training step of a folder called ``.../global_step_N``.

    Raises:
        ValueError: the folder has another name.
    """
    match = _STEP_FOLDER.search(os.path.basename(os.path.normpath(folder)))
    if match is None:
        raise ValueError(f"checkpoint folder {folder!r} is not called global_step_<number>")
    return int(match.group(1))


class CheckpointFolder:
    """The checkpoints of one run under one root folder.

    Args:
        root: folder of the run (``trainer.default_local_dir``); made when the first checkpoint is written.
        max_to_keep: number of complete checkpoints kept, the newest included; None or a number below 1 keeps all.
    """

    def __init__(self, root: str, max_to_keep: int | None = None):
        self.root = os.path.abspath(os.path.expanduser(root))
        self.max_to_keep = max_to_keep

    def path(self, step: int) -> str:
        """Folder of the complete checkpoint of ``step``."""
        return os.path.join(self.root, f"global_step_{step}")

    def incomplete_path(self, step: int) -> str:
        """Folder the checkpoint of ``step`` is written to before it is complete."""
        return self.path(step) + ".incomplete"

    def save(self, step: int, write: Callable[[str], None]) -> str:
        """Write the checkpoint of ``step``: ``write(folder)`` fills the folder, the rest happens after it returned.

        Whatever ``write`` raises is passed on, with the earlier checkpoints and the marker untouched.
        """
        write(self.begin(step))
        return self.commit(step)

    def begin(self, step: int) -> str:
        """Make the empty folder that the parts of checkpoint ``step`` are written to, and return it."""
        folder = self.incomplete_path(step)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        return folder

    def commit(self, step: int) -> str:
        """Declare the checkpoint of ``step`` complete: rename, write the marker, delete what is too old."""
        final, replaced = self.path(step), self.path(step) + ".replaced"
        if os.path.exists(final):
            # A run resumed from an earlier step writes this step again: keep the first version until the second is
            # there.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(self.incomplete_path(step), final)
        marker = os.path.join(self.root, MARKER)
        with open(marker + ".tmp", "w") as f:
            f.write(str(step))
            f.flush()
            os.fsync(f.fileno())
        os.replace(marker + ".tmp", marker)
        shutil.rmtree(replaced, ignore_errors=True)
        self._delete_old(step)
        return final

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not os.path.isdir(self.root):
            return []
        names = (n for n in os.listdir(self.root) if os.path.isdir(os.path.join(self.root, n)))
        return sorted(int(m.group(1)) for m in map(_STEP_FOLDER.match, names) if m)

    def _delete_old(self, newest: int) -> None:
        if self.max_to_keep is None or self.max_to_keep < 1:
            return
        # Later steps belong to an abandoned run that this one was resumed before: not ours to delete.
        ours = [step for step in self.steps() if step <= newest]
        for step in ours[: -self.max_to_keep]:
            shutil.rmtree(self.path(step))

    def latest(self) -> str | None:
        """Folder of the latest complete checkpoint, or None when this run has not written one.

        Raises:
            ValueError: the marker names a checkpoint that is not there, or is not a number.
        """
        marker = os.path.join(self.root, MARKER)
        if not os.path.exists(marker):
            return None
        with open(marker) as f:
            text = f.read().strip()
        if not text.isdigit():
            raise ValueError(f"{marker} holds {text!r} instead of a step number; delete it to start over")
        folder = self.path(int(text))
        if not os.path.isdir(folder) and os.path.isdir(folder + ".replaced"):
            os.rename(folder + ".replaced", folder)  # a crash between the two renames of commit()
        if not os.path.isdir(folder):
            raise ValueError(
                f"{marker} names step {text}, but {folder} is missing; delete the marker to start over, or point "
                f"trainer.resume_from_path to one of the steps {self.steps()}"
            )
        return folder

    def resume_from(self, mode: str, path: str | None = None) -> str | None:
        """Folder to resume from under ``trainer.resume_mode``, or None for a start from scratch.

        Args:
            mode: "disable", "auto" (the latest checkpoint if there is one) or "resume_path".
            path: folder ``.../global_step_N``, for mode "resume_path".

        Raises:
            ValueError: unknown mode, or a folder that is missing or wrongly named.
        """
        if mode == "disable":
            return None
        if mode == "auto":
            return self.latest()
        if mode != "resume_path":
            raise ValueError(f"trainer.resume_mode={mode!r} is not known; use auto, disable or resume_path")
        if not path:
            raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<.../global_step_N>")
        path = os.path.abspath(os.path.expanduser(path))
        step_of(path)
        if not os.path.isdir(path):
            raise ValueError(f"trainer.resume_from_path={path} does not exist")
        return path
