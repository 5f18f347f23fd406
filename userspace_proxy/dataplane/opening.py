"""Opens the listening sockets of a plan, apart from the data path that uses them: that may not be allowed to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import ListenAddress, ServicePortName
from userspace_proxy.core.plan import Listening
from userspace_proxy.dataplane.ports import bind

Opened = dict[ListenAddress, socket.socket]
"""The sockets of a service port by what was asked for."""

OpenSockets = Callable[[ServicePortName, Iterable[ListenAddress]], tuple[Opened, tuple[ListenFailed, ...]]]
"""Gives the sockets of a service port, and what was refused."""


def open_sockets(
    name: ServicePortName,
    addresses: Iterable[ListenAddress],
    *,
    proxy_ports: range | None,
    bound: Mapping[Listening, ListenAddress],
) -> tuple[Opened, tuple[ListenFailed, ...]]:
    """Open all of the addresses or none; held ones are added, each for itself. Return also what was refused.

    `bound` is what is listened on already. Where one of these is in the way, the failure names it.
    """
    addresses = list(addresses)
    opened, refused = _open_each(name, [each for each in addresses if not each.is_held], proxy_ports, bound)
    if refused:
        for sock in opened.values():
            sock.close()
        return {}, tuple(refused)
    held, refused = _open_each(name, [each for each in addresses if each.is_held], proxy_ports, bound)
    return {**opened, **held}, tuple(refused)


def by_name(listenings: Iterable[Listening]) -> Iterator[tuple[ServicePortName, list[ListenAddress]]]:
    """Yield the addresses of each service port."""
    grouped: dict[ServicePortName, list[ListenAddress]] = {}
    for name, address in listenings:
        grouped.setdefault(name, []).append(address)
    yield from grouped.items()


def _open_each(
    name: ServicePortName,
    addresses: Iterable[ListenAddress],
    proxy_ports: range | None,
    bound: Mapping[Listening, ListenAddress],
) -> tuple[Opened, list[ListenFailed]]:
    opened: Opened = {}
    refused: list[ListenFailed] = []
    for address in addresses:
        try:
            opened[address] = bind(address, name.protocol, proxy_ports)
        except ListenFailed as error:
            in_use = error.errno_name == "EADDRINUSE"
            refused.append(_name_the_owner(name, address, error, bound) if in_use else error)
    return opened, refused


def _name_the_owner(
    name: ServicePortName, address: ListenAddress, error: ListenFailed, bound: Mapping[Listening, ListenAddress]
) -> ListenFailed:
    """Return an error that names the other service port, where it is one of ours that has the address."""
    for (owner, _), taken in bound.items():
        if owner.protocol is name.protocol and taken.excludes(address):
            return ListenFailed(str(address), f"in use by {owner}", error.errno_name)
    return error
