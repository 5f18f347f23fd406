"""The endpoints of one service port as the data path uses them: balancers, socket addresses, counters."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from userspace_proxy.core.balancer import Balancer
from userspace_proxy.core.counters import EndpointCounters, add_up
from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import Endpoint, IPFamily, ServicePort, ServicePortName, canonical_client
from userspace_proxy.dataplane.past import Past
from userspace_proxy.dataplane.sockets import SOCKET_FAMILY

_log = logging.getLogger(__name__)


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

    __slots__ = ("_balancers", "_cross_family", "_make_balancer", "_only", "_past", "_targets", "name")

    def __init__(self, name: ServicePortName, make_balancer: Callable[[], Balancer], *, cross_family: bool) -> None:
        self.name = name
        self._targets: dict[Endpoint, Target] = {}
        self._past: Past | None = None  # made when the first endpoint goes
        self._make_balancer = make_balancer
        self._balancers: dict[IPFamily, Balancer] = {}  # made when the first endpoint of a family appears
        self._cross_family = cross_family
        self._only: IPFamily | None = None  # the family whose endpoints serve the listeners of both

    def update(self, service_port: ServicePort) -> None:
        """Use the endpoints and the affinity of this service port from the next pick on."""
        before = self._targets
        self._targets = {endpoint: before.get(endpoint) or Target(endpoint) for endpoint in service_port.endpoints}
        self._retire([target for endpoint, target in before.items() if endpoint not in self._targets])
        families = {endpoint.family for endpoint in self._targets}
        for family in families | self._balancers.keys():
            self._update_balancer(family, service_port.session_affinity_s)
        self._only = families.pop() if len(families) == 1 and self._cross_family else None

    def pick(self, family: IPFamily, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Target:
        """Return the target for a client of a listener of this family.

        Raises NoEndpoints, also where a balancer of the user's own fails: then with a text that says so.
        """
        balancer = self._balancers.get(self._only or family)
        if balancer is None:
            raise NoEndpoints
        try:
            return self._targets[balancer.pick(canonical_client(client), now=now, tried=tried)]
        except NoEndpoints:
            raise
        except Exception as error:
            raise NoEndpoints(f"its balancer failed: {error!r}") from error

    def _update_balancer(self, family: IPFamily, session_affinity_s: float | None) -> None:
        """Pass the endpoints of a family on. A balancer that fails at it is dropped: its old endpoints are wrong."""
        of_family = [endpoint for endpoint in self._targets if endpoint.family is family]
        try:
            balancer = self._balancers.pop(family, None) or self._make_balancer()
            balancer.update(of_family, session_affinity_s)
        except Exception:
            _log.exception("%s (%s): its balancer could not take the endpoints", self.name, self.name.protocol)
        else:
            self._balancers[family] = balancer

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._targets

    def counters(self) -> dict[Endpoint, EndpointCounters]:
        """Return a reading of the counters of all present endpoints."""
        return {endpoint: target.counters() for endpoint, target in self._targets.items()}

    def total(self) -> EndpointCounters:
        """Return the totals over all endpoints, present and past."""
        present = add_up(target.counters() for target in self._targets.values())
        return add_up((present, self._past.total())) if self._past is not None else present

    def hand_over(self, past: Past) -> None:
        """Leave all that was counted to `past`, as the service port is being removed. Totals can still be read."""
        if self._past is not None:
            past.absorb(self._past)
        past.retire(self._targets.values())

    def _retire(self, targets: Sequence[Target]) -> None:
        if targets:
            self._past = self._past or Past()
            self._past.retire(targets)
