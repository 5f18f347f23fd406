"""What a backend does in a TCP conversation, which its first bytes decide, see `wire`."""

from __future__ import annotations

import re
import socket

from userspace_proxy.bench import wire
from userspace_proxy.bench.backend.conversation import Peer, Script

_CHUNK = 256 * 1024
_BULK = b"b" * _CHUNK
_HTTP_SIZE = re.compile(rb"[?&]size=(\d{1,9})")
_MAX_HTTP_HEAD = 64 * 1024


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
