"""The endpoints of one service port as the data path uses them: balancers, socket addresses, counters."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence

from userspace_proxy.core.addresses import canonical_client
from userspace_proxy.core.balancer import Balancer
from userspace_proxy.core.counters import EndpointCounters, add_up
from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import Endpoint, IPFamily, Scope, ServicePort, ServicePortName
from userspace_proxy.dataplane.past import Past
from userspace_proxy.dataplane.sockets import SOCKET_FAMILY

_log = logging.getLogger(__name__)


Origin = tuple[Scope, IPFamily]
"""What decides, beside the service port, which endpoints a listener's clients get."""


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
        "name",
        "open_connections",
        "open_sessions",
        "sessions",
        "socket_address",
        "socket_family",
        "to_client",
        "to_endpoint",
    )

    def __init__(self, name: ServicePortName, endpoint: Endpoint) -> None:
        self.name = name
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
    listener's clients get endpoints of its family; with `cross_family`, those of the other one when it has none, or
    none that can be reached. Traffic from outside has balancers of its own where its endpoints are others.
    """

    __slots__ = (
        "_balancers",
        "_cross_family",
        "_external",
        "_internal",
        "_make_balancer",
        "_past",
        "_targets",
        "is_idled",
        "name",
    )

    def __init__(self, name: ServicePortName, make_balancer: Callable[[], Balancer], *, cross_family: bool) -> None:
        self.name = name
        self.is_idled = False
        self._make_balancer = make_balancer
        self._cross_family = cross_family
        self._internal: tuple[Endpoint, ...] = ()
        self._external: tuple[Endpoint, ...] | None = None  # None: as for internal traffic
        self._targets: dict[Endpoint, Target] = {}
        self._balancers: dict[Origin, Balancer] = {}  # made when the first endpoint of a family appears
        self._past: Past | None = None  # made when the first endpoint goes

    def update(self, service_port: ServicePort) -> None:
        """Use the endpoints and the affinity of this service port from the next pick on."""
        self._internal, self._external = service_port.endpoints, service_port.external_endpoints
        self.is_idled = service_port.is_idled
        before = self._targets
        endpoints = dict.fromkeys((*self._internal, *(self._external or ())))
        self._targets = {endpoint: before.get(endpoint) or Target(self.name, endpoint) for endpoint in endpoints}
        self._retire([target for endpoint, target in before.items() if endpoint not in self._targets])
        before_balancers, self._balancers = self._balancers, {}
        for scope, of_scope in ((Scope.INTERNAL, self._internal), (Scope.EXTERNAL, self._external or ())):
            for family in {endpoint.family for endpoint in of_scope}:
                of_family = [endpoint for endpoint in of_scope if endpoint.family is family]
                balancer = before_balancers.get((scope, family))
                self._update_balancer((scope, family), balancer, of_family, service_port.session_affinity_s)

    def pick(self, origin: Origin, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Target:
        """Return the target for a client of a listener of this scope and family.

        Raises NoEndpoints, also where a balancer of the user's own fails: then with a text that says so.
        """
        scope, family = origin
        if self._external is None:
            scope = Scope.INTERNAL
        balancer = self._balancers.get((scope, family))
        if self._cross_family and (balancer is None or (tried and self._were_all_tried(family, tried))):
            balancer = self._balancers.get((scope, family.other), balancer)
        if balancer is None:
            raise NoEndpoints
        try:
            return self._targets[balancer.pick(canonical_client(client), now=now, tried=tried)]
        except NoEndpoints:
            raise
        except Exception as error:
            raise NoEndpoints(f"its balancer failed: {error!r}") from error

    @property
    def targets(self) -> Mapping[Endpoint, Target]:
        """The targets of the present endpoints."""
        return self._targets

    def serves(self, origin: Origin, endpoint: Endpoint) -> bool:
        """Tell whether the endpoint still is one for traffic of this origin."""
        if self._external is None:
            return endpoint in self._targets
        return endpoint in (self._internal if origin[0] is Scope.INTERNAL else self._external)

    def _were_all_tried(self, family: IPFamily, tried: Sequence[Endpoint]) -> bool:
        """Tell whether it is the other family's turn, as for a server that has but one address of `localhost`."""
        return all(endpoint in tried for endpoint in self._targets if endpoint.family is family)

    def _update_balancer(
        self, origin: Origin, balancer: Balancer | None, endpoints: Sequence[Endpoint], session_affinity_s: float | None
    ) -> None:
        """Pass the endpoints of a family on. A balancer that fails at it is dropped: its old endpoints are wrong."""
        try:
            balancer = balancer or self._make_balancer()
            balancer.update(endpoints, session_affinity_s)
        except Exception:
            _log.exception("%s (%s): its balancer could not take the endpoints", self.name, self.name.protocol)
        else:
            self._balancers[origin] = balancer

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
