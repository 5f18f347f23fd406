"""A child's end of its connection to the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import msgspec

from userspace_proxy.supervisor.protocol import ALIVE_INTERVAL_S, MAX_PACKET_BYTES, News, Word


class Lifeline:
    """Hears from the supervisor, at the descriptor that was inherited.

    `on_peer` gets each new connection to the other child. `on_end` is called when the supervisor is gone.
    """

    def __init__(
        self, descriptor: int, *, on_peer: Callable[[socket.socket], None], on_end: Callable[[], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = socket.socket(fileno=descriptor)
        self._sock.setblocking(False)
        self._sock.set_inheritable(False)
        self._on_peer = on_peer
        self._on_end = on_end
        self.news = News({}, {})
        self._loop.add_reader(self._sock, self._hear)

    def tell(self, word: Word) -> None:
        """Tell the supervisor, unless it is gone or does not listen."""
        with contextlib.suppress(OSError):
            self._sock.send(word.value)

    async def tell_alive_forever(self) -> None:
        """Tell it again and again, which stops when the event loop is stuck."""
        while True:
            self.tell(Word.ALIVE)
            await asyncio.sleep(ALIVE_INTERVAL_S)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _hear(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._loop.remove_reader(self._sock)
            self._on_end()
            return
        self.news = msgspec.json.decode(data, type=News)
        for fd in fds:
            self._on_peer(socket.socket(fileno=fd))
