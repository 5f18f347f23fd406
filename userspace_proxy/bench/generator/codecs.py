"""Requests and replies of TCP loads as bytes: ours, HTTP/1.1, and lines of text for backends that are not ours."""

from __future__ import annotations

import re
from typing import Protocol

from userspace_proxy.bench import wire
from userspace_proxy.bench.generator.job import OwnBackends
from userspace_proxy.bench.scenario import Connect, Hold, Http, Requests, Visits

UNKNOWN = 0
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*(?:[^\r\n]*,[ \t]*)?chunked", re.IGNORECASE)
_OUR_BACKEND = re.compile(rb"\r\nX-Backend: (\d+)\r\n")
_SEQUENCE = slice(12, 20)


class Codec(Protocol):
    """What is asked, and what is an answer."""

    fixed_size: int
    """The size of each reply, or 0 where the reply says."""
    names: dict[int, str]
    """Names of backends by number, where they have other names than their numbers."""

    def request(self, sequence: int) -> bytes:
        """Return the bytes of a request."""

    def end(self, data: bytes, *, is_eof: bool) -> int | None:
        """Return how many bytes the reply at the beginning of `data` has, or None while it is incomplete."""

    def check(self, reply: bytes, sequence: int) -> str:
        """Return what is wrong with a whole reply (of a fixed size: with its header), or nothing."""

    def backend(self, reply: bytes) -> int:
        """Return the number of the backend that gave the reply, or UNKNOWN."""


class Framed:
    """Our own protocol, see `wire`."""

    def __init__(self, request_size: int, reply_size: int) -> None:
        self.names: dict[int, str] = {}
        self.fixed_size = max(reply_size, wire.HEADER.size)
        self._request_size = max(request_size, wire.HEADER.size)
        self._reply_padding = b"r" * (self.fixed_size - wire.HEADER.size)
        self._padding = b"q" * (self._request_size - wire.HEADER.size)

    def request(self, sequence: int) -> bytes:
        return wire.pack(wire.REQUEST, sequence, self._request_size, self.fixed_size) + self._padding

    def end(self, data: bytes, *, is_eof: bool) -> int | None:
        return self.fixed_size if len(data) >= self.fixed_size else None

    def check(self, reply: bytes, sequence: int) -> str:
        if reply[0] != wire.MAGIC or reply[_SEQUENCE] != sequence.to_bytes(8, "big"):
            return "wrong reply"
        is_whole = len(reply) == self.fixed_size
        return "" if not is_whole or reply.endswith(self._reply_padding) else "damaged reply"

    def backend(self, reply: bytes) -> int:
        return int.from_bytes(reply[2:4], "big")


class _Named:
    """Backends told apart by a regular expression."""

    def __init__(self, identify: re.Pattern[bytes]) -> None:
        self.names: dict[int, str] = {}
        self._identify = identify
        self._numbers: dict[bytes, int] = {}

    def backend(self, reply: bytes) -> int:
        match = self._identify.search(reply)
        if match is None:
            return UNKNOWN
        number = self._numbers.setdefault(match[1], len(self._numbers) + 1)
        self.names.setdefault(number, match[1].decode(errors="replace"))
        return number


class HttpCodec(_Named):
    """HTTP/1.1, bodies by length, in chunks or until the connection is closed."""

    fixed_size = 0

    def __init__(self, load: Http, host: str, own: OwnBackends | None) -> None:
        super().__init__(re.compile(own.identify.encode()) if own else _OUR_BACKEND)
        self._is_ours = own is None
        path = load.path
        if self._is_ours:
            path += ("&" if "?" in path else "?") + f"size={load.reply_size}"
        fields = {"Host": host, **load.headers, **({} if load.keep_alive else {"Connection": "close"})}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._request = f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()

    def request(self, sequence: int) -> bytes:
        return self._request

    def end(self, data: bytes, *, is_eof: bool) -> int | None:
        head_end = data.find(b"\r\n\r\n") + 4
        if head_end < 4:
            return None
        head = data[:head_end]
        if _CHUNKED.search(head):
            return _end_of_chunks(data, head_end)
        length = _CONTENT_LENGTH.search(head)
        if length is None:
            return len(data) if is_eof else None
        end = head_end + int(length[1])
        return end if len(data) >= end else None

    def check(self, reply: bytes, sequence: int) -> str:
        status = reply[9:12]
        return (
            ""
            if reply[:7] == b"HTTP/1." and status[:1] in (b"2", b"3")
            else f"status {status.decode(errors='replace')}"
        )

    def backend(self, reply: bytes) -> int:
        if not self._is_ours:
            return super().backend(reply)
        match = _OUR_BACKEND.search(reply)
        return int(match[1]) if match else UNKNOWN


class Text(_Named):
    """One fixed request, and a reply that ends with a line, with the connection, or with its first bytes."""

    fixed_size = 0

    def __init__(self, own: OwnBackends) -> None:
        super().__init__(re.compile(own.identify.encode()))
        self._request, self._reply_ends = own.request.encode(), own.reply_ends

    def request(self, sequence: int) -> bytes:
        return self._request

    def end(self, data: bytes, *, is_eof: bool) -> int | None:
        if self._reply_ends == "newline":
            return data.find(b"\n") + 1 or None
        if self._reply_ends == "close":
            return len(data) if is_eof and data else None
        return len(data) or None

    def check(self, reply: bytes, sequence: int) -> str:
        return ""


def codec_for(load: Connect | Requests | Http | Hold | Visits, host: str, own: OwnBackends | None) -> Codec:
    """Return how the load talks to its targets."""
    if isinstance(load, Http):
        return HttpCodec(load, host, own)
    if own is not None:
        return Text(own)
    if isinstance(load, Hold | Visits):
        return Framed(64, 64)
    return Framed(load.request_size, load.reply_size)


def _end_of_chunks(data: bytes, position: int) -> int | None:
    """Return where a chunked body ends that begins at `position`, or None while it is incomplete."""
    while True:
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return None
        try:
            size = int(data[position:line_end].partition(b";")[0], 16)
        except ValueError:
            return len(data)  # not chunks at all: what came is all there is
        position = line_end + 2 + size + 2
        if position > len(data):
            return None
        if size == 0:
            return position
