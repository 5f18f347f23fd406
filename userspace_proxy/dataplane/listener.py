"""Accepts TCP connections on one address and sends each on its way."""

from __future__ import annotations

import socket
from os import set_blocking

from userspace_proxy.core.model import ListenAddress
from userspace_proxy.dataplane.backends import Backends
from userspace_proxy.dataplane.dial import Dial
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.poller import READABLE
from userspace_proxy.dataplane.sockets import OUT_OF_RESOURCES, bound_address

_ACCEPTS_PER_TURN = 64


class TcpListener:
    """One listening socket of one service port. Closing it leaves the connections alone that it accepted."""

    __slots__ = ("_accept", "_backends", "_engine", "_fd", "_is_waiting", "_origin", "_sock", "address")

    def __init__(self, engine: Engine, backends: Backends, asked: ListenAddress, sock: socket.socket) -> None:
        self.address = bound_address(sock, asked)
        self._engine = engine
        self._backends = backends
        self._sock = sock
        self._accept = sock._accept  # type: ignore[attr-defined]  # the bare descriptor (performance.md: 1.05)
        self._fd = sock.fileno()
        self._origin = (asked.scope, asked.family)
        self._is_waiting = False
        engine.poller.watch(self._fd, self)

    def on_ready(self, events: int) -> None:
        """Connections wait to be accepted."""
        accept, engine = self._accept, self._engine
        for _ in range(_ACCEPTS_PER_TURN):
            if engine.gate.is_closed:
                self._wait()
                return
            try:
                fd, address = accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    engine.gate.close(error)
                else:
                    engine.accept_errors += 1
                continue  # that client is gone; others wait
            set_blocking(fd, False)
            Dial(engine, self._backends, self._origin, fd, address[0]).start()
        engine.poller.defer(self._go_on)

    def fileno(self) -> int:
        """Return the descriptor that is listened on."""
        return self._fd

    def close(self) -> None:
        """Stop listening. Clients that wait to be accepted are refused."""
        if self._fd >= 0:
            self._engine.poller.unwatch(self._fd)  # closing it would not do where another process has a copy
            self._fd = -1
            self._engine.poller.close(self._sock.detach())

    def _wait(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._engine.poller.pause_reading(self._fd)
            self._engine.gate.wait(self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        if self._fd >= 0:
            self._engine.poller.resume_reading(self._fd)
            self._go_on()

    def _go_on(self) -> None:
        if self._fd >= 0:
            self.on_ready(READABLE)
