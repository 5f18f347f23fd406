"""The IP addresses of this host."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from pyroute2 import IPRoute

from userspace_proxy.core.model import IPFamily, family_of


@dataclass(frozen=True, slots=True, order=True)
class LocalAddress:
    """An address of an interface, in canonical form, with the length of its network's prefix."""

    address: str
    prefix_length: int
    interface: str

    @property
    def family(self) -> IPFamily:
        return family_of(self.address)

    @property
    def is_link_local(self) -> bool:
        return ip_address(self.address).is_link_local

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.address).is_loopback


async def local_addresses(family: IPFamily | None = None) -> tuple[LocalAddress, ...]:
    """Return the addresses of all interfaces, of one family or of both, sorted. Raises OSError.

    Asked in a thread: the library brings an event loop of its own.
    """
    found = await asyncio.to_thread(_read_addresses)
    return tuple(sorted(each for each in found if family in (None, each.family)))


def _read_addresses() -> list[LocalAddress]:
    with IPRoute() as kernel:
        return [
            LocalAddress(
                str(ip_address(message.get("IFA_LOCAL") or message.get("IFA_ADDRESS"))),
                message["prefixlen"],
                socket.if_indextoname(message["index"]),
            )
            for message in kernel.get_addr()
            if message["family"] in (socket.AF_INET, socket.AF_INET6)
        ]
