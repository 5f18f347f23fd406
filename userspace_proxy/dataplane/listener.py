"""Accepts TCP connections on one address and sends each on its way."""

from __future__ import annotations

import socket
from os import set_blocking

from userspace_proxy.core.model import ListenAddress
from userspace_proxy.dataplane.backends import Backends
from userspace_proxy.dataplane.dial import Serve
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.poller import READABLE
from userspace_proxy.dataplane.sockets import OUT_OF_RESOURCES, bound_address, has_waiting_client, set_user_timeout

_ACCEPTS_PER_TURN = 64


class TcpListener:
    """One listening socket of one service port. Closing it leaves the connections alone that it accepted."""

    __slots__ = (
        "_accept",
        "_backends",
        "_engine",
        "_fd",
        "_is_paused",
        "_name",
        "_origin",
        "_serve",
        "_sock",
        "address",
    )

    def __init__(
        self, engine: Engine, serve: Serve, backends: Backends, asked: ListenAddress, sock: socket.socket
    ) -> None:
        self.address = bound_address(sock, asked)
        self._engine = engine
        self._serve = serve
        self._backends = backends
        self._sock = sock
        self._accept = sock._accept  # type: ignore[attr-defined]  # the bare descriptor (performance.md: 1.05)
        self._fd = sock.fileno()
        self._name = backends.name
        self._origin = (asked.scope, asked.family)
        self._is_paused = False
        self.reconfigure()
        engine.poller.watch(self._fd, self)

    def reconfigure(self) -> None:
        """Use the settings as they are now for clients that are not accepted yet."""
        self._sock.listen(self._engine.settings.listen_backlog)
        set_user_timeout(self._sock, self._engine.settings.tcp_user_timeout_s)  # accepted sockets inherit it

    def on_ready(self, events: int) -> None:
        """Connections wait to be accepted."""
        if self._is_paused:
            return
        room = self._engine.admission.room(self._name)
        if room:
            if self._accept_some(min(_ACCEPTS_PER_TURN, room)):
                self._engine.poller.defer(self._go_on)
        elif has_waiting_client(self._fd):
            self._pause()
            self._engine.admission.wait(self._name, self._take_turn)

    def fileno(self) -> int:
        """Return the descriptor that is listened on."""
        return self._fd

    def close(self) -> None:
        """Stop listening. Clients that wait to be accepted are refused."""
        if self._fd >= 0:
            self._engine.poller.unwatch(self._fd)  # closing it would not do where another process has a copy
            self._fd = -1
            self._engine.admission.leave(self._name, self._take_turn)
            self._engine.poller.close(self._sock.detach())

    def _accept_some(self, most: int) -> bool:
        """Accept up to so many connections. Return whether there may be more that can be accepted now."""
        accept, engine, serve = self._accept, self._engine, self._serve
        for _ in range(most):
            if engine.gate.is_closed:
                self._pause()
                engine.gate.wait(self._resume)
                return False
            try:
                fd, address = accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    engine.gate.close(error)
                else:
                    engine.accept_errors += 1
                continue  # that client is gone; others wait
            set_blocking(fd, False)
            engine.admission.admit(self._name)
            serve(self._backends, self._origin, fd, address[0])
        return True

    def _take_turn(self) -> bool:
        """Accept one connection although paused. Go on as usual when no other waits, which is false then."""
        if self._engine.gate.is_closed:
            self._engine.gate.wait(self._resume)
            return False
        self._accept_some(1)
        if has_waiting_client(self._fd):
            return True
        self._resume()
        return False

    def _pause(self) -> None:
        self._is_paused = True
        self._engine.poller.pause_reading(self._fd)

    def _resume(self) -> None:
        self._is_paused = False
        if self._fd >= 0:
            self._engine.poller.resume_reading(self._fd)
            self._go_on()

    def _go_on(self) -> None:
        if self._fd >= 0:
            self.on_ready(READABLE)
