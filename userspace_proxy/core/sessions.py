"""The table of UDP sessions: who is idle too long, and who goes first when there are too many."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar


class Session(Protocol):
    """Something that is idle since `active_s`, in monotonic seconds. Whoever sees traffic of it sets that."""

    active_s: float


SessionT = TypeVar("SessionT", bound=Session)


class SessionTable(Generic[SessionT]):
    """At most `capacity` sessions. One that has been idle for `idle_timeout_s` is expired. Times are monotonic seconds.

    Traffic costs the table nothing: it compares `active_s` with what it noted only when a session seems due.
    """

    def __init__(self, *, idle_timeout_s: float, capacity: int) -> None:
        self.idle_timeout_s = idle_timeout_s
        self.capacity = capacity
        self._sessions: dict[SessionT, None] = {}
        self._noted: list[tuple[float, int, SessionT]] = []  # a heap: when each was active, or has been since
        self._number = count()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionT]:
        """Yield the sessions of this moment, some of which the caller may remove meanwhile."""
        yield from list(self._sessions)

    def add(self, session: SessionT) -> list[SessionT]:
        """Add a session and return those that had to go for it: the longest idle ones."""
        evicted = []
        while len(self._sessions) >= self.capacity:
            evicted.append(self._pop_longest_idle())
        self._sessions[session] = None
        self._note(session)
        return evicted

    def remove(self, session: SessionT) -> None:
        """Forget the session. One that is not there is ignored."""
        self._sessions.pop(session, None)
        if not self._sessions:
            self._noted.clear()

    def expire(self, *, now: float) -> list[SessionT]:
        """Remove and return the sessions that are idle too long, the longest idle one first."""
        expired = []
        while self._noted and self._noted[0][0] <= now - self.idle_timeout_s:
            session = heapq.heappop(self._noted)[2]
            if session not in self._sessions:
                continue
            if session.active_s <= now - self.idle_timeout_s:
                del self._sessions[session]
                expired.append(session)
            else:
                self._note(session)
        return sorted(expired, key=lambda session: session.active_s)

    def next_expiry(self) -> float | None:
        """Return a time before which no session expires, or None when there is none."""
        return self._noted[0][0] + self.idle_timeout_s if self._sessions else None

    def _pop_longest_idle(self) -> SessionT:
        while True:
            noted_s, _, session = heapq.heappop(self._noted)
            if session in self._sessions:
                if session.active_s == noted_s:
                    del self._sessions[session]
                    return session
                self._note(session)

    def _note(self, session: SessionT) -> None:
        heapq.heappush(self._noted, (session.active_s, next(self._number), session))
