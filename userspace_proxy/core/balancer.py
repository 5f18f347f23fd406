"""Which endpoint gets the next connection. Deterministic: time and randomness are arguments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import Endpoint

_UNSEEDED = random.Random()  # shared, as each has 2.5 KiB of state


class Balancer(Protocol):
    """Chooses endpoints for one service port. Implement this to try another algorithm."""

    def update(self, endpoints: Sequence[Endpoint], session_affinity_s: float | None) -> None:
        """Use these endpoints, and this affinity time-out (seconds; None: no affinity), from the next pick on."""

    def pick(self, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Endpoint:
        """Return the endpoint for a new connection or session of `client`, a textual IP address.

        `now` is monotonic seconds. `tried` are the endpoints that have already failed for this very connection, in
        order, so a pick with it is a retry. Raises NoEndpoints when there is none.
        """


class RoundRobin:
    """Every endpoint in turn, exactly; with session affinity, a client's own endpoint while it is remembered.

    Source: kube-proxy 1.25, userspace round robin, but retries leave the turn alone and reach every endpoint.
    """

    __slots__ = ("_next", "_remembered", "_rng", "_session_affinity_s", "_turn")

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or _UNSEEDED
        self._turn: list[Endpoint] = []
        self._next = 0
        self._session_affinity_s: float | None = None
        # Least recently renewed first, so that expired clients are at the front.
        self._remembered: dict[str, tuple[Endpoint, float]] = {}

    def update(self, endpoints: Sequence[Endpoint], session_affinity_s: float | None) -> None:
        """Shuffle and start over when the set of endpoints differs; the same set in any order changes nothing.

        Clients of endpoints that are gone are forgotten, others keep theirs.
        """
        self._session_affinity_s = session_affinity_s
        if session_affinity_s is None:
            self._remembered.clear()
        present = set(endpoints)
        if present == set(self._turn):
            return
        self._turn = sorted(present)
        self._rng.shuffle(self._turn)
        self._next = 0
        self._remembered = {client: seen for client, seen in self._remembered.items() if seen[0] in present}

    def pick(self, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Endpoint:
        """Return the remembered endpoint of `client` while its affinity lasts, else the next in turn.

        A retry takes the next endpoint that is not in `tried` (all tried: the one after the last), is remembered
        instead of the one that failed, and does not move the turn.
        """
        if not self._turn:
            raise NoEndpoints
        if self._session_affinity_s is None:
            return self._after(tried) if tried else self._in_turn()
        self._forget_expired(now)
        remembered = self._remembered.pop(client, None)
        first_pick = remembered[0] if remembered and not tried else None
        endpoint = first_pick or (self._after(tried) if tried else self._in_turn())
        self._remembered[client] = (endpoint, now)
        return endpoint

    def _in_turn(self) -> Endpoint:
        endpoint = self._turn[self._next]
        self._next = (self._next + 1) % len(self._turn)
        return endpoint

    def _after(self, tried: Sequence[Endpoint]) -> Endpoint:
        start = self._turn.index(tried[-1]) + 1 if tried[-1] in self._turn else self._next
        candidates = [*self._turn[start:], *self._turn[:start]]
        return next((endpoint for endpoint in candidates if endpoint not in tried), candidates[0])

    def _forget_expired(self, now: float) -> None:
        assert self._session_affinity_s is not None
        while self._remembered:
            client, (_, renewed) = next(iter(self._remembered.items()))
            if now - renewed < self._session_affinity_s:
                return
            del self._remembered[client]
