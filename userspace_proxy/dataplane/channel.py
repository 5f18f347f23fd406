"""Messages and descriptors between two processes of this program, over a Unix stream socket. Neither side ever waits.

A frame is its length, the number of descriptors that come with it, and a message in MessagePack.
"""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

MAX_DESCRIPTORS = 253
"""Of one message. Source: SCM_MAX_FD of Linux."""

MAX_MESSAGE_BYTES = 8 << 20

_HEADER = struct.Struct("!IB")
_READ_BYTES = 1 << 16
_CONTROL_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_RETRY_S = 0.05

_log = logging.getLogger(__name__)

Message = TypeVar("Message")


class _Outgoing(NamedTuple):
    """What is left of a message, its descriptors if none of it was sent, and those of them that are ours to close."""

    frame: memoryview
    fds: Sequence[int] = ()
    owned: Sequence[int] = ()


class Channel(Generic[Message]):
    """One end of a connection to another process. `kind` is the type of all messages that may come.

    `on_message` gets each message and its descriptors, which it then owns. There can be fewer than were sent: the
    kernel drops those for which this process has no room. `on_end` is called once, when the other side is gone (with
    no reason) or has sent what is no message (with a reason); not after `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        kind: object,
        *,
        on_message: Callable[[Message, list[int]], None],
        on_end: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._received_fds: deque[list[int]] = deque()  # one list for each message that has descriptors
        self._to_send: deque[_Outgoing] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self.pending_bytes = 0
        """What could not be sent yet. Whoever sends without waiting for answers looks at it."""
        loop.add_reader(self._fd, self._read)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def send(self, message: object, fds: Sequence[int] = (), *, lent: bool = False) -> None:
        """Send a message with at most 253 descriptors. These are closed once they are sent, in any case, unless `lent`.

        Who lends descriptors keeps them open until the other side has answered. After the end of the channel this does
        nothing more.
        """
        owned = () if lent else fds
        if not self.is_open:
            _close_all(owned)
            return
        body = self._encoder.encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES
        assert len(fds) <= MAX_DESCRIPTORS
        frame = memoryview(_HEADER.pack(len(body), len(fds)) + body)
        self.pending_bytes += len(frame)
        self._to_send.append(_Outgoing(frame, fds, owned))
        if len(self._to_send) == 1:
            self._write()

    def close(self) -> None:
        """Close this end. What was not sent yet is dropped."""
        if not self.is_open:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        if self._retry is not None:
            self._retry.cancel()
        self._fd = -1
        self._sock.close()
        for outgoing in self._to_send:
            _close_all(outgoing.owned)
        for fds in self._received_fds:
            _close_all(fds)
        self._to_send.clear()
        self._received_fds.clear()
        self.pending_bytes = 0

    def _end(self, reason: str = "") -> None:
        self.close()
        self._on_end(reason)

    def _write(self) -> None:
        self._retry = None
        while self._to_send:
            outgoing = self._to_send[0]
            frame, fds = outgoing.frame, outgoing.fds
            try:
                sent = socket.send_fds(self._sock, [frame], list(fds)) if fds else self._sock.send(frame)
            except BlockingIOError:
                self._loop.add_writer(self._fd, self._write)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # too many descriptors are on their way
                    self._loop.remove_writer(self._fd)
                    self._retry = self._loop.call_later(_RETRY_S, self._write)
                    return
                self._end()
                return
            _close_all(outgoing.owned)
            self.pending_bytes -= sent
            if sent < len(frame):
                self._to_send[0] = _Outgoing(frame[sent:])
            else:
                self._to_send.popleft()
        self._loop.remove_writer(self._fd)

    def _read(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        fds = list(_descriptors(ancillary))
        if fds or flags & socket.MSG_CTRUNC:
            self._received_fds.append(fds)
        if not data:
            self._end("the last message was cut short" if self._received else "")
            return
        self._received += data
        self._take_messages()

    def _take_messages(self) -> None:
        start = 0
        while self.is_open and len(self._received) - start >= _HEADER.size:
            length, fd_count = _HEADER.unpack_from(self._received, start)
            if length > MAX_MESSAGE_BYTES or fd_count > MAX_DESCRIPTORS:
                self._end(f"a message has {length} bytes and {fd_count} descriptors")
                return
            begin = start + _HEADER.size
            if len(self._received) < begin + length:
                break
            start = begin + length
            self._take(bytes(self._received[begin:start]), fd_count)
        del self._received[:start]
        if self.is_open and self._received_fds and not self._received:
            self._end("descriptors came that belong to no message")

    def _take(self, body: bytes, fd_count: int) -> None:
        fds = self._received_fds.popleft() if fd_count and self._received_fds else []
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            _close_all(fds)
            self._end(f"a message cannot be read: {error}")
            return
        if len(fds) > fd_count:
            _close_all(fds)
            self._end(f"{len(fds)} descriptors came instead of {fd_count}")
            return
        try:
            self._on_message(message, fds)
        except Exception:
            _log.exception("fault while handling a message")
            self._end(f"{type(message).__name__} could not be handled")


def _plain(value: object) -> object:
    """Return a value of a class that is a number's with a name, such as a duration, as that number."""
    if isinstance(value, float):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> Iterable[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            yield from numbers


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
