"""Sockets as the data path wants them: non-blocking, one address family each, with the options that are inherited."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace

from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import IPFamily, ListenAddress, family_of

OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LOCAL_FAULTS = OUT_OF_RESOURCES | {errno.EADDRNOTAVAIL, errno.EAGAIN}
"""Why a connect can fail without a word about the endpoint."""

BACKLOG = 4096
KEEP_ALIVE_S = 15
UDP_BUFFER_BYTES = 4 << 20  # performance.md: with the default 6 % of the datagrams of 1,000 flows are lost

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds

_TCP_CLOSE = 7  # Linux: a struct tcp_info starts with the state
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
_KEEP_IDLE = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # Linux, macOS

_NON_BLOCKING = getattr(socket, "SOCK_NONBLOCK", 0) | getattr(socket, "SOCK_CLOEXEC", 0)

SOCKET_FAMILY = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}


def listen_tcp(address: ListenAddress) -> socket.socket:
    """Return a listening socket. Accepted sockets inherit its options, except O_NONBLOCK. Raises ListenFailed."""
    sock = _new_socket(address, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_stream_options(sock)
        sock.bind((address.address, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise listen_failed(address, error) from error
    return sock


def bind_udp(address: ListenAddress) -> socket.socket:
    """Return a bound datagram socket with large buffers. Raises ListenFailed."""
    sock = _new_socket(address, socket.SOCK_DGRAM)
    try:
        grow_buffers(sock)
        sock.bind((address.address, address.port))
    except OSError as error:
        sock.close()
        raise listen_failed(address, error) from error
    return sock


def new_stream_socket(family: int) -> socket.SocketType:
    """Return a non-blocking TCP socket. Raises OSError."""
    return _non_blocking(family, socket.SOCK_STREAM)


def new_datagram_socket(family: int) -> socket.SocketType:
    """Return a non-blocking UDP socket. Raises OSError."""
    return _non_blocking(family, socket.SOCK_DGRAM)


def bound_address(sock: socket.socket, asked: ListenAddress) -> ListenAddress:
    """Return where the socket is bound: the address asked for, with the port that the system chose."""
    port: int = sock.getsockname()[1]
    return replace(asked, port=port)


def set_stream_options(sock: socket.SocketType, user_timeout_s: float = 0.0) -> None:
    """No Nagle delay; keep-alive probes after 15 s of silence, every 15 s; a user time-out if there is to be one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if _KEEP_IDLE is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _KEEP_IDLE, KEEP_ALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_S)
    if user_timeout_s:
        set_user_timeout(sock, user_timeout_s)


def set_user_timeout(sock: socket.SocketType, user_timeout_s: float) -> None:
    """Let the connection fail when the peer has acknowledged nothing for so long; 0 leaves that to the system.

    Does nothing where the system has no such option.
    """
    if _USER_TIMEOUT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, math.ceil(user_timeout_s * 1000))


def grow_buffers(sock: socket.socket) -> None:
    """Ask for 4 MiB each way: beyond the system's maximum where privileged, else up to it."""
    options = [socket.SO_RCVBUF, socket.SO_SNDBUF]
    if sys.platform == "linux":
        options += [_SO_RCVBUFFORCE, _SO_SNDBUFFORCE]
    for option in options:
        with contextlib.suppress(OSError):  # forcing needs privilege; macOS refuses what is too large
            sock.setsockopt(socket.SOL_SOCKET, option, UDP_BUFFER_BYTES)


@contextlib.contextmanager
def borrowed(fd: int, family: int) -> Iterator[socket.SocketType]:
    """Lend a socket object for a stream descriptor that is kept as a number. Costs a getsockname."""
    sock = socket.SocketType(family, socket.SOCK_STREAM, 0, fd)  # as in _non_blocking
    try:
        yield sock
    finally:
        sock.detach()


def is_closed(fd: int, family: int) -> bool:
    """Tell whether a TCP connection was reset or is over both ways. Linux only.

    POLLHUP would not do: it also means two half-closes with bytes still on their way.
    """
    with borrowed(fd, family) as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


def has_waiting_client(fd: int) -> bool:
    """Tell whether a connection waits to be accepted from a listening descriptor."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def is_connected_to_itself(sock: socket.SocketType, port: int) -> bool:
    """Tell whether a socket reached itself: nobody listened at the port, and the system chose that one for it, too."""
    own: tuple[str, int] = sock.getsockname()
    return own[1] == port and own == sock.getpeername()


def reset_on_close(sock: socket.SocketType) -> None:
    """Let closing the socket reset the connection, of which then nothing stays, not even its local port."""
    with contextlib.suppress(OSError):  # it is dead already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


def has_left(fd: int, family: int) -> bool:
    """Tell whether the peer has reset the connection, or has ended it with nothing left to read."""
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):  # reads would still find what came before a reset
        return True
    with borrowed(fd, family) as sock:
        try:
            return not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def error_name(error: OSError) -> str:
    """Return the symbolic name of the error, such as ECONNREFUSED."""
    return errno.errorcode.get(error.errno or 0, "unknown error")


def _non_blocking(family: int, kind: int) -> socket.SocketType:
    # SocketType, the base of socket.socket, spares the Python-level constructor for each connection.
    sock = socket.SocketType(family, kind | _NON_BLOCKING)
    if not _NON_BLOCKING:
        sock.setblocking(False)
    return sock


def _new_socket(address: ListenAddress, kind: int) -> socket.socket:
    family = SOCKET_FAMILY[family_of(address.address)]
    try:
        sock = socket.socket(family, kind)
    except OSError as error:
        raise listen_failed(address, error) from error
    sock.setblocking(False)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


def listen_failed(address: ListenAddress, error: OSError) -> ListenFailed:
    """Return what is raised where the system refuses a listening socket."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ListenFailed(str(address), reason[:1].lower() + reason[1:], error_name(error))
