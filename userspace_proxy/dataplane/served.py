"""What a worker has got from the process that accepts, as that process remembers it."""

from __future__ import annotations

from typing import NamedTuple

from userspace_proxy.dataplane.backends import Backends, Origin, Target


class Pending(NamedTuple):
    """A client that was given to a worker and is not on its way yet, or has come back."""

    served: Served
    origin: Origin
    client_fd: int
    client: str


class Served:
    """A target of which a worker has, or had a moment ago, clients."""

    __slots__ = ("backends", "clients", "is_recent", "number", "open_connections", "target")

    def __init__(self, number: int, backends: Backends, target: Target) -> None:
        self.number = number
        self.backends = backends
        self.target = target
        self.clients = 0
        self.open_connections = 0
        self.is_recent = True
