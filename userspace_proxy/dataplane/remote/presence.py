"""What a data process has when it is met, as it tells of it bit by bit."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from userspace_proxy.core.model import ListenAddress, ServicePortName
from userspace_proxy.core.plan import Listening
from userspace_proxy.dataplane.remote.messages import Present


@dataclass(slots=True)
class Presence:
    """Service ports, and listeners with a copy of the socket of each."""

    names: set[ServicePortName] = field(default_factory=set)
    bound: dict[Listening, ListenAddress] = field(default_factory=dict)
    sockets: dict[Listening, socket.socket] = field(default_factory=dict)
    lost: list[Listening] = field(default_factory=list)
    """Listeners whose sockets could not be received, for want of descriptors."""

    counted_before: list[bytes] = field(default_factory=list)
    """What the data processes before it had counted, as a former control process has told it."""

    def add(self, present: Present, fds: Sequence[int]) -> None:
        """Take in a part of what is told."""
        self.names.update(present.names)
        for listening, bound, fd in zip(present.open, present.bound, fds, strict=False):
            self.bound[listening] = bound
            self.sockets[listening] = socket.socket(fileno=fd)
        self.lost += present.open[len(fds) :]

    def close_sockets(self) -> None:
        """Close the copies."""
        for sock in self.sockets.values():
            sock.close()
