"""Binds listeners: at a fixed port, at any free one, or at a free one of the proxy port range."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import L4Protocol, ListenAddress
from userspace_proxy.dataplane.sockets import bind_udp, listen_tcp


def bind(address: ListenAddress, protocol: L4Protocol, proxy_ports: range | None = None) -> socket.socket:
    """Return a socket at the address, for TCP a listening one. Port 0 stands for a free port, out of `proxy_ports`.

    A port of the range is free when it can be bound: nothing is counted, so nothing leaks, and a port that somebody
    else took is passed over. The search begins anywhere. Raises ListenFailed, also when all are taken.
    """
    if address.port or proxy_ports is None:
        return _bind(address, protocol)
    first = random.randrange(len(proxy_ports))
    for port in (*proxy_ports[first:], *proxy_ports[:first]):
        try:
            return _bind(replace(address, port=port), protocol)
        except ListenFailed as error:
            if error.errno_name != "EADDRINUSE":
                raise
    raise ListenFailed(address.address, f"no remaining ports in {proxy_ports[0]}-{proxy_ports[-1]}", "EADDRINUSE")


def _bind(address: ListenAddress, protocol: L4Protocol) -> socket.socket:
    return listen_tcp(address) if protocol is L4Protocol.TCP else bind_udp(address)
