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
from userspace_proxy.core.model import WILDCARDS, Endpoint, ListenAddress, ServicePortName
from userspace_proxy.core.sessions import SessionTable
from userspace_proxy.dataplane.backends import Backends, Target
from userspace_proxy.dataplane.batches import DatagramBatches
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.kept import KeptDatagrams
from userspace_proxy.dataplane.mmsg import BATCH, MAX_DATAGRAM, ClientAddress, seal, unseal
from userspace_proxy.dataplane.packet_info import CONTROL_BYTES, ControlMessage, reply_control, request_packet_info
from userspace_proxy.dataplane.sockets import (
    LOCAL_FAULTS,
    OUT_OF_RESOURCES,
    bound_address,
    new_datagram_socket,
)

_FEW = 2  # up to so many datagrams at once, a system call for each is faster (performance.md: 30 % with one in flight)
_EXPIRY_GRANULARITY_S = 0.01
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

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

    __slots__ = (
        "_client",
        "_key",
        "_listener",
        "_reply_envelope",
        "_reply_from",
        "_sock",
        "_tried",
        "active_s",
        "request_envelope",
        "target",
    )

    def __init__(
        self, listener: UdpListener, key: ClientKey, client: ClientAddress, reply_from: ControlMessage | None
    ) -> None:
        self.active_s = monotonic()
        self.target: Target | None = None  # set from when it is picked until it refuses
        self._listener = listener
        self._key = key
        self._client = client
        self._reply_from = reply_from
        self._reply_envelope: bytes | None = None  # of replies, made when the first one leaves together with others
        self.request_envelope: bytes | None = None  # of the client's last datagram, if received together with others
        self._sock: socket.SocketType | None = None  # None until the first datagram, and after a refusal
        self._tried: tuple[Endpoint, ...] = ()

    @property
    def name(self) -> ServicePortName:
        """The service port."""
        return self._listener.backends.name

    def forward(self, data: bytes) -> None:
        """Send a datagram of the client to its endpoint; while endpoints refuse, to the next."""
        listener = self._listener
        for _ in listener.engine.settings.dial_ladder_s:
            try:
                (self._sock or self._connect()).send(data)
            except NoEndpoints as error:
                listener.sessions.end(self)  # others may need its place
                if listener.backends.is_idled and listener.kept.keep(self._client, self._reply_from, data):
                    return
                listener.engine.complain(listener.backends.name, f"a datagram was dropped, as {error}")
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
        listener = self._listener
        try:
            if listener.batches is not None:
                envelope = self._reply_envelope or self._seal()
                size = listener.batches.collect_reply(self._sock, envelope, listener.fd)
            else:
                data = self._sock.recv(MAX_DATAGRAM)
                size = len(data)
                listener.reply(data, self._client, self._reply_from)
        except BlockingIOError:
            return
        except OSError as error:
            self._leave_endpoint(error)
            return
        self.active_s = monotonic()
        self._tried = ()
        self.target.to_client.bytes += size

    def close(self) -> None:
        """End the session: close the socket to the endpoint and let the listener forget it."""
        self._disconnect()
        self._listener.open_sessions.pop(self._key, None)
        if self.request_envelope is not None:
            del self._listener.session_by_envelope[self.request_envelope]
            self.request_envelope = None

    def _seal(self) -> bytes:
        self._reply_envelope = seal(self._client, self._reply_from)
        return self._reply_envelope

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
        self.session_by_envelope: dict[bytes, UdpSession] = {}
        """By the envelopes of datagrams that were received together: each kind of envelope is opened once."""
        self.batches: DatagramBatches | None = None
        """What receives and sends, while many datagrams come at once. No reply waits in it while this is None."""
        self.fd = sock.fileno()
        self._sock = sock
        self.kept = KeptDatagrams(engine, backends, self.origin, self._take)
        self._batch = 1  # adapts to the load: a single datagram costs no second receive that finds nothing
        self._wants_packet_info = self.address.address in WILDCARDS and request_packet_info(sock, self.address.family)
        engine.poller.watch_level(self.fd, self)

    def on_ready(self, events: int) -> None:
        """Clients have sent something. At most `BATCH` datagrams a turn, so that others have theirs."""
        try:
            received = self._receive_each() if self.batches is None else self._receive_together(self.batches)
        except OSError as error:
            self.drop(error)
            return
        self._batch = min(BATCH, self._batch * 2) if received >= self._batch else max(1, received)
        if self._batch > _FEW:
            self.batches = self.engine.batches
        else:
            self._leave_batches()

    def _receive_each(self) -> int:
        """Receive with a system call for each datagram. Return how many there were. Raises OSError."""
        now = monotonic()
        received = 0
        while received < self._batch and self.fd >= 0:
            try:
                if self._wants_packet_info:
                    data, control, _, client = self._sock.recvmsg(MAX_DATAGRAM, CONTROL_BYTES)
                    reply_from = reply_control(control)
                else:
                    data, client = self._sock.recvfrom(MAX_DATAGRAM)
                    reply_from = None
            except BlockingIOError:
                break
            received += 1
            session = self._session_of(client, reply_from)
            session.active_s = now
            session.forward(data)
        return received

    def _receive_together(self, batches: DatagramBatches) -> int:
        """Receive with one system call. Return how many datagrams there were. Raises OSError."""
        now = monotonic()
        try:
            datagrams = batches.requests.receive(self.fd)
        except BlockingIOError:
            return 0
        for envelope, data in datagrams:
            if self.fd < 0:  # closed meanwhile
                self.engine.dropped_datagrams += 1
                continue
            session = self.session_by_envelope.get(envelope) or self._meet(envelope)
            session.active_s = now
            session.forward(data)
        return len(datagrams)

    def _leave_batches(self) -> None:
        if self.batches is not None:
            self.batches.send_replies()
            self.batches = None

    def _meet(self, envelope: bytes) -> UdpSession:
        """Return the session of a client whose envelope is new, and know it by that from now on."""
        client, control = unseal(envelope)
        session = self._session_of(client, reply_control(control) if self._wants_packet_info else None)
        if session.request_envelope is not None:  # its datagrams take another way now
            del self.session_by_envelope[session.request_envelope]
        session.request_envelope = envelope
        self.session_by_envelope[envelope] = session
        return session

    def _session_of(self, client: ClientAddress, reply_from: ControlMessage | None) -> UdpSession:
        key = (client, reply_from) if self._wants_packet_info else client
        session = self.open_sessions.get(key)
        if session is None:
            session = self.open_sessions[key] = UdpSession(self, key, client, reply_from)
            if not self.backends.is_idled:  # else it ends at once, and none is to end for it
                self.sessions.add(session)
        return session

    def _take(self, client: ClientAddress, reply_from: ControlMessage | None, data: bytes) -> None:
        """Forward a datagram that was kept."""
        session = self._session_of(client, reply_from)
        session.active_s = monotonic()
        session.forward(data)

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
        return self.fd

    def close(self) -> None:
        """Stop listening and end all sessions."""
        self.kept.drop_all()
        for session in list(self.open_sessions.values()):
            self.sessions.end(session)
        if self.fd >= 0:
            self._leave_batches()
            self.engine.poller.unwatch(self.fd)  # closing it would not do where another process has a copy
            self.fd = -1
            self.engine.poller.close(self._sock.detach())
