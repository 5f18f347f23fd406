"""The endpoints of one service port as the data path uses them: balancers, socket addresses, counters."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from userspace_proxy.core.balancer import Balancer
from userspace_proxy.core.counters import EndpointCounters
from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import Endpoint, IPFamily, ServicePort, ServicePortName, canonical_client
from userspace_proxy.dataplane.sockets import SOCKET_FAMILY


class Tally:
    """A running count of bytes."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Target:
    """One endpoint of one service port, and what has been counted about it."""

    __slots__ = (
        "connections",
        "dial_failures",
        "endpoint",
        "open_connections",
        "open_sessions",
        "sessions",
        "socket_address",
        "socket_family",
        "to_client",
        "to_endpoint",
    )

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.socket_family: socket.AddressFamily = SOCKET_FAMILY[endpoint.family]
        self.socket_address = (endpoint.address, endpoint.port)
        self.connections = self.open_connections = self.dial_failures = 0
        self.sessions = self.open_sessions = 0
        self.to_endpoint = Tally()
        self.to_client = Tally()

    def counters(self) -> EndpointCounters:
        """Return a reading of the counters."""
        return EndpointCounters(
            connections=self.connections,
            open_connections=self.open_connections,
            dial_failures=self.dial_failures,
            sessions=self.sessions,
            open_sessions=self.open_sessions,
            bytes_to_endpoint=self.to_endpoint.bytes,
            bytes_to_client=self.to_client.bytes,
        )


class Backends:
    """Picks the endpoint for each new connection or session of one service port.

    Each address family has a balancer of its own, shared by all listeners that use it, so that turns stay exact. A
    listener's clients get endpoints of its family; with `cross_family`, those of the other one when it has none.
    """

    __slots__ = ("_balancers", "_cross_family", "_make_balancer", "_only", "_targets", "name")

    def __init__(self, name: ServicePortName, make_balancer: Callable[[], Balancer], *, cross_family: bool) -> None:
        self.name = name
        self._targets: dict[Endpoint, Target] = {}
        self._make_balancer = make_balancer
        self._balancers: dict[IPFamily, Balancer] = {}  # made when the first endpoint of a family appears
        self._cross_family = cross_family
        self._only: IPFamily | None = None  # the family whose endpoints serve the listeners of both

    def update(self, service_port: ServicePort) -> None:
        """Use the endpoints and the affinity of this service port from the next pick on."""
        self._targets = {
            endpoint: self._targets.get(endpoint) or Target(endpoint) for endpoint in service_port.endpoints
        }
        families = {endpoint.family for endpoint in self._targets}
        for family in families - self._balancers.keys():
            self._balancers[family] = self._make_balancer()
        for family, balancer in self._balancers.items():
            of_family = [endpoint for endpoint in self._targets if endpoint.family is family]
            balancer.update(of_family, service_port.session_affinity_s)
        self._only = families.pop() if len(families) == 1 and self._cross_family else None

    def pick(self, family: IPFamily, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Target:
        """Return the target for a client of a listener of this family. Raises NoEndpoints."""
        balancer = self._balancers.get(self._only or family)
        if balancer is None:
            raise NoEndpoints
        endpoint = balancer.pick(canonical_client(client), now=now, tried=tried)
        target = self._targets.get(endpoint)
        if target is None:  # a balancer of the user's own may answer with anything
            raise NoEndpoints
        return target

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._targets

    def counters(self) -> dict[Endpoint, EndpointCounters]:
        """Return a reading of the counters of all present endpoints."""
        return {endpoint: target.counters() for endpoint, target in self._targets.items()}
