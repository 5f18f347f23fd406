"""One epoll, and the watch over itself. Callbacks only: no Task, Future or transport per connection.

The loop wakes up at least every 10 ms while it measures. When it comes round much later than it asked to, it was not
running or was busy: that stretch is `blind`.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from typing import Protocol

from userspace_proxy.bench.generator.job import Job, Watch

_EVENTS_PER_POLL = 256
_HEARTBEAT_S = 0.010
_COARSE_S = 0.002  # epoll waits in whole milliseconds: what is due sooner is waited for with select
_BLIND_S = 0.025
_MAX_BLIND_KEPT = 10_000


class Work(Protocol):
    """What a loop is run for."""

    def advance(self, now: float) -> float | None:
        """Start what is due. Return when there is something to do again, or None when all is done."""


class Loop:
    """An event loop for one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._watch = Watch()
        self._marks: list[tuple[float, float, float]] = []

    def watch(self, fd: int, handler: Callable[[int], None], events: int) -> None:
        """Tell the handler about these events, level-triggered."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Tell nobody about the descriptor, which is about to be closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()

    def run(self, work: Work) -> Watch:
        """Run until the work is done. Return what the loop saw of itself during the measured part."""
        epoll_fd, poll, handlers = self._epoll.fileno(), self._epoll.poll, self._handlers
        expected = now = time.monotonic()
        boundaries = [self._job.measure_from, self._job.measure_to]
        while (next_at := work.advance(now)) is not None:
            if boundaries and now >= boundaries[0]:
                del boundaries[0]
                self._marks.append(_usage(now))
            wait_s = min(next_at - now, _HEARTBEAT_S)
            expected = now + max(wait_s, 0.0)
            if 0.0 < wait_s < _COARSE_S:
                select.select((epoll_fd,), (), (), wait_s)
                wait_s = 0.0
            for fd, events in poll(max(wait_s, 0.0), _EVENTS_PER_POLL):
                handler = handlers.get(fd)
                if handler is not None:  # a number that was used again is told of nothing worse than EAGAIN
                    handler(events)
            now = time.monotonic()
            if now - expected > _BLIND_S and len(self._watch.blind) < _MAX_BLIND_KEPT:
                self._watch.blind.append((expected, now))
        return self._summary()

    def _summary(self) -> Watch:
        marks = self._marks if len(self._marks) == 2 else [*self._marks[:1], _usage(time.monotonic())]
        if len(marks) == 2:
            (from_, cpu, waited), (to, cpu_then, waited_then) = marks
            self._watch.wall_s, self._watch.cpu_s, self._watch.wait_s = to - from_, cpu_then - cpu, waited_then - waited
        return self._watch


def _usage(now: float) -> tuple[float, float, float]:
    """Return now, and the seconds that this thread has run, and those that it was ready to run but had no CPU."""
    waited_s = 0.0
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat") as file:
        waited_s = int(file.read().split()[1]) / 1e9
    return now, time.thread_time(), waited_s
