"""What is wrong with an object that someone wrote, field by field.

A file is held to what the API server would refuse. What it would let pass, such as a slice port without a number, is
left to `core.desired`, which skips it with a notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar, assert_never

from userspace_proxy.core.addresses import canonical_address, parse_network
from userspace_proxy.core.objects import (
    EndpointPort,
    Endpoints,
    EndpointSlice,
    EndpointsMetadata,
    KubernetesObject,
    Service,
    ServiceSpec,
)

_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_LABEL_RULE: Final = "lower-case letters, digits and '-', at most 63, letter or digit first and last"

MAX_AFFINITY_TIMEOUT_S: Final = 86400

ItemT = TypeVar("ItemT")


class Fault(NamedTuple):
    """A field that cannot be used, as a path such as `spec.ports[0].port`, and why."""

    field: str
    reason: str


def faults(each: KubernetesObject) -> Iterator[Fault]:
    """Yield what is wrong with an object, nothing when it can be used."""
    if not each.metadata.name:
        yield Fault("metadata.name", "missing")
    elif not (_LABEL if isinstance(each, Service) else _SUBDOMAIN).fullmatch(each.metadata.name):
        yield Fault("metadata.name", f"{each.metadata.name!r} is no DNS name: {_LABEL_RULE}")
    if each.metadata.namespace:
        yield from _name("metadata.namespace", each.metadata.namespace)
    match each:
        case Service():
            yield from _service(each)
        case EndpointSlice():
            yield from _slice(each)
        case Endpoints():
            yield from _endpoints(each)
        case EndpointsMetadata():  # comes from an API server alone
            return
        case _:
            assert_never(each)


def _service(service: Service) -> Iterator[Fault]:
    spec = service.spec
    yield from _one_of("spec.type", spec.type, ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"))
    if spec.cluster_ip != "None":
        yield from _address("spec.clusterIP", spec.cluster_ip)
    for path, address in _items("spec.clusterIPs", spec.cluster_ips):
        if address != "None":
            yield from _address(path, address)
    for path, address in _items("spec.externalIPs", spec.external_ips):
        yield from _address(path, address)
    for path, ingress in _items("status.loadBalancer.ingress", service.ingress):
        yield from _address(f"{path}.ip", ingress.ip)
    for path, network in _items("spec.loadBalancerSourceRanges", spec.load_balancer_source_ranges):
        yield from _network(path, network)
    yield from _affinity(spec)
    yield from _one_of("spec.internalTrafficPolicy", spec.internal_traffic_policy, ("Cluster", "Local"))
    yield from _one_of("spec.externalTrafficPolicy", spec.external_traffic_policy, ("Cluster", "Local"))
    yield from _port("spec.healthCheckNodePort", spec.health_check_node_port or None)
    if not (spec.ports or spec.type == "ExternalName" or spec.is_headless):
        yield Fault("spec.ports", "missing: a service has at least one")
    yield from _service_ports(spec)


def _service_ports(spec: ServiceSpec) -> Iterator[Fault]:
    names, numbers = set[tuple[str, str]](), set[tuple[int, str]]()
    for path, port in _items("spec.ports", spec.ports):
        protocol = port.protocol or "TCP"
        if port.port is None:
            yield Fault(f"{path}.port", "missing")
            continue
        yield from _port(f"{path}.port", port.port)
        yield from _port(f"{path}.nodePort", port.node_port or None)
        yield from _protocol(f"{path}.protocol", port.protocol)
        yield from _name(f"{path}.name", port.name)
        if (port.name or "", protocol) in names:
            yield Fault(f"{path}.name", f"a second {protocol} port with the name {port.name or ''!r}")
        if (port.port, protocol) in numbers:
            yield Fault(f"{path}.port", f"a second {protocol} port with the number {port.port}")
        names.add((port.name or "", protocol))
        numbers.add((port.port, protocol))


def _affinity(spec: ServiceSpec) -> Iterator[Fault]:
    yield from _one_of("spec.sessionAffinity", spec.session_affinity, ("None", "ClientIP"))
    timeout_s = spec.affinity_timeout_s
    if timeout_s is not None and not 1 <= timeout_s <= MAX_AFFINITY_TIMEOUT_S:
        field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        yield Fault(field, f"{_number(timeout_s)} is not in 1..{MAX_AFFINITY_TIMEOUT_S}")


def _slice(each: EndpointSlice) -> Iterator[Fault]:
    if not each.address_type:
        yield Fault("addressType", "missing: IPv4, IPv6 or FQDN")
    yield from _one_of("addressType", each.address_type, ("IPv4", "IPv6", "FQDN"))
    for path, endpoint in _items("endpoints", each.endpoints):
        for address_path, address in _items(f"{path}.addresses", endpoint.addresses):
            if each.address_type != "FQDN":
                yield from _address(address_path, address)
    yield from _endpoint_ports("ports", each.ports)


def _endpoints(each: Endpoints) -> Iterator[Fault]:
    for path, subset in _items("subsets", each.subsets):
        for address_path, address in _items(f"{path}.addresses", subset.addresses):
            yield from _address(f"{address_path}.ip", address.ip)
        yield from _endpoint_ports(f"{path}.ports", subset.ports)


def _endpoint_ports(field: str, ports: Iterable[EndpointPort] | None) -> Iterator[Fault]:
    for path, port in _items(field, ports):
        yield from _port(f"{path}.port", port.port or None)
        yield from _protocol(f"{path}.protocol", port.protocol)
        yield from _name(f"{path}.name", port.name)


def _items(field: str, items: Iterable[ItemT] | None) -> Iterator[tuple[str, ItemT]]:
    for index, item in enumerate(items or ()):
        yield f"{field}[{index}]", item


def _name(field: str, name: str | None) -> Iterator[Fault]:
    if name and not _LABEL.fullmatch(name):
        yield Fault(field, f"{name!r} is no DNS label: {_LABEL_RULE}")


def _protocol(field: str, protocol: str | None) -> Iterator[Fault]:
    yield from _one_of(field, protocol, ("TCP", "UDP", "SCTP"))


def _port(field: str, port: int | None) -> Iterator[Fault]:
    if port is not None and not 1 <= port <= 65535:
        yield Fault(field, f"{_number(port)} is not in 1..65535")


def _number(number: int) -> str:
    """Return a number for a message; one that would fill the screen, or that Python refuses to write, as a word."""
    return str(number) if abs(number) < 10**20 else "the number"


def _one_of(field: str, value: str | None, known: tuple[str, ...]) -> Iterator[Fault]:
    if value and value not in known:
        yield Fault(field, f"{value!r} is not one of {', '.join(known)}")


def _address(field: str, address: str | None) -> Iterator[Fault]:
    if address:
        try:
            canonical_address(address)
        except ValueError:
            yield Fault(field, f"{address!r} is no IP address")


def _network(field: str, network: str) -> Iterator[Fault]:
    try:
        parse_network(network)
    except ValueError:
        yield Fault(field, f"{network!r} is no network such as 192.0.2.0/24")
