"""Service ports on this machine: which of them, on which local addresses and ports, with which endpoints by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from userspace_proxy.core.addresses import canonical_address
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.model import (
    Endpoint,
    L4Protocol,
    ListenAddress,
    ServicePort,
    ServicePortName,
    Snapshot,
    host_port,
)

DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class PortReference:
    """How a person points at service ports: `NAMESPACE/SERVICE:PORT/PROTOCOL`.

    The port is a name or a number; without it, the service's only port is meant. Without a protocol, any.
    """

    namespace: str
    service: str
    port: str = ""
    protocol: L4Protocol | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[NAMESPACE/]SERVICE[:PORT[/udp]]`. Raises ConfigError."""
        service_name, _, port = text.partition(":")
        namespace, slash, service = service_name.rpartition("/")
        port, _, protocol = port.partition("/")
        if not service or (slash and not namespace) or "/" in namespace:
            raise ConfigError(f"{text!r} is not NAMESPACE/SERVICE[:PORT[/udp]]")
        if protocol.upper() not in ("", *L4Protocol):
            raise ConfigError(f"{protocol!r} is not a protocol that can be proxied: tcp or udp")
        return cls(namespace or DEFAULT_NAMESPACE, service, port, L4Protocol(protocol.upper()) if protocol else None)

    @classmethod
    def to(cls, service_port: ServicePort) -> Self:
        """Return the shortest reference that points at this service port alone."""
        name = service_port.name
        protocol = None if name.protocol is L4Protocol.TCP else name.protocol
        return cls(name.namespace, name.service, name.port or str(service_port.port), protocol)

    def matches(self, service_port: ServicePort) -> bool:
        """Tell whether it points at this service port. Without a port, at every port of the service."""
        name = service_port.name
        return (
            (name.namespace, name.service) == (self.namespace, self.service)
            and self.port in ("", name.port, str(service_port.port))
            and self.protocol in (None, name.protocol)
        )

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        protocol = f"/{self.protocol.lower()}" if self.protocol else ""
        return f"{self.namespace}/{self.service}{port}{protocol}"


@dataclass(frozen=True, slots=True)
class HostPort:
    """An endpoint as a person writes it. `host` may be a name, which has yet to be resolved."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT`, an IPv6 address in brackets. Raises ConfigError."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = _canonical(host[1:-1]) or ""
        elif ":" in host:
            raise ConfigError(f"{text!r}: an IPv6 address stands in brackets, as in [::1]:8080")
        if not colon or not host or any(character.isspace() or character == "/" for character in host):
            raise ConfigError(f"{text!r} is not HOST:PORT")
        return cls(_canonical(host) or host, parse_port(port))

    @property
    def is_address(self) -> bool:
        """Tell whether the host is an IP address already."""
        return _canonical(self.host) is not None

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_port(text: str) -> int:
    """Return a port number from 1 to 65535. Raises ConfigError."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65535):
        raise ConfigError(f"{text!r} is not a port number from 1 to 65535")
    return int(text)


def parse_service(text: str) -> ServicePort:
    """Return the service port, without endpoints, that `[NAMESPACE/]NAME:PORT[/udp]` describes. Raises ConfigError."""
    reference = PortReference.parse(text)
    name = ServicePortName(reference.namespace, reference.service, "", reference.protocol or L4Protocol.TCP)
    return ServicePort(name, parse_port(reference.port))


def select(snapshot: Snapshot, *, namespaces: Collection[str] = (), only: Collection[str] = ()) -> Snapshot:
    """Return the service ports of these namespaces and of these services (`NAMESPACE/SERVICE`), by name.

    Empty means all.
    """
    return _snapshot(
        service_port
        for name, service_port in sorted(snapshot.service_ports.items())
        if (not namespaces or name.namespace in namespaces) and (not only or name.service_name in only)
    )


def with_services(snapshot: Snapshot, service_ports: Iterable[ServicePort]) -> Snapshot:
    """Add service ports; one that is there already is replaced."""
    return _snapshot([*snapshot.service_ports.values(), *service_ports])


def with_endpoints(snapshot: Snapshot, endpoints: Mapping[PortReference, Sequence[Endpoint]]) -> Snapshot:
    """Replace the endpoints of the service ports that are pointed at."""
    return _snapshot(_with_endpoints(port, endpoints) for port in snapshot.service_ports.values())


def place(
    snapshot: Snapshot,
    *,
    listen_addresses: Sequence[str],
    port_map: Mapping[PortReference, int],
    chosen_ports: Mapping[ServicePortName, int],
) -> Snapshot:
    """Let each service port listen on all `listen_addresses`, at its own port number unless told otherwise.

    `chosen_ports` wins over `port_map`.
    """

    def local_port(service_port: ServicePort) -> int:
        if service_port.name in chosen_ports:
            return chosen_ports[service_port.name]
        mapped = [port for reference, port in port_map.items() if reference.matches(service_port)]
        return mapped[-1] if mapped else service_port.port

    return _snapshot(
        replace(port, listen=tuple(ListenAddress(address, local_port(port)) for address in listen_addresses))
        for port in snapshot.service_ports.values()
    )


def unmatched(snapshot: Snapshot, references: Iterable[PortReference]) -> list[tuple[PortReference, str]]:
    """Return the references that point at nothing, or at several ports without naming one, each with the reason."""
    problems = []
    for reference in references:
        ports = [port for port in snapshot.service_ports.values() if reference.matches(port)]
        if not ports:
            of_service = [
                port.name.port or str(port.port)
                for name, port in snapshot.service_ports.items()
                if (name.namespace, name.service) == (reference.namespace, reference.service)
            ]
            reason = f"its ports are {', '.join(of_service)}" if of_service else "there is no such service"
            problems.append((reference, reason))
        elif not reference.port and len({port.port for port in ports}) > 1:
            names = ", ".join(port.name.port or str(port.port) for port in ports)
            problems.append((reference, f"it has several ports, say which: {names}"))
    return problems


def _with_endpoints(port: ServicePort, endpoints: Mapping[PortReference, Sequence[Endpoint]]) -> ServicePort:
    for reference, given in endpoints.items():
        if reference.matches(port):
            port = replace(port, endpoints=tuple(given))
    return port


def _snapshot(service_ports: Iterable[ServicePort]) -> Snapshot:
    return Snapshot(MappingProxyType({service_port.name: service_port for service_port in service_ports}))


def _canonical(address: str) -> str | None:
    """Return the canonical form of an IP address, or None when the text is none."""
    try:
        return canonical_address(address)
    except ValueError:
        return None
