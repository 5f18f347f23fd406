"""`IP:port` and port ranges in the forms that kube-proxy's flags and file take."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

from userspace_proxy.core.addresses import parse_network
from userspace_proxy.core.model import IPFamily, host_port

PRIMARY: Final = "primary"
"""Stands for the node's own addresses in `nodePortAddresses`."""

_MAX_PORT = 65535


def is_address(text: str) -> bool:
    """Tell whether the text is an IP address and nothing else."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def family_of_cidr(text: str) -> IPFamily | None:
    """Return the family of a CIDR such as `10.0.0.0/8`, or None when it is none."""
    try:
        network = parse_network(text)
    except ValueError:
        return None
    return IPFamily(network.version) if text == text.strip() else None


def split_host_port(text: str) -> tuple[str, int]:
    """Return the two sides of `10.0.0.1:80` or `[fd00::1]:80`.

    Raises ValueError with two arguments: what is wrong, in kube-proxy's words, and the part that is.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not bracketed):
        raise ValueError("must be IP:port", text)
    host = host[1:-1] if bracketed else host
    if not is_address(host):
        raise ValueError("must be a valid IP", host)
    if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= _MAX_PORT):
        raise ValueError("must be a valid port", port)
    return host, int(port)


def with_port(text: str, port: int) -> str:
    """Return `IP:port` for a bare IP address. Anything else comes back as it is."""
    return host_port(text, port) if is_address(text) else text


def parse_port_range(text: str) -> range | None:
    """Return the ports of `A-B`, `A+offset` or `A`, both ends included; None, for `0` too, means any.

    Raises ValueError.
    """
    text = text.strip()
    first, sign, second = text.partition("-" if "-" in text else "+")
    if not text:
        return None
    if not all(part.isascii() and part.isdigit() for part in ((first, second) if sign else (first,))):
        raise ValueError(f"unable to parse port range: {text}")
    low, high = int(first[:6]), int(second[:6] or first[:6])
    if sign == "+":
        high += low
    if high < low:
        raise ValueError(f"end port cannot be less than start port: {text}")
    if high > _MAX_PORT:
        raise ValueError(f"the port range cannot be greater than {_MAX_PORT}: {text}")
    return range(low, high + 1) if low else None
