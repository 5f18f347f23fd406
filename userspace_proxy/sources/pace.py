"""When to do what: request rates, back-off, and steps short enough for the data path that shares the event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from userspace_proxy.core.errors import ApiRefused, ApiUnreachable

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


class RateLimit:
    """Lets `burst` requests through at once and `qps` a second on average; `qps` 0 or less means no limit."""

    def __init__(self, qps: float, burst: int, *, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep) -> None:
        self._interval_s = 1.0 / qps if qps > 0 else 0.0
        self._burst = max(1, burst)
        self._clock = clock
        self._sleep = sleep
        self._next_at = 0.0

    async def wait(self) -> None:
        """Return when the next request may start. Requests start in the order of their calls."""
        now = self._clock()
        earliest = now - (self._burst - 1) * self._interval_s
        starts_at = max(self._next_at, earliest)
        self._next_at = starts_at + self._interval_s
        if starts_at > now:
            await self._sleep(starts_at - now)


class Backoff:
    """How long to wait after a failure: twice as long each time, between `min_s` and `max_s`, never twice the same.

    A server that cannot be reached is tried at least each `unreachable_max_s`: an attempt costs it nothing, and its
    return should be noticed soon. A failure of another kind than the last one starts anew. What the server asks for
    with Retry-After is the least.
    """

    def __init__(
        self, min_s: float = 1.0, max_s: float = 30.0, unreachable_max_s: float = 3.0, rng: random.Random | None = None
    ) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._unreachable_max_s = unreachable_max_s
        self._rng = rng or random.Random()
        self.reset()

    def reset(self) -> None:
        """Say that things work again."""
        self._failures = 0
        self._kind: type[Exception] | None = None

    def delay_s(self, failure: Exception) -> float:
        """Return the seconds to wait after `failure`."""
        if type(failure) is not self._kind:
            self._failures, self._kind = 0, type(failure)
        most_s = self._unreachable_max_s if isinstance(failure, ApiUnreachable) else self._max_s
        self._failures = min(self._failures + 1, 32)
        ceiling_s = min(most_s, self._min_s * 2**self._failures)
        delay_s = self._rng.uniform(max(self._min_s, ceiling_s / 2), ceiling_s)
        asked_s = failure.retry_after_s if isinstance(failure, ApiRefused) else None
        return delay_s if asked_s is None else max(delay_s, asked_s + self._rng.uniform(0, self._min_s))


class Pace:
    """Gives way to whatever else the event loop has to do, after each `work_s` seconds of work, for `rest_s`."""

    def __init__(self, work_s: float = 0.001, rest_s: float = 0.001) -> None:
        self._work_s = work_s
        self._rest_s = rest_s
        self._started_at = time.perf_counter()

    async def breathe(self) -> None:
        """Call between small pieces of work."""
        if time.perf_counter() - self._started_at >= self._work_s:
            await asyncio.sleep(self._rest_s)
            self._started_at = time.perf_counter()

    def start(self) -> None:
        """Say that work starts after a wait."""
        self._started_at = time.perf_counter()
