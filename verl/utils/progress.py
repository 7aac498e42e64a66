# SPDX-License-Identifier: Apache-2.0
"""The progress line of the trainers: a rich bar on a terminal, a plain line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# A log file should neither grow with the number of steps nor stay silent.
_NUM_PLAIN_LINES = 20


class TrainingProgress:
    """Context manager that shows step, reward, grad norm and tokens/s of a training run.

    Args:
        total: number of steps.
        title: word before the bar.
        console: where to write; None is stdout. A bar is drawn if it is a terminal, else about 20 lines in all.
    """

    def __init__(self, total: int, title: str = "training", console: Console | None = None):
        self.total = total
        self.title = title
        self._console = console or Console()
        self._every = max(1, total // _NUM_PLAIN_LINES)
        self._bar: Progress | None = None
        self._started = 0.0

    def __enter__(self) -> "TrainingProgress":
        self._started = time.perf_counter()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self.title, total=self.total, figures="")
            self._bar.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self, step: int, reward: float | None = None, grad_norm: float | None = None, tokens_per_s: float | None = None
    ) -> None:
        """Show that `step` steps are done. Figures that are None are left out."""
        named = (("reward", reward, ".3f"), ("grad norm", grad_norm, ".3g"), ("tokens/s", tokens_per_s, ",.0f"))
        figures = "  ".join(f"{name} {float(value):{form}}" for name, value, form in named if value is not None)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        elif step % self._every == 0 or step >= self.total:
            seconds = time.perf_counter() - self._started
            line = f"{self.title} {step}/{self.total}  {figures}  ({seconds:.0f} s)"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
