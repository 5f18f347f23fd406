"""What was counted by endpoints that are endpoints no more: kept, so that totals never fall."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from userspace_proxy.core.counters import EndpointCounters, add_up

_SETTLE_S = 60.0  # longer than any dial is under way, which counts when it ends


class Counted(Protocol):
    """Something that may go on counting after it was removed: its connections stay."""

    def counters(self) -> EndpointCounters:
        """Return a reading of the counters."""


class Past:
    """The totals of what was removed. Whatever still has something open is kept and read anew each time."""

    __slots__ = ("_recent", "_settle_at", "_settled")

    def __init__(self) -> None:
        self._settled = EndpointCounters()
        self._recent: list[tuple[float, Counted]] = []
        self._settle_at = 0.0

    def retire(self, counted: Iterable[Counted]) -> None:
        """Take in what is being removed."""
        now = time.monotonic()
        self._recent += [(now, each) for each in counted]
        self._settle(now)

    def absorb(self, other: Past) -> None:
        """Take in all that another one holds, which must not be used again for counting."""
        self._settled = add_up((self._settled, other._settled))
        self._recent += other._recent

    def total(self) -> EndpointCounters:
        """Return the totals of all that was removed."""
        if not self._recent:
            return self._settled
        self._settle(time.monotonic())
        return add_up((self._settled, *(each.counters() for _, each in self._recent)))

    def _settle(self, now: float) -> None:
        """Now and then, keep only the numbers of what has nothing open and was removed long enough ago."""
        if now < self._settle_at:
            return
        self._settle_at = now + _SETTLE_S
        kept: list[tuple[float, Counted]] = []
        done: list[EndpointCounters] = []
        for since, each in self._recent:
            reading = each.counters()
            if reading.open_connections or reading.open_sessions or now - since < _SETTLE_S:
                kept.append((since, each))
            else:
                done.append(reading)
        if done:
            self._settled = add_up((self._settled, *done))
            self._recent = kept
