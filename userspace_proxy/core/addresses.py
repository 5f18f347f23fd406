"""IP addresses and networks as Kubernetes accepts them, in the one form in which they are compared."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

from userspace_proxy.core.model import IPNetwork


@lru_cache(maxsize=1 << 16)
def canonical_address(text: str) -> str:
    """Return the canonical text of an IP address; an IPv4-mapped IPv6 address is the IPv4 address.

    Raises ValueError for anything else, a scope such as `%eth0` included.
    """
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"{text!r} has a scope")
        return str(address.ipv4_mapped or address)
    return str(address)


def canonical_client(address: str) -> str:
    """Return the address that stands for a client: in canonical form, and without a scope such as `%eth0`."""
    return canonical_address(address.partition("%")[0]) if ":" in address else address


def parse_network(text: str) -> IPNetwork:
    """Return the network of a CIDR such as `10.0.0.0/8`. Surrounding blanks and host bits are dropped.

    Raises ValueError when there is no prefix length, unlike `ip_network`, which also takes bare addresses and masks.
    """
    address, slash, prefix = text.strip().partition("/")
    if not (slash and prefix.isascii() and prefix.isdigit()):
        raise ValueError(f"{text!r} has no prefix length")
    return ip_network((address, int(prefix)), strict=False)
