"""Addresses: parsing, free ports, clients in 127/8, and the guard that keeps load on this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.model import host_port

Address = tuple[str, int]

_FIRST_CLIENT = int(ipaddress.IPv4Address("127.1.0.1"))  # away from 127.0/16, where backends and services live
_PORT_ATTEMPTS = 100


def parse_address(text: str, *, names_allowed: bool = False) -> Address:
    """Return host and port of `HOST:PORT` or `[v6]:PORT`. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    if not names_allowed:
        try:
            host = str(ipaddress.ip_address(host))
        except ValueError:
            raise ConfigError(f"{host!r} is not an IP address") from None
    return host, int(port)


def resolve(text: str, *, allow_remote: bool) -> Address:
    """Return the address that `HOST:PORT` stands for.

    Raises ConfigError when it cannot be resolved, and when it leaves this machine although that was not allowed.
    """
    host, port = parse_address(text, names_allowed=True)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host!r} cannot be resolved: {error.strerror}") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not allow_remote:
        require_loopback(addresses)
    return addresses[0], port


def require_loopback(addresses: Iterable[str]) -> None:
    """Raise ConfigError for the first address that is not on this machine's loopback."""
    for address in addresses:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise ConfigError(
                f"{address} is not a loopback address. Load goes to other machines only with --allow-remote, "
                "and only to those that are yours"
            )


def clients_for(target: str, count: int) -> list[str]:
    """Return source addresses of so many clients for a target; empty where the system has to choose."""
    address = ipaddress.ip_address(target.partition("%")[0])
    if address.version != 4 or not address.is_loopback:
        return []
    return [str(ipaddress.IPv4Address(_FIRST_CLIENT + index)) for index in range(count)]


def free_port(host: str) -> int:
    """Return a port that nobody has on that address, neither TCP nor UDP. It may be taken a moment later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_PORT_ATTEMPTS):
        with socket.socket(family, socket.SOCK_STREAM) as tcp, socket.socket(family, socket.SOCK_DGRAM) as udp:
            tcp.bind((host, 0))
            port = int(tcp.getsockname()[1])
            try:
                udp.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port on {host}")


def text_of(address: Address) -> str:
    """Return `host:port`, IPv6 in brackets."""
    return host_port(*address)
