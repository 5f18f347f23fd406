"""A TCP connection with at most one request under way."""

from __future__ import annotations

import select
import socket
from typing import Protocol

from userspace_proxy.bench import wire
from userspace_proxy.bench.generator.codecs import UNKNOWN, Codec
from userspace_proxy.bench.generator.columns import kind_of
from userspace_proxy.bench.generator.loop import Loop

_KEPT_WHOLE = 64 * 1024  # of longer replies the header is kept, and the rest is counted


class Load(Protocol):
    """What an exchange needs of the load that it is part of. All exchanges share one buffer."""

    loop: Loop
    codec: Codec
    sequence: int
    buffer: bytearray
    view: memoryview

    def on_reply(self, exchange: Exchange, reply: bytes) -> None:
        """The request that is under way was answered."""

    def on_broken(self, exchange: Exchange, kind: str) -> None:
        """The connection is of no more use."""


class Exchange:
    """A connection with at most one request under way."""

    __slots__ = (
        "_load", "_outbox", "_received", "_recv_into", "_reply", "_sock", "answered", "asked_at", "backend", "client",
        "due", "fd", "opened", "sequence", "waiting",
    )  # fmt: skip

    def __init__(self, load: Load, sock: socket.socket, client: int, now: float) -> None:
        self._load, self._sock, self.client, self.opened = load, sock, client, now
        self._recv_into, self.fd = sock.recv_into, sock.fileno()
        self._outbox = self._reply = b""
        self._received = self.answered = self.sequence = 0
        self.backend = UNKNOWN
        self.due = self.asked_at = now
        self.waiting = False
        load.loop.watch(self.fd, self.on_ready, select.EPOLLIN)

    def ask(self, due: float, now: float) -> None:
        """Send a request that was due at that time."""
        load = self._load
        self.due, self.asked_at, self.waiting = due, now, True
        self._received, self._reply = 0, b""
        load.sequence += 1
        self.sequence = load.sequence
        self._send(load.codec.request(self.sequence))

    def on_ready(self, events: int) -> None:
        load = self._load
        if self._outbox:
            self._send(b"")
            if self.fd < 0:
                return
        try:
            size = self._recv_into(load.buffer)
        except BlockingIOError:
            return
        except OSError as error:
            load.on_broken(self, kind_of(error))
            return
        if size == load.codec.fixed_size and not self._received and self.waiting:
            load.on_reply(self, load.view[:size].tobytes())
        else:
            self._collect(size)

    def close(self) -> None:
        self._load.loop.forget(self.fd)
        self._sock.close()
        self.fd = -1

    def _collect(self, size: int) -> None:
        """Take part of a reply, an end, or what nobody asked for."""
        load, fixed_size = self._load, self._load.codec.fixed_size
        if not self.waiting:
            load.on_broken(self, "closed" if size == 0 else "unexpected bytes")
            return
        self._received += size
        wanted = wire.HEADER.size - len(self._reply) if fixed_size > _KEPT_WHOLE else size
        self._reply += load.view[: min(size, wanted)]
        end = fixed_size or load.codec.end(self._reply, is_eof=size == 0)
        if end is None or self._received < end:
            if size == 0:
                load.on_broken(self, "closed")
        elif self._received > end:
            load.on_broken(self, "unexpected bytes")
        else:
            load.on_reply(self, self._reply)

    def _send(self, data: bytes) -> None:
        data = self._outbox + data
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._load.on_broken(self, kind_of(error))
            return
        had, self._outbox = bool(self._outbox), data[sent:]
        if bool(self._outbox) is not had:
            events = select.EPOLLIN | select.EPOLLOUT if self._outbox else select.EPOLLIN
            self._load.loop.watch(self.fd, self.on_ready, events)
