"""The nouns of the proxy: service ports, endpoints, listen addresses and snapshots. Immutable, compared by value."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address
from types import MappingProxyType

IPNetwork = IPv4Network | IPv6Network


class L4Protocol(enum.StrEnum):
    """The transport protocols that are proxied. Kubernetes also knows SCTP, which is not."""

    TCP = "TCP"
    UDP = "UDP"


class IPFamily(enum.IntEnum):
    """An address family, numbered as in `ipaddress`' `version`."""

    IPV4 = 4
    IPV6 = 6

    @property
    def other(self) -> IPFamily:
        return IPFamily.IPV6 if self is IPFamily.IPV4 else IPFamily.IPV4


WILDCARD = {IPFamily.IPV4: "0.0.0.0", IPFamily.IPV6: "::"}
"""The address that stands for all addresses of a family."""

WILDCARDS = frozenset(WILDCARD.values())


class Scope(enum.StrEnum):
    """Where traffic comes from. It matters only for services whose traffic policies differ."""

    INTERNAL = "internal"  # for a cluster IP
    EXTERNAL = "external"  # for a node port, or an external or load-balancer address


def family_of(address: str) -> IPFamily:
    """Return the family of a textual IP address. A colon decides, so the text must be a valid address."""
    return IPFamily.IPV6 if ":" in address else IPFamily.IPV4


def host_port(address: str, port: int) -> str:
    """Return `address:port` as people write it, IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@lru_cache(maxsize=1 << 16)
def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _check(address: str, port: int, *, lowest_port: int) -> None:
    """Raise ValueError for what no socket can take: the data path trusts its addresses."""
    if not _is_address(address):
        raise ValueError(f"{address!r} is no IP address")
    if not lowest_port <= port <= 65535:
        raise ValueError(f"{port} is not in {lowest_port}..65535")


@dataclass(frozen=True, slots=True, order=True)
class ServicePortName:
    """The identity of a service port.

    The protocol is part of it: a service may have 53/TCP and 53/UDP. Its text is kube-proxy's name, which has no
    protocol: `namespace/service:port`, or `namespace/service` where the port has no name.
    """

    namespace: str
    service: str
    port: str = ""
    protocol: L4Protocol = L4Protocol.TCP

    @property
    def service_name(self) -> str:
        """`namespace/service`"""
        return f"{self.namespace}/{self.service}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.service}:{self.port}" if self.port else f"{self.namespace}/{self.service}"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Where a backend answers: a textual IP address in canonical form and a port. Raises ValueError for others."""

    address: str
    port: int

    def __post_init__(self) -> None:
        _check(self.address, self.port, lowest_port=1)

    @property
    def family(self) -> IPFamily:
        return family_of(self.address)

    def __str__(self) -> str:
        return host_port(self.address, self.port)


@dataclass(frozen=True, slots=True, order=True)
class ListenAddress:
    """Where traffic for a service port is accepted. Port 0 asks for a free port, any or out of the proxy port range.

    A held address is one that must not go to another program, such as a node port. The service port is listened on
    without it where it cannot be had, while of the other addresses it is all or none.
    Raises ValueError for what is no IP address or no port.
    """

    address: str
    port: int
    scope: Scope = Scope.INTERNAL
    is_held: bool = False

    def __post_init__(self) -> None:
        _check(self.address, self.port, lowest_port=0)

    @property
    def family(self) -> IPFamily:
        return family_of(self.address)

    def excludes(self, other: ListenAddress) -> bool:
        """Tell whether no two sockets of one protocol can have both: a wildcard has all addresses of its family."""
        overlaps = self.address == other.address or not WILDCARDS.isdisjoint((self.address, other.address))
        return self.port == other.port and self.family is other.family and overlaps

    def __str__(self) -> str:
        return host_port(self.address, self.port)


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port of one service with everything that decides how its traffic is handled.

    `endpoints` are those to use for traffic from inside the cluster, in any order, without duplicates. For traffic
    from outside (node ports, external and load-balancer addresses) `external_endpoints` count where they differ,
    which is where a traffic policy is `Local`.
    `local_scopes` names the traffic for which only endpoints of this node count, by a policy `Local`.
    `session_affinity_s` is the idle time-out of client-IP affinity in seconds; None means no affinity.
    `listen` says where the data path accepts connections for it; each address is a listener of its own.
    `wakes_on_connect`: where there is no endpoint, clients wait for one while pods are asked for.
    """

    name: ServicePortName
    port: int
    endpoints: tuple[Endpoint, ...] = ()
    external_endpoints: tuple[Endpoint, ...] | None = None
    session_affinity_s: float | None = None
    listen: tuple[ListenAddress, ...] = ()
    cluster_ips: tuple[str, ...] = ()
    external_ips: tuple[str, ...] = ()
    load_balancer_ips: tuple[str, ...] = ()
    load_balancer_source_ranges: tuple[IPNetwork, ...] = ()
    node_port: int = 0
    health_check_node_port: int = 0
    local_scopes: frozenset[Scope] = frozenset()
    wakes_on_connect: bool = False

    @property
    def is_idled(self) -> bool:
        """Tell whether it has no endpoint at all, and the first client is to bring that about."""
        return self.wakes_on_connect and not self.endpoints and not self.external_endpoints

    @property
    def protocol(self) -> L4Protocol:
        return self.name.protocol

    def lacks_local_endpoints(self, scope: Scope) -> bool:
        """Tell whether traffic of this scope is for endpoints of this node alone, and there are none."""
        if scope not in self.local_scopes:
            return False
        is_outside = scope is Scope.EXTERNAL and self.external_endpoints is not None
        return not (self.external_endpoints if is_outside else self.endpoints)


_NOTHING: Mapping[ServicePortName, ServicePort] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All service ports at one moment. Equal snapshots mean equal traffic handling."""

    service_ports: Mapping[ServicePortName, ServicePort] = field(default_factory=lambda: _NOTHING)

    @classmethod
    def of(cls, *service_ports: ServicePort) -> Snapshot:
        """Return the snapshot of these service ports. Raises ValueError when two share a name."""
        by_name = {service_port.name: service_port for service_port in service_ports}
        if len(by_name) != len(service_ports):
            raise ValueError("two service ports have the same name and protocol")
        return cls(MappingProxyType(by_name))
