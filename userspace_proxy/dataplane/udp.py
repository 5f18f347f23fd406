"""UDP: one listening socket for many clients, and for each client a session with a socket of its own to an endpoint.

A session belongs to a client's address and the local address it asked. It ends when it is idle, when its endpoint or
its service goes, or when it is the longest idle one of too many.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from time import monotonic  # the loop's own time stands still within a turn, and has only milliseconds in uvloop

from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import WILDCARDS, Endpoint, ListenAddress
from userspace_proxy.core.sessions import SessionTable
from userspace_proxy.dataplane.backends import Backends, Target
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.packet_info import CONTROL_BYTES, ControlMessage, reply_control, request_packet_info
from userspace_proxy.dataplane.sockets import (
    LOCAL_FAULTS,
    OUT_OF_RESOURCES,
    bound_address,
    new_datagram_socket,
)

_MAX_DATAGRAM = 65535
_MAX_BATCH = 256
_EXPIRY_GRANULARITY_S = 0.01
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

ClientAddress = tuple[str, int] | tuple[str, int, int, int]
ClientKey = ClientAddress | tuple[ClientAddress, ControlMessage | None]

_log = logging.getLogger(__name__)


class Sessions:
    """The UDP sessions of all listeners, within one limit, and the timer that ends the idle ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, idle_timeout_s: float, capacity: int) -> None:
        self.evicted = 0
        self._loop = loop
        self._table: SessionTable[UdpSession] = SessionTable(idle_timeout_s=idle_timeout_s, capacity=capacity)
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._table)

    def reconfigure(self, *, idle_timeout_s: float, capacity: int) -> None:
        """Use another time-out and limit, also for the sessions that there are."""
        self._table.idle_timeout_s, self._table.capacity = idle_timeout_s, capacity
        if self._timer is not None:
            self._timer.cancel()
            self._schedule()

    def add(self, session: UdpSession) -> None:
        """Add a session; the longest idle ones end when there are too many."""
        for evicted in self._table.add(session):
            self.evicted += 1
            evicted.close()
        if self._timer is None:
            self._schedule()

    def end(self, session: UdpSession) -> None:
        """End a session now."""
        self._table.remove(session)
        session.close()

    def end_all(self) -> None:
        """End all sessions now."""
        for session in self._table:
            self.end(session)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        next_expiry = self._table.next_expiry()
        if next_expiry is not None:
            delay_s = max(next_expiry - monotonic(), _EXPIRY_GRANULARITY_S)
            self._timer = self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for session in self._table.expire(now=monotonic()):
            session.close()
        self._schedule()


class UdpSession:
    """One client of one listener, and the socket that talks to its endpoint."""

    __slots__ = ("_client", "_key", "_listener", "_reply_from", "_sock", "_tried", "active_s", "target")

    def __init__(
        self, listener: UdpListener, key: ClientKey, client: ClientAddress, reply_from: ControlMessage | None
    ) -> None:
        self.active_s = monotonic()
        self.target: Target | None = None  # set from when it is picked until it refuses
        self._listener = listener
        self._key = key
        self._client = client
        self._reply_from = reply_from
        self._sock: socket.SocketType | None = None  # None until the first datagram, and after a refusal
        self._tried: tuple[Endpoint, ...] = ()

    def forward(self, data: bytes) -> None:
        """Send a datagram of the client to its endpoint; while endpoints refuse, to the next."""
        listener = self._listener
        for _ in listener.engine.settings.dial_ladder_s:
            try:
                (self._sock or self._connect()).send(data)
            except NoEndpoints as error:
                listener.engine.complain(listener.backends.name, f"a datagram was dropped, as {error}")
                listener.sessions.end(self)  # others may need its place
                break
            except OSError as error:
                if not self._is_endpoints_fault(error):
                    listener.drop(error)
                    return
                self._leave_endpoint(error)
            else:
                assert self.target is not None
                self.target.to_endpoint.bytes += len(data)
                return
        listener.engine.dropped_datagrams += 1

    def on_ready(self, events: int) -> None:
        """The endpoint has answered or refused.

        One reply a turn: the poller tells again, while a second receive would mostly find nothing (1.2 times the
        round trips with 64 flows).
        """
        if self._sock is None or self.target is None:
            return
        try:
            data = self._sock.recv(_MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError as error:
            self._leave_endpoint(error)
            return
        listener = self._listener
        self.active_s = monotonic()
        self._tried = ()
        self.target.to_client.bytes += len(data)
        listener.reply(data, self._client, self._reply_from)

    def close(self) -> None:
        """End the session: close the socket to the endpoint and let the listener forget it."""
        self._disconnect()
        self._listener.open_sessions.pop(self._key, None)

    def _connect(self) -> socket.SocketType:
        """Return a socket connected to the endpoint that is due. Raises NoEndpoints, OSError.

        After a fault of this host the same endpoint is still due.
        """
        listener = self._listener
        if self.target is None:
            now = listener.engine.loop.time()
            self.target = listener.backends.pick(listener.origin, self._client[0], now=now, tried=self._tried)
        target = self.target
        sock = new_datagram_socket(target.socket_family)
        try:
            sock.connect(target.socket_address)
        except OSError:
            sock.close()
            raise
        self._sock = sock
        _log.debug("%s: %s has a session with %s", listener.backends.name, self._client[0], target.endpoint)
        target.sessions += 1
        target.open_sessions += 1
        listener.engine.poller.watch_level(sock.fileno(), self)
        return sock

    def _is_endpoints_fault(self, error: OSError) -> bool:
        """Tell whether another endpoint may do better: where sending failed, only if this one is unreachable."""
        return error.errno in _UNREACHABLE if self._sock is not None else error.errno not in LOCAL_FAULTS

    def _leave_endpoint(self, error: OSError) -> None:
        """The endpoint refused. The session stays, so that the client's next datagram finds another one."""
        assert self.target is not None
        endpoint, name = self.target.endpoint, self._listener.backends.name
        self.target.dial_failures += 1
        self._tried = (endpoint,) if endpoint in self._tried else (*self._tried, endpoint)
        self._disconnect()
        _log.debug("%s: %s refused a datagram: %s", name, endpoint, error.strerror)
        self._listener.engine.tell_dial_failure(name, endpoint)

    def _disconnect(self) -> None:
        if self._sock is not None:
            assert self.target is not None
            self.target.open_sessions -= 1
            self._listener.engine.poller.close(self._sock.detach())
            self._sock = None
        self.target = None


class UdpListener:
    """One bound datagram socket of one service port. Closing it ends its sessions."""

    def __init__(
        self, engine: Engine, sessions: Sessions, backends: Backends, asked: ListenAddress, sock: socket.socket
    ) -> None:
        self.address = bound_address(sock, asked)
        self.origin = (asked.scope, asked.family)
        self.engine = engine
        self.sessions = sessions
        self.backends = backends
        self.open_sessions: dict[ClientKey, UdpSession] = {}
        self._sock = sock
        self._fd = sock.fileno()
        self._batch = 1  # adapts to the load: a single datagram costs no second receive that finds nothing
        self._wants_packet_info = self.address.address in WILDCARDS and request_packet_info(sock, self.address.family)
        engine.poller.watch_level(self._fd, self)

    def on_ready(self, events: int) -> None:
        """Clients have sent something."""
        now = monotonic()
        received = 0
        try:
            while received < self._batch and self._fd >= 0:
                if self._wants_packet_info:
                    data, control, _, client = self._sock.recvmsg(_MAX_DATAGRAM, CONTROL_BYTES)
                    reply_from = reply_control(control)
                    key = (client, reply_from)
                else:
                    data, client = self._sock.recvfrom(_MAX_DATAGRAM)
                    reply_from, key = None, client
                received += 1
                session = self.open_sessions.get(key)
                if session is None:
                    session = self.open_sessions[key] = UdpSession(self, key, client, reply_from)
                    self.sessions.add(session)
                session.active_s = now
                session.forward(data)
        except BlockingIOError:
            self._batch = max(1, received)
        except OSError as error:
            self.drop(error)
        else:
            self._batch = min(_MAX_BATCH, self._batch * 2)

    def reply(self, data: bytes, client: ClientAddress, reply_from: ControlMessage | None) -> None:
        """Send a reply to a client, from the address that it asked."""
        try:
            if reply_from is None:
                self._sock.sendto(data, client)
            else:
                self._sock.sendmsg([data], [reply_from], 0, client)
        except OSError:  # its buffer is full, or it is unreachable: as if lost on the way
            self.engine.dropped_datagrams += 1

    def drop(self, error: OSError) -> None:
        """Count a datagram that could not be forwarded for a reason of this host."""
        self.engine.dropped_datagrams += 1
        if error.errno in OUT_OF_RESOURCES:
            self.engine.gate.close(error)

    def end_sessions_of_removed_endpoints(self) -> None:
        """End the sessions whose endpoint is one no more, so that their clients find another."""
        for session in list(self.open_sessions.values()):
            if session.target is not None and not self.backends.serves(self.origin, session.target.endpoint):
                self.sessions.end(session)

    def fileno(self) -> int:
        """Return the descriptor that is listened on."""
        return self._fd

    def close(self) -> None:
        """Stop listening and end all sessions."""
        for session in list(self.open_sessions.values()):
            self.sessions.end(session)
        if self._fd >= 0:
            self.engine.poller.unwatch(self._fd)  # closing it would not do where another process has a copy
            self._fd = -1
            self.engine.poller.close(self._sock.detach())
