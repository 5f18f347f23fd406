"""The last stage of a connection whose other side is dead: the survivor gets all its bytes before it learns of it.

Closing at once would not do. SO_LINGER 0 discards what the kernel has not sent yet, and so does a plain close while
there is unread input. So: wait until the survivor's kernel has acknowledged every byte, then close.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass

from userspace_proxy.dataplane.poller import Poller
from userspace_proxy.dataplane.sockets import borrowed, is_closed, reset_on_close
from userspace_proxy.dataplane.sweeper import Sweeper

_INTERVAL_S = 0.01
_IS_LINUX = sys.platform == "linux"
_SO_NWRITE = 0x1024  # macOS


@dataclass(frozen=True, slots=True, eq=False)
class Parting:
    """A surviving descriptor. `reset` tells whether it ends with a reset or is simply closed."""

    fd: int
    family: int
    reset: bool
    deadline: float
    on_closed: Callable[[], None]


class Partings:
    """Descriptors that are closed as soon as what was written to them has arrived, at the latest after `timeout_s`."""

    def __init__(self, poller: Poller, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._poller = poller
        self._loop = loop
        self.timeout_s = timeout_s
        self._waiting: Sweeper[Parting] = Sweeper(loop, _INTERVAL_S, self._close_if_due)

    def add(self, fd: int, family: int, *, reset: bool, on_closed: Callable[[], None]) -> None:
        """Take over a watched descriptor, close it in due time, then call `on_closed`."""
        parting = Parting(fd, family, reset, self._loop.time() + self.timeout_s, on_closed)
        self._poller.unwatch(fd)
        if not self._close_if_due(parting, self._loop.time()):
            self._waiting.add(parting)

    def close_all(self) -> None:
        """Close all at once, whatever has arrived."""
        for parting in self._waiting.clear():
            self._close(parting)

    def _close_if_due(self, parting: Parting, now: float) -> bool:
        if now < parting.deadline and unacknowledged(parting.fd, parting.family):
            return False
        self._close(parting)
        return True

    def _close(self, parting: Parting) -> None:
        if parting.reset:
            with borrowed(parting.fd, parting.family) as sock:
                reset_on_close(sock)
        self._poller.close(parting.fd)
        parting.on_closed()


def unacknowledged(fd: int, family: int) -> int:
    """Return how many bytes the peer's kernel has not acknowledged, and still may. A FIN counts as one."""
    if not _IS_LINUX:
        with borrowed(fd, family) as sock:
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.TIOCOUTQ, count)
    if count[0] and is_closed(fd, family):  # a socket that was reset keeps its count
        return 0
    return count[0]
