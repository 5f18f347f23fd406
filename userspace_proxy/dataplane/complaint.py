"""Warnings about what may happen thousands of times: one line each 10 s, and not one for each time."""

from __future__ import annotations

import logging

INTERVAL_S = 10.0


class Complaint:
    """One kind of warning. A line says how often it was left out since the last one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_at: float | None = None
        self._left_out = 0

    def say(self, text: str, *, now: float) -> None:
        """Log the text, unless the last line is younger than 10 s. `now` is monotonic seconds."""
        if self._last_at is not None and now - self._last_at < INTERVAL_S:
            self._left_out += 1
            return
        if self._left_out:
            text = f"{text} ({self._left_out} times more since the last such line)"
        self._last_at, self._left_out = now, 0
        self._log.warning("%s", text)
