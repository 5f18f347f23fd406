"""Portals: the addresses at which a service port is offered on this node, and the proxy ports behind them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from userspace_proxy.core.model import (
    WILDCARD,
    WILDCARDS,
    IPFamily,
    IPNetwork,
    L4Protocol,
    ListenAddress,
    Scope,
    ServicePort,
    ServicePortName,
    family_of,
)


@dataclass(frozen=True, slots=True, order=True)
class ProxyPortKey:
    """What one proxy port is for. Each address family and scope of a service port has a port of its own."""

    name: ServicePortName
    family: IPFamily
    scope: Scope = Scope.INTERNAL


ProxyPorts = Mapping[ProxyPortKey, int]


def proxy_port_keys(service_port: ServicePort, family: IPFamily) -> tuple[ProxyPortKey, ...]:
    """Return the proxy ports that a service port needs in a family: a second one where external traffic differs."""
    internal = ProxyPortKey(service_port.name, family)
    if service_port.external_endpoints is None:
        return (internal,)
    return internal, ProxyPortKey(service_port.name, family, Scope.EXTERNAL)


def proxy_port_of(service_port: ServicePort, family: IPFamily, scope: Scope, ports: ProxyPorts) -> int | None:
    """Return the proxy port for traffic of this scope; None while there is none, as when the range is exhausted."""
    if service_port.external_endpoints is None:
        scope = Scope.INTERNAL
    return ports.get(ProxyPortKey(service_port.name, family, scope))


Nodes = Mapping[IPFamily, "NodeFacts"]
"""This node, seen from each address family that it serves."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """This node, seen from one address family: the family of `node_ip`.

    `bind_address` is where proxy ports listen, the wildcard for everywhere. Node ports answer on the addresses of
    `node_port_networks`, which are of this family; None for all addresses. All addresses are in canonical form.
    """

    node_ip: str
    bind_address: str = ""
    node_port_networks: tuple[IPNetwork, ...] | None = None
    local_addresses: frozenset[str] = frozenset()

    @property
    def family(self) -> IPFamily:
        return family_of(self.node_ip)

    @property
    def binds_everywhere(self) -> bool:
        return self.bind_address in ("", *WILDCARDS)

    @property
    def proxy_address(self) -> str:
        """Where a proxy port can be reached for certain."""
        return self.node_ip if self.binds_everywhere else self.bind_address

    @property
    def node_port_destinations(self) -> tuple[IPNetwork | None, ...]:
        """The destinations for which node ports count. None stands for every address."""
        if self.node_port_networks is None:
            return (None,)
        return tuple(network if network.prefixlen else None for network in self.node_port_networks)


class PortalKind(enum.Enum):
    CLUSTER_IP = enum.auto()
    EXTERNAL_IP = enum.auto()
    LOAD_BALANCER_IP = enum.auto()

    @property
    def scope(self) -> Scope:
        return Scope.INTERNAL if self is PortalKind.CLUSTER_IP else Scope.EXTERNAL


@dataclass(frozen=True, slots=True)
class Portal:
    """An address of a service; the port is that of the service port."""

    address: str
    kind: PortalKind


def portals(service_port: ServicePort, family: IPFamily) -> Iterator[Portal]:
    """Yield the portals of one address family, each once. Node ports are none: they have no address of their own."""
    seen = set()
    for kind, addresses in (
        (PortalKind.CLUSTER_IP, service_port.cluster_ips),
        (PortalKind.EXTERNAL_IP, service_port.external_ips),
        (PortalKind.LOAD_BALANCER_IP, service_port.load_balancer_ips),
    ):
        for address in addresses:
            portal = Portal(address, kind)
            if family_of(address) is family and portal not in seen:
                seen.add(portal)
                yield portal


@dataclass(frozen=True, slots=True, order=True)
class HeldPort:
    """A port of this node that belongs to a service port, so that no other program may have it."""

    address: str
    port: int
    protocol: L4Protocol


def held_ports(service_port: ServicePort, node: NodeFacts) -> dict[HeldPort, Scope]:
    """Return the ports to hold on this node for a service port, with the traffic that reaches each.

    They are the node port, on each local address of `node_port_networks` or on the wildcard, and the
    portals whose address is local.
    """
    held = {}
    for portal in portals(service_port, node.family):
        if portal.address in node.local_addresses:
            held[HeldPort(portal.address, service_port.port, service_port.protocol)] = portal.kind.scope
    if service_port.node_port:
        for address in _node_port_addresses(node):
            held[HeldPort(address, service_port.node_port, service_port.protocol)] = Scope.EXTERNAL
    return held


def _node_port_addresses(node: NodeFacts) -> Iterator[str]:
    networks = node.node_port_destinations
    if None in networks:
        yield WILDCARD[node.family]
        return
    for address in sorted(node.local_addresses):
        if family_of(address) is node.family and any(
            network is not None and ip_address(address) in network for network in networks
        ):
            yield address


def listen_addresses(service_port: ServicePort, nodes: Nodes, *, holds_ports: bool = True) -> tuple[ListenAddress, ...]:
    """Return where a service port is listened on: its proxy ports, and the ports that are held for it.

    Without `holds_ports` there are none of the latter. A family counts in which the service has a cluster IP.
    """
    found = []
    for family, node in nodes.items():
        if any(family_of(address) is family for address in service_port.cluster_ips):
            bind_address = WILDCARD[family] if node.binds_everywhere else node.bind_address
            found += [ListenAddress(bind_address, 0, key.scope) for key in proxy_port_keys(service_port, family)]
            held_here = held_ports(service_port, node) if holds_ports else {}
            found += [ListenAddress(held.address, held.port, scope, is_held=True) for held, scope in held_here.items()]
    return tuple(found)


def proxy_ports(bound: Mapping[tuple[ServicePortName, ListenAddress], ListenAddress]) -> ProxyPorts:
    """Return the proxy ports among the addresses that are really listened on, by those asked for."""
    return {
        ProxyPortKey(name, asked.family, asked.scope): address.port
        for (name, asked), address in bound.items()
        if not asked.is_held
    }
