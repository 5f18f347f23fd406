"""UDP: one listening socket for many clients, and for each client a session with a socket of its own to an endpoint.

A session belongs to a client's address and the local address it asked. It ends when it is idle, when its endpoint or
its service goes, or when it is the longest idle one of too many.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import WILDCARDS, Endpoint, ListenAddress
from userspace_proxy.core.sessions import SessionTable
from userspace_proxy.dataplane.backends import Backends, Target
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.packet_info import CONTROL_BYTES, ControlMessage, reply_control, request_packet_info
from userspace_proxy.dataplane.sockets import OUT_OF_RESOURCES, bound_address, new_datagram_socket

_MAX_DATAGRAM = 65535
_MAX_BATCH = 256
_REPLIES_PER_TURN = 16
_EXPIRY_GRANULARITY_S = 0.01
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

ClientAddress = tuple[str, int] | tuple[str, int, int, int]
SessionKey = tuple[int, ClientAddress, ControlMessage | None]

_log = logging.getLogger(__name__)


class Sessions:
    """The UDP sessions of all listeners, within one limit, and the timer that ends the idle ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, idle_timeout_s: float, capacity: int) -> None:
        self.evicted = 0
        self._loop = loop
        self._table: SessionTable[SessionKey, UdpSession] = SessionTable(
            idle_timeout_s=idle_timeout_s, capacity=capacity
        )
        self.get = self._table.get
        self.renew = self._table.renew
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._table)

    def add(self, session: UdpSession, *, now: float) -> None:
        """Add a session; the longest idle ones end when there are too many."""
        for evicted in self._table.add(session.key, session, now=now):
            self.evicted += 1
            evicted.close()
        if self._timer is None:
            self._schedule()

    def end(self, session: UdpSession) -> None:
        """End a session now."""
        self._table.remove(session.key)
        session.close()

    def end_all(self) -> None:
        """End all sessions now."""
        for _, session in self._table:
            self.end(session)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        next_expiry = self._table.next_expiry()
        if next_expiry is not None:
            at = max(next_expiry, self._loop.time() + _EXPIRY_GRANULARITY_S)
            self._timer = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for session in self._table.expire(now=self._loop.time()):
            session.close()
        self._schedule()


class UdpSession:
    """One client of one listener, and the socket that talks to its endpoint."""

    __slots__ = ("_listener", "_reply_from", "_sock", "_tried", "client", "key", "target")

    def __init__(
        self, listener: UdpListener, key: SessionKey, client: ClientAddress, reply_from: ControlMessage | None
    ) -> None:
        self._listener = listener
        self.key = key
        self.client = client
        self._reply_from = reply_from
        self.target: Target | None = None
        self._sock: socket.SocketType | None = None  # None until the first datagram, and after a refusal
        self._tried: tuple[Endpoint, ...] = ()

    def forward(self, data: bytes) -> None:
        """Send a datagram of the client to its endpoint; while endpoints refuse, to the next."""
        listener = self._listener
        for _ in listener.engine.settings.dial_ladder_s:
            try:
                (self._sock or self._connect()).send(data)
            except NoEndpoints:
                break
            except OSError as error:
                if error.errno not in _UNREACHABLE:
                    listener.drop(error)
                    return
                self._leave_endpoint(error)
            else:
                assert self.target is not None
                self.target.to_endpoint.bytes += len(data)
                return
        listener.engine.dropped_datagrams += 1

    def on_ready(self, events: int) -> None:
        """The endpoint has answered or refused."""
        listener = self._listener
        for _ in range(_REPLIES_PER_TURN):
            if self._sock is None or self.target is None:
                return
            try:
                data = self._sock.recv(_MAX_DATAGRAM)
            except BlockingIOError:
                return
            except OSError as error:
                self._leave_endpoint(error)
                return
            self._tried = ()
            self.target.to_client.bytes += len(data)
            listener.sessions.renew(self.key, now=listener.engine.loop.time())
            listener.reply(data, self.client, self._reply_from)

    def close(self) -> None:
        """End the session: close the socket to the endpoint and let the listener forget it."""
        self._disconnect()
        self._listener.open_sessions.discard(self)

    def _connect(self) -> socket.SocketType:
        """Return a socket connected to the endpoint that is due. Raises NoEndpoints, OSError."""
        listener = self._listener
        now = listener.engine.loop.time()
        target = listener.backends.pick(listener.address.family, self.client[0], now=now, tried=self._tried)
        sock = new_datagram_socket(target.socket_family)
        self._sock, self.target = sock, target
        target.sessions += 1
        target.open_sessions += 1
        listener.engine.poller.watch_level(sock.fileno(), self)
        sock.connect(target.socket_address)
        return sock

    def _leave_endpoint(self, error: OSError) -> None:
        """The endpoint refused. The session stays, so that the client's next datagram finds another one."""
        assert self.target is not None
        endpoint, name = self.target.endpoint, self._listener.backends.name
        self.target.dial_failures += 1
        self._tried = (endpoint,) if endpoint in self._tried else (*self._tried, endpoint)
        self._disconnect()
        _log.debug("%s: %s refused a datagram: %s", name, endpoint, error.strerror)
        self._listener.engine.on_dial_failure(name, endpoint)

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._listener.engine.poller.close(self._sock.detach())
            self._sock = None
        if self.target is not None:
            self.target.open_sessions -= 1
            self.target = None


class UdpListener:
    """One bound datagram socket of one service port. Closing it ends its sessions."""

    def __init__(self, engine: Engine, sessions: Sessions, backends: Backends, sock: socket.socket) -> None:
        self.address: ListenAddress = bound_address(sock)
        self.engine = engine
        self.sessions = sessions
        self.backends = backends
        self.open_sessions: set[UdpSession] = set()
        self._sock = sock
        self._fd = sock.fileno()
        self._batch = 1  # adapts to the load: a single datagram costs no second receive that finds nothing
        self._wants_packet_info = self.address.address in WILDCARDS and request_packet_info(sock, self.address.family)
        engine.poller.watch_level(self._fd, self)

    def on_ready(self, events: int) -> None:
        """Clients have sent something."""
        received = 0
        try:
            while received < self._batch and self._fd >= 0:
                if self._wants_packet_info:
                    data, control, _, client = self._sock.recvmsg(_MAX_DATAGRAM, CONTROL_BYTES)
                    reply_from = reply_control(control)
                else:
                    data, client = self._sock.recvfrom(_MAX_DATAGRAM)
                    reply_from = None
                received += 1
                self._forward(data, client, reply_from)
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
            self.engine.gate.wait(lambda: None, error)

    def end_sessions_of_removed_endpoints(self) -> None:
        """End the sessions whose endpoint is one no more, so that their clients find another."""
        for session in list(self.open_sessions):
            if session.target is not None and session.target.endpoint not in self.backends:
                self.sessions.end(session)

    def close(self) -> None:
        """Stop listening and end all sessions."""
        for session in list(self.open_sessions):
            self.sessions.end(session)
        if self._fd >= 0:
            self._fd = -1
            self.engine.poller.close(self._sock.detach())

    def _forward(self, data: bytes, client: ClientAddress, reply_from: ControlMessage | None) -> None:
        now = self.engine.loop.time()
        key = (self._fd, client, reply_from)
        session = self.sessions.get(key)
        if session is None:
            session = UdpSession(self, key, client, reply_from)
            self.open_sessions.add(session)
            self.sessions.add(session, now=now)
        else:
            self.sessions.renew(key, now=now)
        session.forward(data)
