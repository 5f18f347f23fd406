"""Connections on which nothing moves: found by looking at all of them now and then, so a read costs nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Generic, Protocol, Self, TypeVar

from userspace_proxy.dataplane.parting import unacknowledged

_LOOKS_PER_TURN = 1024


class Watched(Protocol):
    """One side of a connection. `fd` is negative once that is closed, `moved` the bytes that were read from it."""

    fd: int
    family: int
    moved: int
    peer: Self


Connection = TypeVar("Connection", bound=Watched)

_Seen = tuple[int, float, int | None]
"""How many bytes had moved, since when, and how many were on their way then: known from half of the time-out on."""


class IdleWatch(Generic[Connection]):
    """Calls `expire` for each connection on which nothing has moved for `timeout_s` seconds; 0 means never.

    What a slow peer takes out of the kernel's buffers counts as moving, too. Looks ten times in the time-out, at least
    every 5 s, and that late an end may be.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connections: Collection[Connection],
        expire: Callable[[Connection], None],
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._connections = connections
        self._expire = expire
        self._timeout_s = 0.0
        self._to_look_at: list[Connection] = []  # in this round
        self._seen: dict[Connection, _Seen] = {}  # in this round
        self._seen_before: dict[Connection, _Seen] = {}  # in the last one
        self._timer: asyncio.TimerHandle | None = None
        self.reconfigure(timeout_s)

    def reconfigure(self, timeout_s: float) -> None:
        """Use another time-out, from now on."""
        if timeout_s != self._timeout_s:
            self.stop()
            self._timeout_s = timeout_s
            if timeout_s:
                self._look_after(0.0)

    def stop(self) -> None:
        """Look no more, and forget what was seen."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._to_look_at, self._seen, self._seen_before = [], {}, {}

    def _look_after(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._look_at_some)

    def _look_at_some(self) -> None:
        if not self._to_look_at:
            self._to_look_at = list(self._connections)
            self._seen, self._seen_before = {}, self._seen
        now = self._loop.time()
        some = self._to_look_at[-_LOOKS_PER_TURN:]
        del self._to_look_at[-_LOOKS_PER_TURN:]
        for connection in some:
            if connection.fd >= 0:
                self._look_at(connection, now)
        self._look_after(0.0 if self._to_look_at else min(5.0, max(0.02, self._timeout_s / 10)))

    def _look_at(self, connection: Connection, now: float) -> None:
        moved = connection.moved + connection.peer.moved
        moved_before, since, on_their_way = self._seen_before.get(connection, (-1, now, None))
        if moved != moved_before:
            self._seen[connection] = (moved, now, None)
            return
        is_over = now - since >= self._timeout_s
        if is_over or (on_their_way is None and now - since >= self._timeout_s / 2):
            still = _on_their_way(connection)
            if on_their_way is None:
                on_their_way = still
            elif still != on_their_way:
                since, on_their_way = now, None
            else:
                self._expire(connection)
                return
        self._seen[connection] = (moved, since, on_their_way)


def _on_their_way(connection: Watched) -> int:
    """Return how many bytes were given to the two sockets and have not arrived yet."""
    peer = connection.peer
    return unacknowledged(connection.fd, connection.family) + unacknowledged(peer.fd, peer.family)
