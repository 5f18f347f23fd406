"""The event loop's edge: who is told when a descriptor is ready.

One epoll instance of our own is nested in the event loop, edge-triggered, which spares a loop callback and its
bookkeeping per descriptor (performance.md: 1.19 times the connections of `add_reader` per socket). Where the system has
no epoll, `LoopPoller` does the same with the loop's own readers and writers, which are level-triggered.

A handler works with both when it keeps to two rules: it reads until there is nothing more or notes that there may be,
and it says `pause_reading` when it will not read although there may be something.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol

READABLE = 0x001  # EPOLLIN
URGENT = 0x002  # EPOLLPRI: reads stop short at the mark of TCP urgent data, which does not mean that all is read
WRITABLE = 0x004  # EPOLLOUT
ERROR = 0x008  # EPOLLERR
HANGUP = 0x010  # EPOLLHUP: neither direction is open any more
READ_HANGUP = 0x2000  # EPOLLRDHUP: the other side has sent its last byte
_EDGE_TRIGGERED = 1 << 31
_STREAM = READABLE | URGENT | READ_HANGUP | _EDGE_TRIGGERED

_EVENTS_PER_POLL = 256
_POLLS_PER_WAKEUP = 4

_log = logging.getLogger(__name__)


class Handler(Protocol):
    """Whatever wants to know about a descriptor."""

    def on_ready(self, events: int) -> None:
        """The descriptor is READABLE, WRITABLE, ... Must not block and must not raise."""


class Poller(Protocol):
    """Tells handlers about descriptors. Descriptors that were watched are closed through `close` only."""

    def watch(self, fd: int, handler: Handler) -> None:
        """Tell the handler when the descriptor becomes readable."""

    def watch_writable(self, fd: int, handler: Handler) -> None:
        """Tell the handler when the descriptor becomes writable, and of nothing else."""

    def watch_level(self, fd: int, handler: Handler) -> None:
        """Tell the handler whenever the descriptor is readable, again and again until all is read."""

    def rewatch(self, fd: int, handler: Handler) -> None:
        """Change from `watch_writable` to `watch`."""

    def want_write(self, fd: int) -> None:
        """Tell the handler of the watched descriptor once it can be written to again."""

    def pause_reading(self, fd: int) -> None:
        """Expect that the handler leaves unread what there is."""

    def resume_reading(self, fd: int) -> None:
        """The handler reads again, starting by itself with what there may be."""

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor, which stays open."""

    def close(self, fd: int) -> None:
        """Forget and close the descriptor; its number is not used again for events that are already on their way."""

    def defer(self, resume: Callable[[], None], *, first: bool = False) -> None:
        """Call `resume` when the handlers that are ready have been told, after or before others that wait for it."""

    def at_turn_end(self, finish: Callable[[], None]) -> None:
        """Call `finish` when all that is ready has been told of, before anything is asked again. For handlers only."""

    def shutdown(self) -> None:
        """Release what the poller itself holds."""


class EpollPoller:
    """Edge-triggered epoll, nested in the event loop by a single reader.

    Closing a descriptor ends its registration only if no other process has a copy of it: where one may, `are_shared`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, are_shared: bool = False) -> None:
        self._loop = loop
        self._are_shared = are_shared
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._deferred: deque[Callable[[], None]] = deque()
        self._finishing: list[Callable[[], None]] = []
        self._to_close: list[int] = []
        self._dispatching = False
        self._woken = False
        loop.add_reader(self._epoll.fileno(), self._on_wakeup)

    def watch(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, _STREAM)

    def watch_writable(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, WRITABLE | _EDGE_TRIGGERED)

    def watch_level(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, READABLE)

    def rewatch(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.modify(fd, _STREAM)

    def want_write(self, fd: int) -> None:
        self._epoll.modify(fd, _STREAM | WRITABLE)

    def pause_reading(self, fd: int) -> None:
        """An edge is told once, so there is nothing to pause."""

    def resume_reading(self, fd: int) -> None:
        """An edge is told once, so there is nothing to resume."""

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def close(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None and self._are_shared:
            self._epoll.unregister(fd)
        if self._dispatching:  # also where it is not watched any more: its events may be in this batch
            self._to_close.append(fd)
        else:
            os.close(fd)

    def defer(self, resume: Callable[[], None], *, first: bool = False) -> None:
        if first:
            self._deferred.appendleft(resume)
        else:
            self._deferred.append(resume)
        if not self._dispatching and not self._woken:
            self._woken = True
            self._loop.call_soon(self._on_wakeup)

    def at_turn_end(self, finish: Callable[[], None]) -> None:
        self._finishing.append(finish)

    def shutdown(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._deferred.clear()

    def _on_wakeup(self) -> None:
        self._woken = False
        for _ in range(_POLLS_PER_WAKEUP):
            if self._epoll.closed or not (self._dispatch() or self._deferred):
                return
        if self._deferred and not self._woken:  # the epoll descriptor alone would not wake us for these
            self._woken = True
            self._loop.call_soon(self._on_wakeup)

    def _dispatch(self) -> int:
        self._dispatching = True
        if self._deferred:  # one only, so that events pass between what takes long (benchmarks/fairness.py)
            self._call_each([self._deferred.popleft()])
        events = self._epoll.poll(0, _EVENTS_PER_POLL)
        handlers = self._handlers
        for fd, flags in events:
            handler = handlers.get(fd)
            if handler is not None:
                try:
                    handler.on_ready(flags)
                except Exception:
                    _log.exception("fault while handling a ready descriptor")
        if self._finishing:
            finishing, self._finishing = self._finishing, []
            self._call_each(finishing)
        self._dispatching = False
        if self._to_close:
            for fd in self._to_close:
                os.close(fd)
            self._to_close.clear()
        return len(events)

    @staticmethod
    def _call_each(callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:  # a fault of ours must not take the other connections with it
                _log.exception("fault while going on with what had waited")


class LoopPoller:
    """The same with the event loop's own level-triggered readers and writers. Slower; needs no epoll."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handlers: dict[int, Handler] = {}
        self._reading: set[int] = set()
        self._writing: set[int] = set()

    def watch(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self.resume_reading(fd)

    def watch_writable(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self.want_write(fd)

    def watch_level(self, fd: int, handler: Handler) -> None:
        self.watch(fd, handler)

    def rewatch(self, fd: int, handler: Handler) -> None:
        self._stop_writing(fd)
        self.watch(fd, handler)

    def want_write(self, fd: int) -> None:
        if fd not in self._writing:
            self._writing.add(fd)
            self._loop.add_writer(fd, self._on_writable, fd)

    def pause_reading(self, fd: int) -> None:
        if fd in self._reading:
            self._reading.discard(fd)
            self._loop.remove_reader(fd)

    def resume_reading(self, fd: int) -> None:
        if fd not in self._reading:
            self._reading.add(fd)
            self._loop.add_reader(fd, self._on_readable, fd)

    def unwatch(self, fd: int) -> None:
        self.pause_reading(fd)
        self._stop_writing(fd)
        self._handlers.pop(fd, None)

    def close(self, fd: int) -> None:
        self.unwatch(fd)
        os.close(fd)

    def defer(self, resume: Callable[[], None], *, first: bool = False) -> None:
        self._loop.call_soon(resume)

    def at_turn_end(self, finish: Callable[[], None]) -> None:
        self._loop.call_soon(finish)

    def shutdown(self) -> None:
        for fd in list(self._handlers):
            self.unwatch(fd)

    def _stop_writing(self, fd: int) -> None:
        if fd in self._writing:
            self._writing.discard(fd)
            self._loop.remove_writer(fd)

    def _on_readable(self, fd: int) -> None:
        handler = self._handlers.get(fd)
        if handler is not None and fd in self._reading:
            # URGENT makes it read until there is nothing: uvloop tells of a socket that was reset only once.
            handler.on_ready(READABLE | URGENT)

    def _on_writable(self, fd: int) -> None:
        handler = self._handlers.get(fd)
        if handler is not None and fd in self._writing:
            self._stop_writing(fd)
            handler.on_ready(WRITABLE)


def has_epoll() -> bool:
    """Tell whether this system has epoll."""
    return sys.platform == "linux"


def make_poller(kind: str, loop: asyncio.AbstractEventLoop, *, are_shared: bool = False) -> Poller:
    """Return the poller of that kind: `epoll`, `loop`, or `auto` for the best one here.

    `are_shared` tells whether other processes may have copies of descriptors when these are closed.
    """
    if kind == "epoll" or (kind == "auto" and has_epoll()):
        return EpollPoller(loop, are_shared=are_shared)
    return LoopPoller(loop)
