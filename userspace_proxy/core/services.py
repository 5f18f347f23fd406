"""What a Service asks for, one service port at a time. Endpoints are joined later, in `core.desired`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from userspace_proxy.core.addresses import canonical_address, parse_network
from userspace_proxy.core.endpoints import Skip
from userspace_proxy.core.model import IPNetwork, L4Protocol, ServicePort, ServicePortName
from userspace_proxy.core.objects import Service, ServicePortSpec

DEFAULT_AFFINITY_TIMEOUT_S = 10800.0


def is_proxied(service: Service, *, serve_without_cluster_ip: bool) -> bool:
    """Whether traffic to the service is ours: not headless, not ExternalName, and with a cluster IP unless waived."""
    if service.spec.type == "ExternalName" or service.spec.is_headless:
        return False
    return serve_without_cluster_ip or bool(service.spec.all_cluster_ips)


def service_ports(service: Service, skip: Skip) -> Iterator[ServicePort]:
    """Yield the ports of a service, without endpoints. What cannot be used is left out and told to `skip`."""
    spec = service.spec
    balancer_ips = _addresses((each.ip for each in service.ingress if each.ip_mode != "Proxy"), "ingress IP", skip)
    ranges = _networks(spec.load_balancer_source_ranges or (), skip)
    if spec.load_balancer_source_ranges and balancer_ips and not ranges:
        skip("none of the load-balancer source ranges can be used: nobody may reach the load-balancer IPs")
        balancer_ips = ()
    cluster_ips = _addresses(spec.all_cluster_ips, "cluster IP", skip)
    external_ips = _addresses(spec.external_ips or (), "external IP", skip)
    for name, port in _usable_ports(service, skip):
        yield ServicePort(
            name,
            port.port or 0,
            session_affinity_s=_affinity_s(service),
            cluster_ips=cluster_ips,
            external_ips=external_ips,
            load_balancer_ips=balancer_ips,
            load_balancer_source_ranges=ranges,
            node_port=port.node_port or 0,
            health_check_node_port=_health_check_node_port(service),
        )


def _usable_ports(service: Service, skip: Skip) -> Iterator[tuple[ServicePortName, ServicePortSpec]]:
    seen = set[ServicePortName]()
    for port in service.spec.ports or ():
        label = f"port {port.name or port.port}"
        protocol = L4Protocol.__members__.get(port.protocol or "TCP")
        if protocol is None:
            skip(f"{label}: {port.protocol} is not proxied: skipped")
            continue
        name = ServicePortName(*service.key, port.name or "", protocol)
        if port.port is None or not 1 <= port.port <= 65535:
            skip(f"{label}: {port.port} is no port number: skipped")
        elif name in seen:
            skip(f"{label}: its name and protocol are taken by an earlier port: skipped")
        else:
            seen.add(name)
            yield name, port


def _affinity_s(service: Service) -> float | None:
    if service.spec.session_affinity != "ClientIP":
        return None
    timeout_s = service.spec.affinity_timeout_s
    return float(timeout_s) if timeout_s and timeout_s > 0 else DEFAULT_AFFINITY_TIMEOUT_S


def _health_check_node_port(service: Service) -> int:
    spec = service.spec
    is_checked = spec.type == "LoadBalancer" and spec.external_traffic_policy == "Local"
    return (spec.health_check_node_port or 0) if is_checked else 0


def _addresses(texts: Iterable[str | None], label: str, skip: Skip) -> tuple[str, ...]:
    """Return canonical addresses in the order given, each once. Absent ones are no fault: an ingress may be a name."""
    addresses = dict[str, None]()
    for text in texts:
        if text:
            try:
                addresses[canonical_address(text)] = None
            except ValueError:
                skip(f"{label} {text!r} is no IP address: skipped")
    return tuple(addresses)


def _networks(texts: Iterable[str], skip: Skip) -> tuple[IPNetwork, ...]:
    networks = dict[IPNetwork, None]()
    for text in texts:
        try:
            networks[parse_network(text)] = None
        except ValueError:
            skip(f"load-balancer source range {text!r} is no network: skipped")
    return tuple(networks)
