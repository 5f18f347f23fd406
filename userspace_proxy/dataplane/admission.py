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

GoOn = Callable[[], None]
"""How somebody goes on who waits for room: it asks for room at once, or does not want any."""

_log = logging.getLogger(__name__)


class _Account:
    """The connections of one service port, and who waits because it has too many."""

    __slots__ = ("open", "waiting")

    def __init__(self) -> None:
        self.open = 0
        self.waiting: dict[GoOn, None] = {}


class Admission:
    """Counts connections. Zero means no limit.

    Room that becomes free in total goes to those that wait for it one connection each, in the order in which they came.
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
        self._waiting: OrderedDict[GoOn, None] = OrderedDict()  # for room in total
        self._is_turn = False  # of the one that is told to go on just now
        self._next_turn: asyncio.Handle | None = None
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
            left = self.max_connections - self.open_connections
            if self._waiting:
                left = min(left, 1) if self._is_turn else 0
            room = min(room, left)
        return max(0, room)

    def admit(self, name: ServicePortName) -> None:
        """Count a connection that was accepted."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
        account.open += 1
        self.open_connections += 1

    def released(self, name: ServicePortName) -> None:
        """Count a connection no longer, as it is closed. Whoever waits for its place goes on in a moment."""
        account = self._accounts[name]
        account.open -= 1
        self.open_connections -= 1
        if account.waiting:
            self._queue(account)
        if not account.open:
            del self._accounts[name]
        if self._waiting:
            self._plan_turns()

    def wait(self, name: ServicePortName, go_on: GoOn) -> None:
        """Call `go_on` once, as soon as there is room for the service port, of which there is none now."""
        account = self._accounts.get(name)
        limit = self.max_connections_per_service_port
        if limit and account is not None and account.open >= limit:
            self.times_service_port_full += 1
            text = f"{name} ({name.protocol}): at its limit of {limit} connections (maxConnectionsPerServicePort)"
            self._service_port_full.say(f"{text}; others wait to be accepted", now=self._loop.time())
            account.waiting[go_on] = None
            return
        if self.open_connections >= self.max_connections:
            self.times_full += 1
            text = f"at the limit of {self.max_connections} connections (maxConnections)"
            self._full.say(f"{text}; others wait to be accepted", now=self._loop.time())
        else:
            self._plan_turns()
        self._waiting[go_on] = None

    def leave(self, name: ServicePortName, go_on: GoOn) -> None:
        """Do not call `go_on` any more, whether it waits or not."""
        self._waiting.pop(go_on, None)
        if name in self._accounts:
            self._accounts[name].waiting.pop(go_on, None)

    def reconfigure(self, max_connections: int, max_connections_per_service_port: int) -> None:
        """Use other limits from now on. Connections beyond a lower one stay."""
        self.max_connections = max_connections
        self.max_connections_per_service_port = max_connections_per_service_port
        for account in self._accounts.values():
            self._queue(account)
        if self._waiting:
            self._plan_turns()

    def shutdown(self) -> None:
        """Let nobody go on any more."""
        self._waiting.clear()
        for account in self._accounts.values():
            account.waiting.clear()
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _queue(self, account: _Account) -> None:
        self._waiting.update(account.waiting)
        account.waiting.clear()

    def _plan_turns(self) -> None:
        """Give turns outside of the caller's stack: one that goes on may cause the next release at once."""
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._give_turns)

    def _give_turns(self) -> None:
        self._next_turn = None
        while self._waiting and not (self.max_connections and self.open_connections >= self.max_connections):
            go_on, _ = self._waiting.popitem(last=False)
            self._is_turn = True
            try:
                go_on()
            finally:
                self._is_turn = False
