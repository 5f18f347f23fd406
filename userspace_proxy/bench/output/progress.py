"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """Shows how far a run is while its context is open."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=None)

    def begin(self, expected_s: float) -> None:
        """Expect so many seconds."""
        self._progress.update(self._task, total=expected_s)

    def advance(self, done_s: float, what: str) -> None:
        """Note that so many of the expected seconds are over, and what is going on."""
        self._progress.update(self._task, advance=done_s, description=what or None)

    def end(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
