"""How many TCP connections there may be: in total, and for each service port.

At a limit nobody is accepted and dropped: clients wait in the kernel's backlog, and accepting goes on as soon as there
is room. A connection counts from when it is accepted until it is closed, so also while it is dialled.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable

from userspace_proxy.core.model import ServicePortName
from userspace_proxy.dataplane.complaint import Complaint

TakeTurn = Callable[[], bool]
"""Accepts one client and tells whether another one waits, who then is to have a turn, too."""

_TURNS_AT_ONCE = 64

_log = logging.getLogger(__name__)


class _Account:
    """The connections of one service port, and who waits because it has too many."""

    __slots__ = ("open", "waiting")

    def __init__(self) -> None:
        self.open = 0
        self.waiting: dict[TakeTurn, None] = {}


class Admission:
    """Counts connections. A limit of zero is none.

    Those who wait for room in total get it one connection each in turn.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_connections: int, max_connections_per_service_port: int
    ) -> None:
        self.max_connections = max_connections
        self.max_connections_per_service_port = max_connections_per_service_port
        self.open_connections = 0
        self.times_full = 0
        """How often somebody had to wait because of `max_connections`."""
        self.times_service_port_full = 0
        self._loop = loop
        self._accounts: dict[ServicePortName, _Account] = {}  # of those with connections
        self._waiting: OrderedDict[TakeTurn, ServicePortName] = OrderedDict()  # for room in total
        self._next_turns: asyncio.Handle | None = None
        self._full = Complaint(_log)
        self._service_port_full = Complaint(_log)

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting) + sum(len(account.waiting) for account in self._accounts.values())

    def room(self, name: ServicePortName) -> int:
        """Return how many connections of this service port may be accepted now, without asking again."""
        room = sys.maxsize
        if self.max_connections_per_service_port:
            account = self._accounts.get(name)
            room = self.max_connections_per_service_port - (account.open if account is not None else 0)
        if self.max_connections:
            room = min(room, 0 if self._waiting else self.max_connections - self.open_connections)
        return max(0, room)

    def admit(self, name: ServicePortName) -> None:
        """Count a connection that was accepted."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
        account.open += 1
        self.open_connections += 1

    def released(self, name: ServicePortName) -> None:
        """Count a connection no longer, as it is closed. Whoever waits for its place gets it in a moment."""
        account = self._accounts[name]
        account.open -= 1
        self.open_connections -= 1
        if account.waiting:
            self._queue(name, account)
        if not account.open:
            del self._accounts[name]
        if self._waiting:
            self._plan_turns()

    def wait(self, name: ServicePortName, take_turn: TakeTurn) -> None:
        """Call `take_turn` when there is room for the service port, of which there is none now, until that is false."""
        if self._is_full_for(name):
            limit = self.max_connections_per_service_port
            self.times_service_port_full += 1
            text = f"{name} ({name.protocol}): at its limit of {limit} connections (maxConnectionsPerServicePort)"
            self._service_port_full.say(f"{text}; others wait to be accepted", now=self._loop.time())
            self._accounts[name].waiting[take_turn] = None
            return
        self._waiting[take_turn] = name
        if self._is_full():
            self.times_full += 1
            text = f"at the limit of {self.max_connections} connections (maxConnections)"
            self._full.say(f"{text}; others wait to be accepted", now=self._loop.time())
        else:  # but others came first
            self._plan_turns()

    def leave(self, name: ServicePortName, take_turn: TakeTurn) -> None:
        """Do not call `take_turn` any more, whether it waits or not."""
        self._waiting.pop(take_turn, None)
        if name in self._accounts:
            self._accounts[name].waiting.pop(take_turn, None)

    def reconfigure(self, max_connections: int, max_connections_per_service_port: int) -> None:
        """Use other limits from now on. Connections beyond a lower one stay."""
        self.max_connections = max_connections
        self.max_connections_per_service_port = max_connections_per_service_port
        for name, account in self._accounts.items():
            self._queue(name, account)
        if self._waiting:
            self._plan_turns()

    def shutdown(self) -> None:
        """Give nobody a turn any more."""
        self._waiting.clear()
        for account in self._accounts.values():
            account.waiting.clear()
        if self._next_turns is not None:
            self._next_turns.cancel()

    def _is_full(self) -> bool:
        return 0 < self.max_connections <= self.open_connections

    def _is_full_for(self, name: ServicePortName) -> bool:
        account = self._accounts.get(name)
        return account is not None and 0 < self.max_connections_per_service_port <= account.open

    def _queue(self, name: ServicePortName, account: _Account) -> None:
        self._waiting.update(dict.fromkeys(account.waiting, name))
        account.waiting.clear()

    def _plan_turns(self) -> None:
        """Give turns outside of the caller's stack: a turn may cause the next release at once."""
        if self._next_turns is None:
            self._next_turns = self._loop.call_soon(self._give_turns)

    def _give_turns(self) -> None:
        self._next_turns = None
        for _ in range(_TURNS_AT_ONCE):
            if not self._waiting or self._is_full():
                return
            take_turn, name = self._waiting.popitem(last=False)
            if self._is_full_for(name):
                self._accounts[name].waiting[take_turn] = None
            elif take_turn():
                self._waiting[take_turn] = name
        if self._waiting:
            self._plan_turns()
