"""UDP service ports that workers serve, each one wholly: its sockets, its sessions, its turn and its affinity.

The sockets stay open here, unread, so that the worker that takes another one's place gets them again, with the
datagrams that came meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.dataplane.backends import Backends, Target
from userspace_proxy.dataplane.handover import (
    CloseDatagrams,
    DatagramRow,
    ForgetDatagrams,
    ListenForDatagrams,
    UpdateDatagrams,
)
from userspace_proxy.dataplane.sockets import bound_address
from userspace_proxy.dataplane.worker_link import WorkerLink


@dataclass(slots=True, eq=False)
class _Port:
    """A UDP service port, and the worker that serves it."""

    link: WorkerLink
    service_port: ServicePort
    present: Mapping[Endpoint, Target] = field(default_factory=dict)
    targets: Mapping[Endpoint, Target] = field(default_factory=dict)  # also those of which the worker may still report
    sockets: dict[ListenAddress, socket.socket] = field(default_factory=dict)
    open_sessions: dict[Target, int] = field(default_factory=dict)


class RemoteListener:
    """A bound socket of a UDP service port that a worker serves."""

    def __init__(self, address: ListenAddress, sock: socket.socket, close: Callable[[], None]) -> None:
        self.address = address
        self.fileno = sock.fileno
        """Return the descriptor of this process for it."""
        self.close = close
        """Stop listening. The worker does so a moment later."""


class RemoteDatagrams:
    """Which worker serves which UDP service port."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.sent = 0
        """How many messages about service ports there were."""
        self.have_shares_changed = False
        """Whether workers have to be told of other shares, since this was set to False."""
        self._settled = 0
        self._placed = Counter(dict.fromkeys(links, 0))  # service ports of each worker
        self._ports: dict[ServicePortName, _Port] = {}
        self._updated: dict[ServicePortName, int] = {}  # which messages that were, until they are settled
        self._gone: dict[ServicePortName, int] = {}

    @property
    def is_settled(self) -> bool:
        """Tell whether the workers have done what they were sent."""
        return self._settled == self.sent

    def share(self, link: WorkerLink, capacity: int) -> int:
        """Return how many of all sessions that there may be this worker may have: by its service ports."""
        parts, of_all = (self._placed[link], len(self._ports)) if self._ports else (1, len(self._placed))
        return max(1, capacity * parts // of_all)

    def update(self, service_port: ServicePort, backends: Backends) -> None:
        """Let a worker use these endpoints: the same as before, or for a new service port the one with the fewest."""
        port = self._ports.get(service_port.name)
        if port is None:
            link = min(self._placed, key=lambda each: (each.is_stuck, self._placed[each]))
            port = self._ports[service_port.name] = _Port(link, service_port)
            self._placed[link] += 1
            self.have_shares_changed = True
        self._gone.pop(service_port.name, None)
        port.service_port = service_port
        port.targets = {**port.targets, **backends.targets}
        port.present = backends.targets
        self._send(port, UpdateDatagrams.of(service_port))
        self._updated[service_port.name] = self.sent

    def listen(self, name: ServicePortName, asked: ListenAddress, sock: socket.socket) -> RemoteListener:
        """Let the worker of the service port serve the clients of a bound socket, which is taken over."""
        port = self._ports[name]
        port.sockets[asked] = sock
        self._send(port, ListenForDatagrams(name, asked), os.dup(sock.fileno()))
        return RemoteListener(bound_address(sock, asked), sock, lambda: self._close(name, asked))

    def forget(self, name: ServicePortName) -> None:
        """The service port is gone. What the worker has counted is still to come."""
        if name in self._ports:
            self._send(self._ports[name], ForgetDatagrams(name))
            self._gone[name] = self.sent

    def note_settled(self, sent: int, links: Collection[WorkerLink]) -> None:
        """These workers, all but stuck ones, have done and reported what they were sent until so many messages."""
        self._settled = max(self._settled, sent)
        for name in self._of(self._updated, sent, links):
            del self._updated[name]
            self._ports[name].targets = self._ports[name].present
        for name in self._of(self._gone, sent, links):
            del self._gone[name]
            self._updated.pop(name, None)
            self._placed[self._ports.pop(name).link] -= 1
            self.have_shares_changed = True

    def count(self, rows: Sequence[DatagramRow]) -> None:
        """Count what a worker has reported."""
        for name, endpoint, sessions, open_sessions, dial_failures, to_endpoint, to_client in rows:
            port = self._ports[name]
            target = port.targets[endpoint]
            target.sessions += sessions
            target.open_sessions += open_sessions
            target.dial_failures += dial_failures
            target.to_endpoint.bytes += to_endpoint
            target.to_client.bytes += to_client
            if open_now := port.open_sessions.pop(target, 0) + open_sessions:
                port.open_sessions[target] = open_now

    def lose(self, link: WorkerLink) -> None:
        """The sessions of a worker have ended with it."""
        for port in self._ports.values():
            if port.link is link:
                for target, open_sessions in port.open_sessions.items():
                    target.open_sessions -= open_sessions
                port.open_sessions.clear()

    def restore(self, link: WorkerLink) -> None:
        """Give all that a worker has to serve to its successor."""
        for name, port in self._ports.items():
            if port.link is link and name not in self._gone:
                link.send(UpdateDatagrams.of(port.service_port))
                for address, sock in port.sockets.items():
                    link.send(ListenForDatagrams(name, address), os.dup(sock.fileno()))

    def close(self) -> None:
        """Close all sockets."""
        for port in self._ports.values():
            for sock in port.sockets.values():
                sock.close()
        self._ports.clear()

    def _of(
        self, messages: Mapping[ServicePortName, int], sent: int, links: Collection[WorkerLink]
    ) -> list[ServicePortName]:
        """Return the service ports of these messages that were for these workers, and were sent until then."""
        return [name for name, at in messages.items() if at <= sent and self._ports[name].link in links]

    def _close(self, name: ServicePortName, asked: ListenAddress) -> None:
        port = self._ports.get(name)
        if port is not None and asked in port.sockets:
            port.sockets.pop(asked).close()
            self._send(port, CloseDatagrams(name, asked))

    def _send(self, port: _Port, message: object, *descriptors: int) -> None:
        self.sent += 1
        if port.link.is_running:
            port.link.send(message, *descriptors)
        else:  # its successor gets everything when it starts
            for descriptor in descriptors:
                os.close(descriptor)
