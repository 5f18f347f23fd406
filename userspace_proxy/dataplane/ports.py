"""The ports that the proxy takes on this node: proxy ports out of a range, and held ports that others must not have.

Sockets are bound here and handed over; what listens on them is no concern of this module.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from userspace_proxy.core.errors import ListenFailed, PortsExhausted
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePortName
from userspace_proxy.core.portals import HeldPort
from userspace_proxy.dataplane.sockets import bind_udp, listen_tcp

Bind = Callable[[ListenAddress, L4Protocol], socket.socket]


def bind(address: ListenAddress, protocol: L4Protocol) -> socket.socket:
    """Return a socket at the address: a listening one for TCP. Raises ListenFailed."""
    return listen_tcp(address) if protocol is L4Protocol.TCP else bind_udp(address)


class ProxyPortAllocator:
    """Binds proxy ports within a range, or any free ones where there is no range.

    A port is free when it can be bound: nothing is counted, so nothing leaks, and a port that somebody else took is
    just passed over. The search begins at a port chosen by `rng`, so that a restart does not reuse ports in order.
    """

    def __init__(self, ports: range | None, rng: random.Random, bind: Bind = bind) -> None:
        self._ports, self._rng, self._bind = ports, rng, bind

    def take(self, address: str, protocol: L4Protocol) -> socket.socket:
        """Return a socket at a free port of the range.

        Raises PortsExhausted when all are taken, ListenFailed when the system refuses for another reason.
        """
        if self._ports is None:
            return self._bind(ListenAddress(address, 0), protocol)
        begin = self._rng.randrange(len(self._ports))
        for offset in range(len(self._ports)):
            port = self._ports[(begin + offset) % len(self._ports)]
            try:
                return self._bind(ListenAddress(address, port), protocol)
            except ListenFailed as error:
                if error.errno_name != "EADDRINUSE":
                    raise
        raise PortsExhausted(f"no remaining ports in {self._ports[0]}-{self._ports[-1]} at {address}/{protocol}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A port that could not be held, and why: `owner` is the service port that has it, None if it is a stranger."""

    port: HeldPort
    wanted_by: ServicePortName
    reason: str
    owner: ServicePortName | None = None

    def __str__(self) -> str:
        where = f"{ListenAddress(self.port.address, self.port.port)}/{self.port.protocol}"
        taken = f"is held by {self.owner}" if self.owner else f"cannot be held: {self.reason}"
        return f"{where}, which {self.wanted_by} wants, {taken}"


@dataclass(frozen=True, slots=True)
class HoldChange:
    """What a call of `hold` changed. `claimed` are sockets to serve from now on, `released` are closed."""

    claimed: Mapping[HeldPort, socket.socket] = field(default_factory=dict)
    released: tuple[HeldPort, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class HeldPorts:
    """The ports of this node that service ports own: node ports, and portals at local addresses.

    Who came first keeps a port. The other is refused until it is released, and gets it at the next `hold`; likewise
    a port that a foreign program has. The sockets are open while they are held, and whoever serves them borrows them.
    """

    def __init__(self, bind: Bind = bind) -> None:
        self._bind = bind
        self._held: dict[HeldPort, tuple[ServicePortName, socket.socket]] = {}

    def owner(self, port: HeldPort) -> ServicePortName | None:
        """Return who holds a port: itself, or one that excludes it, as the wildcard excludes each single address."""
        held = self._held.get(port)
        if held:
            return held[0]
        address = ListenAddress(port.address, port.port)
        for other, (owner, _) in self._held.items():
            if other.protocol is port.protocol and ListenAddress(other.address, other.port).excludes(address):
                return owner
        return None

    def hold(self, wanted: Mapping[ServicePortName, Collection[HeldPort]]) -> HoldChange:
        """Hold these ports and no others. What is no longer wanted is released first: a node port is a fixed number."""
        released = [port for port, (owner, _) in self._held.items() if port not in wanted.get(owner, ())]
        for port in released:
            self._held.pop(port)[1].close()
        claimed: dict[HeldPort, socket.socket] = {}
        refusals: list[Refusal] = []
        for name, ports in wanted.items():
            for port in ports:
                if (owner := self.owner(port)) is not None:
                    if owner != name:
                        refusals.append(Refusal(port, name, "", owner))
                    continue
                try:
                    sock = self._bind(ListenAddress(port.address, port.port), port.protocol)
                except ListenFailed as error:
                    refusals.append(Refusal(port, name, error.reason))
                else:
                    claimed[port] = sock
                    self._held[port] = (name, sock)
        return HoldChange(claimed, tuple(released), tuple(refusals))

    def close(self) -> None:
        """Release all ports."""
        self.hold({})
