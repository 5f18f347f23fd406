"""Many datagrams with one system call: recvmmsg and sendmmsg, called through ctypes with arrays that are set up once.

Around each datagram is its envelope: the socket address of the other side, then the control message (packet info), both
as the kernel has them. Only memory that was needed is resident: slots hold the largest datagram, mostly unused.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache

from userspace_proxy.dataplane.packet_info import CONTROL_BYTES, ControlMessage

BATCH = 64
"""How many datagrams one call takes at most. 128 and 256 were no faster."""

MAX_DATAGRAM = 65535

ClientAddress = tuple[str, int] | tuple[str, int, int, int]

_ADDRESS_BYTES = 28  # of sockaddr_in6; Linux takes that much for a sockaddr_in too
_CONTROL_AT = 32
_ENVELOPE_BYTES = _CONTROL_AT + CONTROL_BYTES
_SLOT_BYTES = MAX_DATAGRAM + 65  # no power of two: the beginnings of all slots would compete for the same cache lines

_FAMILY = struct.Struct("=H")
_INET = struct.Struct("!2xH4s")
_INET6 = struct.Struct("!2xHI16s")
_SCOPE = struct.Struct("=I")
_SCOPE_AT = 24
_CONTROL_HEADER = struct.Struct("@Nii")
_CONTROL_DATA_AT = _CONTROL_AT + socket.CMSG_LEN(0)


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Message(ctypes.Structure):  # msghdr
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _SizedMessage(ctypes.Structure):  # mmsghdr
    _fields_ = (("message", _Message), ("size", ctypes.c_uint))


_HEADER_BYTES = ctypes.sizeof(_SizedMessage)
_VECTOR_BYTES = ctypes.sizeof(_IoVector)
_WORD = ctypes.sizeof(ctypes.c_ulong)  # which is a size_t on Linux
_HEADER_WORDS, _CONTROL_LENGTH_WORD = _HEADER_BYTES // _WORD, _Message.control_length.offset // _WORD
_VECTOR_WORDS, _LENGTH_WORD = _VECTOR_BYTES // _WORD, _IoVector.length.offset // _WORD


class _Arrays:
    """What the kernel is told about: headers, envelopes and slots for `BATCH` datagrams."""

    def __init__(self) -> None:
        # An anonymous mapping: its pages come when they are touched, and slices of it are bytes.
        self.memory = mmap.mmap(-1, BATCH * (_ENVELOPE_BYTES + _SLOT_BYTES))
        self.view = memoryview(self.memory)
        self.headers = memoryview(bytearray(BATCH * _HEADER_BYTES))
        self.vectors = memoryview(bytearray(BATCH * _VECTOR_BYTES))
        self.address = _address_of(self.headers)
        memory, vectors = _address_of(self.memory), _address_of(self.vectors)
        for number in range(BATCH):
            vector = _IoVector.from_buffer(self.vectors, number * _VECTOR_BYTES)
            vector.base, vector.length = memory + _slot_at(number), MAX_DATAGRAM
            message = _SizedMessage.from_buffer(self.headers, number * _HEADER_BYTES).message
            message.name, message.name_length = memory + number * _ENVELOPE_BYTES, _ADDRESS_BYTES
            message.control, message.control_length = message.name + _CONTROL_AT, CONTROL_BYTES
            message.vectors, message.vector_count = vectors + number * _VECTOR_BYTES, 1


class ReceiveBatch:
    """Receives the datagrams that wait at a socket. For any number of sockets, one after the other."""

    def __init__(self) -> None:
        self._arrays = arrays = _Arrays()
        self._recvmmsg = _libc_functions()[0]
        self._fresh_headers = bytes(arrays.headers)
        self._no_envelopes = bytes(BATCH * _ENVELOPE_BYTES)
        self._sizes = arrays.headers.cast("I")
        self._places = [
            (
                slice(number * _ENVELOPE_BYTES, (number + 1) * _ENVELOPE_BYTES),
                _slot_at(number),
                (number * _HEADER_BYTES + _SizedMessage.size.offset) // self._sizes.itemsize,
            )
            for number in range(BATCH)
        ]

    def receive(self, fd: int) -> list[tuple[bytes, bytes]]:
        """Return up to `BATCH` datagrams, each with its envelope before it. Raises OSError."""
        arrays, sizes = self._arrays, self._sizes
        count = self._recvmmsg(fd, arrays.address, BATCH, 0, None)
        if count < 0:
            raise _error(ctypes.get_errno())
        memory = arrays.memory
        received = [(memory[envelope], memory[at : at + sizes[size]]) for envelope, at, size in self._places[:count]]
        # The kernel has shortened the lengths in the headers; envelopes of one client must be equal in every byte.
        arrays.headers[: count * _HEADER_BYTES] = self._fresh_headers[: count * _HEADER_BYTES]
        arrays.view[: count * _ENVELOPE_BYTES] = self._no_envelopes[: count * _ENVELOPE_BYTES]
        return received


class SendBatch:
    """Collects up to `BATCH` datagrams and sends them from one socket."""

    def __init__(self) -> None:
        self._arrays = arrays = _Arrays()
        self._sendmmsg = _libc_functions()[1]
        self._slots = [arrays.view[at : at + MAX_DATAGRAM] for at in map(_slot_at, range(BATCH))]
        self._vector_words = arrays.vectors.cast("L")
        self._header_words = arrays.headers.cast("L")
        self.count = 0
        """How many datagrams it has now."""

    def receive_from(self, sock: socket.SocketType, envelope: bytes) -> int:
        """Add the datagram that the socket receives, and return its size. Raises OSError, and then adds nothing."""
        number = self.count
        size = sock.recv_into(self._slots[number])
        at = number * _ENVELOPE_BYTES
        self._arrays.view[at : at + len(envelope)] = envelope
        self._vector_words[number * _VECTOR_WORDS + _LENGTH_WORD] = size
        self._header_words[number * _HEADER_WORDS + _CONTROL_LENGTH_WORD] = len(envelope) - _CONTROL_AT
        self.count = number + 1
        return size

    def send(self, fd: int) -> int:
        """Send all that was added, and return how many of it failed.

        The kernel stops before a datagram that it cannot send, and gives the reason when that is the first one.
        """
        done = failed = 0
        while done < self.count:
            sent = self._sendmmsg(fd, self._arrays.address + done * _HEADER_BYTES, self.count - done, 0)
            if sent < 0:
                failed += 1
            done += max(sent, 1)
        self.count = 0
        return failed


def seal(client: ClientAddress, control: ControlMessage | None) -> bytes:
    """Return the envelope of a datagram to this client."""
    host, port, *rest = client
    if rest:
        flow, scope = rest
        address = _INET6.pack(port, flow, socket.inet_pton(socket.AF_INET6, host)) + _SCOPE.pack(scope)
        family = socket.AF_INET6
    else:
        address, family = _INET.pack(port, socket.inet_aton(host)), socket.AF_INET
    name = (_FAMILY.pack(family) + address[2:]).ljust(_CONTROL_AT, b"\0")
    if control is None:
        return name
    level, kind, data = control
    header = _CONTROL_HEADER.pack(socket.CMSG_LEN(len(data)), level, kind)
    return name + (header.ljust(socket.CMSG_LEN(0), b"\0") + data).ljust(CONTROL_BYTES, b"\0")


def unseal(envelope: bytes) -> tuple[ClientAddress, list[ControlMessage]]:
    """Return the sender of a datagram, as `socket.recvmsg` has it, and the control message that came with it."""
    (family,) = _FAMILY.unpack_from(envelope)
    client: ClientAddress
    if family == socket.AF_INET6:
        port, flow, packed = _INET6.unpack_from(envelope)
        (scope,) = _SCOPE.unpack_from(envelope, _SCOPE_AT)
        client = (socket.inet_ntop(socket.AF_INET6, packed), port, flow, scope)
    else:
        port, packed = _INET.unpack_from(envelope)
        client = (socket.inet_ntoa(packed), port)
    length, level, kind = _CONTROL_HEADER.unpack_from(envelope, _CONTROL_AT)
    if not length:
        return client, []
    return client, [(level, kind, envelope[_CONTROL_DATA_AT : _CONTROL_AT + length])]


@cache
def _libc_functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Return recvmmsg and sendmmsg. Raises OSError where the C library or the kernel lacks them."""
    if sys.platform != "linux":  # others that have them have other structures
        raise _error(errno.ENOSYS)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        recvmmsg, sendmmsg = libc.recvmmsg, libc.sendmmsg
    except AttributeError:
        raise _error(errno.ENOSYS) from None
    recvmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
    sendmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
    for call, arguments in ((recvmmsg, (-1, None, 0, 0, None)), (sendmmsg, (-1, None, 0, 0))):
        if call(*arguments) < 0 and ctypes.get_errno() != errno.EBADF:  # ENOSYS, or EPERM from a system call filter
            raise _error(ctypes.get_errno())
    return recvmmsg, sendmmsg


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _slot_at(number: int) -> int:
    return BATCH * _ENVELOPE_BYTES + number * _SLOT_BYTES


def _address_of(buffer: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
