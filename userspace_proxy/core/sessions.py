"""The table of UDP sessions: who is idle too long, and who goes first when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Session = TypeVar("Session")


class SessionTable(Generic[Key, Session]):
    """At most `capacity` sessions, least recently active first. All times are monotonic seconds.

    A session that has seen no traffic for `idle_timeout_s` is expired. Sources of activity are the caller's to define.
    """

    def __init__(self, *, idle_timeout_s: float, capacity: int) -> None:
        self.idle_timeout_s = idle_timeout_s
        self.capacity = capacity
        self._sessions: OrderedDict[Key, tuple[Session, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[tuple[Key, Session]]:
        """Yield a copy's keys and sessions, so that the caller may remove some of them meanwhile."""
        yield from [(key, session) for key, (session, _) in self._sessions.items()]

    def get(self, key: Key) -> Session | None:
        """Return the session without renewing it."""
        entry = self._sessions.get(key)
        return entry[0] if entry else None

    def add(self, key: Key, session: Session, *, now: float) -> list[Session]:
        """Add a session and return those that had to go for it: the longest idle ones."""
        evicted = []
        while len(self._sessions) >= self.capacity:
            evicted.append(self._sessions.popitem(last=False)[1][0])
        self._sessions[key] = (session, now)
        return evicted

    def renew(self, key: Key, *, now: float) -> None:
        """Note traffic of the session in either direction. A key that is not there is ignored."""
        entry = self._sessions.get(key)
        if entry is not None:
            self._sessions[key] = (entry[0], now)
            self._sessions.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget the session. A key that is not there is ignored."""
        self._sessions.pop(key, None)

    def expire(self, *, now: float) -> list[Session]:
        """Remove and return the sessions that are idle too long."""
        expired = []
        while self._sessions:
            session, active = next(iter(self._sessions.values()))
            if now - active < self.idle_timeout_s:
                break
            self._sessions.popitem(last=False)
            expired.append(session)
        return expired

    def next_expiry(self) -> float | None:
        """Return when the first session expires unless renewed, or None when there is none."""
        for _, active in self._sessions.values():
            return active + self.idle_timeout_s
        return None
