"""A TCP connection of a backend: its socket, what waits to be sent, and the script that it follows."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Protocol

from userspace_proxy.bench.backend.behaviour import Behaviour

_CHUNK = 256 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Server(Protocol):
    """What a conversation needs of its server."""

    number: int
    behaviour: Behaviour
    journal: dict[int, str]
    requests: int

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` in so many seconds."""

    def watch(self, sock: socket.socket, handler: Callable[[int], None], *, writable: bool) -> None:
        """Tell the handler when the socket is readable, or also when it is writable."""

    def forget(self, sock: socket.socket) -> None:
        """Stop watching, and close."""


class Script:
    """What a backend does in one conversation. The default is to read on until the client is done."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def read(self, sock: socket.socket) -> bytes:
        """Return what has come; nothing at EOF."""
        return sock.recv(_CHUNK)

    def on_data(self, data: bytes) -> None:
        """More bytes have come."""

    def on_eof(self) -> None:
        self.peer.close()

    def on_reset(self) -> None:
        self.peer.close()

    def on_writable(self) -> None:
        """All that was to be sent is sent."""


class Peer:
    """A connection: its socket, what waits to be sent, and the script it follows."""

    __slots__ = ("_outbox", "_sock", "_wants_write", "closed", "half_closed", "script", "server")

    def __init__(self, server: Server, sock: socket.socket, opening: Callable[[Peer], Script]) -> None:
        self.server, self._sock = server, sock
        self.closed = self.half_closed = self._wants_write = False
        self._outbox = b""
        self.script = opening(self)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.watch(sock, self.on_ready, writable=False)

    def on_ready(self, events: int) -> None:
        if self._wants_write:
            self._flush()
            if self.closed:
                return
        try:
            data = self.script.read(self._sock)
        except BlockingIOError:
            return
        except OSError:
            self.script.on_reset()
            return
        if data:
            self.script.on_data(data)
        else:
            self.script.on_eof()

    def send(self, data: bytes) -> None:
        """Send the bytes, now or as soon as the client takes them."""
        if self.closed or self.half_closed:
            return
        if self._outbox:
            self._outbox += data
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.script.on_reset()
            return
        if sent < len(data):
            self._outbox = data[sent:]
            self.want_write(True)

    def reply(self, data: bytes) -> None:
        """Send a reply the way this backend behaves at present."""
        behaviour, server = self.server.behaviour, self.server
        server.requests += 1
        if behaviour.per_byte_s:
            self._trickle(data, behaviour.per_byte_s)
        elif behaviour.delay_s:
            server.later(behaviour.delay_s, lambda: self.send(data))
        else:
            self.send(data)
            if behaviour.half_close:
                self.half_close()

    def want_write(self, wanted: bool) -> None:
        if wanted is not self._wants_write and not self.closed:
            self._wants_write = wanted
            self.server.watch(self._sock, self.on_ready, writable=wanted)

    def half_close(self) -> None:
        if not self.half_closed and not self.closed:
            self.half_closed = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.server.forget(self._sock)

    def reset(self) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.close()

    def _trickle(self, data: bytes, per_byte_s: float) -> None:
        self.send(data[:1])
        if len(data) > 1 and not self.closed:
            self.server.later(per_byte_s, lambda: self._trickle(data[1:], per_byte_s))

    def _flush(self) -> None:
        data, self._outbox = self._outbox, b""
        if data:
            self.send(data)
        if not self._outbox and not self.closed:
            self.want_write(False)
            self.script.on_writable()
