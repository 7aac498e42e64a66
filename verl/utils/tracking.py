# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: the console, TensorBoard, a JSONL file, Weights & Biases.

Logging never ends a training run: a backend that cannot be opened is left out with one warning, and one that raises
later is warned about once per kind of error and tried again at the next step.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


class Tracking:
    """Sends each step's metrics to every backend of `trainer.logger`.

    Args:
        project_name: `trainer.project_name`.
        experiment_name: `trainer.experiment_name`.
        default_backend: one name or a list of names out of console, tensorboard, file, wandb.
        config: the run's resolved config as a nested mapping; wandb stores it, and its `trainer.default_local_dir` is
            the folder that logs are written under.
        default_local_dir: that folder, given directly. Without either it is `outputs/<project>/<experiment>`.

    The file is `metrics.jsonl` in that folder (environment variable VERL_FILE_LOGGER_PATH: another file), one line
    `{"step": 3, "data": {...}}` per step, appended to when the run goes on. TensorBoard events are in its
    `tensorboard` folder (TENSORBOARD_DIR: another one).

    Raises:
        ValueError: an unknown backend name.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Iterable[str] = "console",
        config: Mapping[str, Any] | None = None,
        default_local_dir: str | os.PathLike | None = None,
    ):
        names = [default_backend] if isinstance(default_backend, str) else list(dict.fromkeys(default_backend))
        unknown = [name for name in names if name not in _BACKENDS]
        if unknown:
            raise ValueError(f"trainer.logger={unknown} is not known; known: {', '.join(_BACKENDS)}")
        folder = default_local_dir or ((config or {}).get("trainer") or {}).get("default_local_dir")
        folder = Path(folder or Path("outputs", project_name, experiment_name))
        self.backends: dict[str, Any] = {}
        self._warned: set[tuple[str, str, type]] = set()
        for name in names:
            try:
                self.backends[name] = _BACKENDS[name](project_name, experiment_name, folder, config)
            except Exception as error:  # whatever the backend's library raises
                self._warn(name, "left out, it cannot be opened", error)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metrics of one step. Numbers may be Python's, numpy's or 0-d tensors."""
        values = {str(name): to_native(value) for name, value in data.items()}
        for name, backend in self.backends.items():
            try:
                backend.log(values, int(step))
            except Exception as error:  # a full disk or a lost connection must not cost a training run
                self._warn(name, "could not log a step", error)

    def finish(self) -> None:
        """Flush and close every backend. May be called twice."""
        while self.backends:
            name, backend = self.backends.popitem()
            try:
                backend.finish()
            except Exception as error:
                self._warn(name, "could not be closed", error)

    def _warn(self, name: str, what: str, error: Exception) -> None:
        if (name, what, type(error)) not in self._warned:
            self._warned.add((name, what, type(error)))
            logger.warning("metrics backend %r: %s: %s: %s", name, what, type(error).__name__, error)


def to_native(value: Any) -> Any:
    """Turn numpy scalars and arrays and tensors, also inside lists and dicts, into plain Python values.

    An integer stays an integer and a bool a bool. What is none of these and no JSON type becomes its text.
    """
    if isinstance(
        value, np.floating
    ):  # before float: numpy's float64 is a subclass of it; longdouble has no native item
        return float(value)
    if isinstance(value, np.generic):
        return to_native(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return to_native(value.tolist())
    if hasattr(value, "detach"):  # a tensor, recognised without importing torch
        return value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return {str(key): to_native(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [to_native(item) for item in value]
    return str(value)


def _numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class ConsoleBackend:
    """One line per step on stdout, numbers only."""

    def __init__(self, project_name: str, experiment_name: str, folder: Path, config: Mapping[str, Any] | None):
        pass

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Print `step:3 - name:value - ...`."""
        parts = [f"step:{step}"]
        for name, value in _numbers(values).items():
            parts.append(f"{name}:{value:.5g}" if isinstance(value, float) else f"{name}:{value}")
        print(" - ".join(parts), flush=True)

    def finish(self) -> None:
        """Nothing is held open."""


class FileBackend:
    """One JSON object per step and line. JSON has no NaN or infinity: they are written as null."""

    def __init__(self, project_name: str, experiment_name: str, folder: Path, config: Mapping[str, Any] | None):
        path = Path(os.environ.get("VERL_FILE_LOGGER_PATH") or folder / "metrics.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Append one line and flush it, so that a killed run keeps what it logged."""
        self._file.write(json.dumps({"step": step, "data": _finite(values)}, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


class TensorBoardBackend:
    """Scalars for TensorBoard."""

    def __init__(self, project_name: str, experiment_name: str, folder: Path, config: Mapping[str, Any] | None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.environ.get("TENSORBOARD_DIR") or str(folder / "tensorboard"))
        self._tags: dict[str, str] = {}

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write every number under its cleaned name."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(self._tag(name), value, step)
        self._writer.flush()

    def _tag(self, name: str) -> str:
        """The name with what TensorBoard's tree of charts cannot show replaced; two names never share one tag."""
        if name not in self._tags:
            clean = re.sub(r"/+", "/", re.sub(r"[^\w./-]", "_", name)).strip("/") or "unnamed"
            taken, tag, count = set(self._tags.values()), clean, 2
            while tag in taken:
                tag, count = f"{clean}_{count}", count + 1
            self._tags[name] = tag
        return self._tags[name]

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbBackend:
    """A run on Weights & Biases; needs the wandb package and whatever login it asks for."""

    def __init__(self, project_name: str, experiment_name: str, folder: Path, config: Mapping[str, Any] | None):
        import wandb

        self._run = wandb.init(project=project_name, name=experiment_name, config=to_native(config or {}))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send one step."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()


_BACKENDS = {
    "console": ConsoleBackend,
    "tensorboard": TensorBoardBackend,
    "file": FileBackend,
    "wandb": WandbBackend,
}
