"""Datagrams that are kept for clients of an idled service port: the last ones of each, until there are endpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from userspace_proxy.core.model import ServicePortName
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.mmsg import ClientAddress
from userspace_proxy.dataplane.packet_info import ControlMessage

_MAX_DATAGRAMS = 16
_MAX_BYTES = 64 << 10  # the largest datagram is a bit smaller, so that one fits always

Forward = Callable[[ClientAddress, ControlMessage | None, bytes], None]
Key = tuple[ClientAddress, ControlMessage | None]


class KeptDatagrams:
    """The clients of one listener whose datagrams are kept. `forward` takes a datagram as if it had come just now."""

    def __init__(self, engine: Engine, name: ServicePortName, forward: Forward) -> None:
        self.engine = engine
        self.name = name
        self.forward = forward
        self.clients: dict[Key, HeldClient] = {}

    def keep(self, client: ClientAddress, reply_from: ControlMessage | None, data: bytes) -> bool:
        """Keep a datagram until there are endpoints. Return False where it is to be dropped."""
        held = self.clients.get((client, reply_from)) or HeldClient(self, client, reply_from)
        held.add(data)
        return self.engine.waiting.hold(held)

    def drop_all(self) -> None:
        """Drop all that is kept."""
        for held in list(self.clients.values()):
            self.engine.waiting.leave(held)


class HeldClient:
    """The place of a client in the waiting room, and its last datagrams."""

    __slots__ = ("_bytes", "_datagrams", "_kept", "_key", "name", "since_s")

    def __init__(self, kept: KeptDatagrams, client: ClientAddress, reply_from: ControlMessage | None) -> None:
        self.name = kept.name
        self.since_s = kept.engine.loop.time()
        self._kept = kept
        self._key = (client, reply_from)
        self._datagrams: deque[bytes] = deque()
        self._bytes = 0

    def add(self, data: bytes) -> None:
        """Keep another datagram; the oldest ones are dropped when there are too many, or too large ones."""
        self._datagrams.append(data)
        self._bytes += len(data)
        while len(self._datagrams) > _MAX_DATAGRAMS or self._bytes > _MAX_BYTES:
            self._bytes -= len(self._datagrams.popleft())
            self._kept.engine.dropped_datagrams += 1

    def wait(self) -> None:
        """Be known to the listener, so that further datagrams come here."""
        self._kept.clients[self._key] = self

    def has_left(self) -> bool:
        """Tell that the client waits: there is no way to know."""
        return False

    def go_on(self) -> None:
        """Pass the datagrams on, in order."""
        self._kept.clients.pop(self._key, None)
        for data in self._datagrams:
            self._kept.forward(*self._key, data)

    def cancel(self) -> None:
        """Drop the datagrams."""
        self._kept.clients.pop(self._key, None)
        self._kept.engine.dropped_datagrams += len(self._datagrams)
