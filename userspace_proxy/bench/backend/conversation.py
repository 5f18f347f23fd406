"""One TCP conversation of a backend. What it does is decided by its first bytes, see `wire`."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from userspace_proxy.bench import wire
from userspace_proxy.bench.backend.behaviour import Behaviour

_CHUNK = 256 * 1024
_BULK = b"b" * _CHUNK
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_HTTP_SIZE = re.compile(rb"[?&]size=(\d{1,9})")
_MAX_HTTP_HEAD = 64 * 1024


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

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server, self._sock = server, sock
        self.closed = self.half_closed = self._wants_write = False
        self._outbox = b""
        self.script: Script = Opening(self)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.watch(sock, self.on_ready, writable=False)

    def on_ready(self, events: int) -> None:
        if self._wants_write:
            self._flush()
            if self.closed:
                return
        try:
            data = self.script.read(self._sock) if isinstance(self.script, Sink) else self._sock.recv(_CHUNK)
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


class Opening(Script):
    """Nothing has been decided yet: wait for a header, or for anything that is not our magic byte."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._data = b""

    def on_data(self, data: bytes) -> None:
        data = self._data = self._data + data
        if data[0] != wire.MAGIC:
            script: Script = HttpServer(self.peer)
        elif len(data) < wire.HEADER.size:
            return
        else:
            script = SCRIPTS.get(data[1], Script)(self.peer)
        self.peer.script = script
        script.on_data(data)


class Replies(Script):
    """A reply for each request."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._data = b""

    def on_data(self, data: bytes) -> None:
        if self._data:
            data = self._data + data
        unpack = wire.HEADER.unpack_from
        while len(data) >= wire.HEADER.size:
            _, operation, _, request_size, reply_size, sequence = unpack(data)
            if len(data) < request_size:
                break
            data = data[request_size:]
            header = wire.pack(operation, sequence, request_size, reply_size, self.peer.server.number)
            self.peer.reply(header.ljust(reply_size, b"r"))
        self._data = data


class HttpServer(Script):
    """GET requests; `?size=N` asks for that many bytes."""

    _answers: dict[bytes, bytes] = {}  # noqa: RUF012 (a cache of one process: load repeats the same request)

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._data = b""

    def on_data(self, data: bytes) -> None:
        data = self._data + data
        while True:
            head, blank, rest = data.partition(b"\r\n\r\n")
            if not blank:
                break
            data = rest
            answer = self._answers.get(head)
            if answer is None:
                answer = self._answers[head] = self._answer(head)
            self.peer.reply(answer)
            if b"connection: close" in head.lower():
                self.peer.half_close()
        self._data = data
        if len(data) > _MAX_HTTP_HEAD:
            self.peer.close()

    def _answer(self, head: bytes) -> bytes:
        asked = _HTTP_SIZE.search(head.split(b"\r\n", 1)[0])
        body = b"h" * (int(asked[1]) if asked else wire.HEADER.size)
        fields = f"HTTP/1.1 200 OK\r\nX-Backend: {self.peer.server.number}\r\nContent-Length: {len(body)}\r\n\r\n"
        return fields.encode() + body


class Download(Script):
    """Bytes until the client closes."""

    def on_data(self, data: bytes) -> None:
        self.peer.send(wire.pack(wire.DOWNLOAD, 0, 0, 0, self.peer.server.number))
        self.peer.want_write(True)

    def on_writable(self) -> None:
        self.peer.send(_BULK)
        self.peer.want_write(True)


class Sink(Script):
    """A script that counts bytes and does not look at them, so the kernel need not copy them to us."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.received = 0
        self._buffer = bytearray(_CHUNK)

    def read(self, sock: socket.socket) -> bytes:
        size = sock.recv_into(self._buffer, _CHUNK, socket.MSG_TRUNC)
        self.received += size
        return b"x" if size else b""


class Upload(Sink):
    """Bytes until EOF, then how many there were. First a header, so that the client knows who it talks to."""

    def on_data(self, data: bytes) -> None:
        if data[0] == wire.MAGIC and not self.received:
            self.received = len(data)
            self.peer.send(wire.pack(wire.UPLOAD, 0, 0, 0, self.peer.server.number))

    def on_eof(self) -> None:
        self.peer.send(wire.pack(wire.UPLOAD, self.received, 0, 0, self.peer.server.number))
        self.peer.close()


class Ending(Script):
    """A conversation about how it ends, which is noted in the journal."""

    def on_data(self, data: bytes) -> None:
        if not hasattr(self, "sequence"):
            _, self.operation, _, self.request_size, self.reply_size, self.sequence = wire.HEADER.unpack_from(data)
            self.received = -wire.HEADER.size
            self.on_opened()
        self.received += len(data)
        self.on_more(data)

    def on_opened(self) -> None:
        self.peer.send(self.header())

    def on_more(self, data: bytes) -> None:
        """Bytes have come; those of the header are among the first."""

    def on_eof(self) -> None:
        self.note(f"eof after {self.received}")
        self.peer.close()

    def on_reset(self) -> None:
        self.note(f"reset after {self.received}")
        self.peer.close()

    def note(self, text: str) -> None:
        if hasattr(self, "sequence"):
            self.peer.server.journal.setdefault(self.sequence, text)  # what came first is what happened

    def header(self) -> bytes:
        return wire.pack(self.operation, self.sequence, self.request_size, self.reply_size, self.peer.server.number)


class ClientHalfCloses(Ending):
    def on_opened(self) -> None:
        """The reply has to wait for EOF."""

    def on_eof(self) -> None:
        self.note(f"eof after {self.received}")
        if not hasattr(self, "sequence"):
            self.peer.close()
            return
        self.peer.send(self.header() + wire.pattern(self.reply_size, self.sequence))
        self.peer.half_close()
        self.peer.close()


class BackendHalfCloses(Ending):
    def on_opened(self) -> None:
        self.peer.send(self.header())
        self.peer.half_close()


class BackendResets(Ending):
    def on_more(self, data: bytes) -> None:
        if self.received > 0:
            self.note("has reset")
            self.peer.reset()


class Digest(Ending):
    def on_opened(self) -> None:
        self.data = b""

    def on_more(self, data: bytes) -> None:
        self.data += data
        if self.received == self.request_size:
            is_same = self.data[wire.HEADER.size :] == wire.pattern(self.request_size, self.sequence)
            self.note("same" if is_same else "other")
            self.peer.send(self.header() + wire.pattern(self.reply_size, self.sequence))


SCRIPTS: dict[int, type[Script]] = {
    wire.REQUEST: Replies,
    wire.DOWNLOAD: Download,
    wire.UPLOAD: Upload,
    wire.CLIENT_HALF_CLOSES: ClientHalfCloses,
    wire.BACKEND_HALF_CLOSES: BackendHalfCloses,
    wire.CLIENT_RESETS: Ending,
    wire.BACKEND_RESETS: BackendResets,
    wire.DIGEST: Digest,
}
