"""From an accepted connection to a relayed one: the retry ladder of the userspace mode, in which nobody waits.

Up to four attempts, each with its own time limit and at another endpoint. A fault of this host (no descriptor, no local
port) is no attempt: the same endpoint is tried again in a moment.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.core.model import Endpoint
from userspace_proxy.dataplane.backends import Backends, Origin, Target
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.sockets import (
    LOCAL_FAULTS,
    OUT_OF_RESOURCES,
    SOCKET_FAMILY,
    is_connected_to_itself,
    new_stream_socket,
    reset_on_close,
    set_stream_options,
)
from userspace_proxy.dataplane.waiting import HeldConnection

Serve = Callable[[Backends, Origin, int, str], None]
"""Takes over the descriptor of an accepted client, whose address is the last argument, and sends it on its way."""

_CONNECTED = frozenset({0, errno.EISCONN})
_UNDER_WAY = frozenset({errno.EINPROGRESS, errno.EALREADY, errno.EINTR})
_LOCAL_RETRY_S = 0.1
_LOCAL_LIMIT_S = 30.0

_log = logging.getLogger(__name__)


class Dial:
    """The search for an endpoint that answers one client. Owns the client's descriptor until it is relayed."""

    __slots__ = (
        "_backends",
        "_client",
        "_client_fd",
        "_engine",
        "_give_up_at",
        "_held",
        "_origin",
        "_sock",
        "_target",
        "_timer",
        "_tried",
    )

    _target: Target

    def __init__(self, engine: Engine, backends: Backends, origin: Origin, client_fd: int, client: str) -> None:
        self._engine = engine
        self._backends = backends
        self._origin = origin
        self._client_fd = client_fd
        self._client = client
        self._tried: tuple[Endpoint, ...] = ()
        self._sock: socket.SocketType | None = None  # set while a connect is under way
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_at: float | None = None  # set at the first fault of this host
        self._held: HeldConnection | None = None  # made when it has to wait for pods

    def start(self) -> None:
        """Pick an endpoint and connect to it; while one refuses at once, go on with the next."""
        while len(self._tried) < len(self._engine.settings.dial_ladder_s):
            try:
                now = self._engine.loop.time()
                self._target = self._backends.pick(self._origin, self._client, now=now, tried=self._tried)
            except NoEndpoints as error:
                if not (self._backends.is_idled and self._engine.waiting.hold(self._place())):
                    self._abandon(str(error))
                return
            if self._connect():
                return
        self._run_out()

    def go_on(self) -> None:
        """Start anew after the client was held."""
        self._tried, self._give_up_at = (), None
        self.start()

    def on_ready(self, events: int) -> None:
        """The connect has come to an end; or this is a late event of the descriptor's former life."""
        assert self._sock is not None
        result = self._sock.connect_ex(self._target.socket_address)
        if result in _CONNECTED:
            if is_connected_to_itself(self._sock, self._target.endpoint.port):
                reset_on_close(self._sock)
                self._try_next(errno.ECONNREFUSED)
                return
            sock, self._sock = self._sock, None
            self._leave()
            self._note_success()
            client, server = self._engine.relay.start(
                self._client_fd, SOCKET_FAMILY[self._origin[1]], sock, self._target
            )
            self._engine.poller.watch(client.fd, client)
            self._engine.poller.rewatch(server.fd, server)
        elif result not in _UNDER_WAY:
            self._try_next(result)

    def _connect(self) -> bool:
        """Connect without waiting. Return False when the endpoint refused, so that the next one is due."""
        target, engine = self._target, self._engine
        try:
            sock = new_stream_socket(target.socket_family)
        except OSError as error:
            self._wait_for_this_host(error)
            return True
        result = sock.connect_ex(target.socket_address)
        if result == errno.EINPROGRESS:  # asking again spares an event where it was quick (performance.md: +10 %)
            result = sock.connect_ex(target.socket_address)
        if result in _CONNECTED and is_connected_to_itself(sock, target.endpoint.port):
            reset_on_close(sock)
            result = errno.ECONNREFUSED
        if result in _CONNECTED:
            set_stream_options(sock, engine.settings.tcp_user_timeout_s)
            self._note_success()
            client, server = engine.relay.start(self._client_fd, SOCKET_FAMILY[self._origin[1]], sock, target)
            engine.poller.watch(client.fd, client)
            engine.poller.watch(server.fd, server)
            return True
        if result in _UNDER_WAY:
            set_stream_options(sock, engine.settings.tcp_user_timeout_s)
            self._sock = sock
            engine.dials.add(self)
            engine.poller.watch_writable(sock.fileno(), self)
            limit_s = engine.settings.dial_ladder_s[len(self._tried)]
            self._timer = engine.loop.call_later(limit_s, self._try_next, errno.ETIMEDOUT)
            return True
        sock.close()
        if result in LOCAL_FAULTS:
            self._wait_for_this_host(OSError(result, os.strerror(result)))
            return True
        self._note_failure(result)
        return False

    def _try_next(self, reason: int) -> None:
        """The connect that was under way has failed."""
        self._leave()
        if reason in LOCAL_FAULTS:
            self._wait_for_this_host(OSError(reason, os.strerror(reason)))
        else:
            self._note_failure(reason)
            self.start()

    def _note_success(self) -> None:
        _log.debug("%s: %s is connected to %s", self._backends.name, self._client, self._target.endpoint)

    def _note_failure(self, reason: int) -> None:
        endpoint = self._target.endpoint
        self._tried = (*self._tried, endpoint)
        self._target.dial_failures += 1
        _log.debug("%s: cannot reach %s: %s", self._backends.name, endpoint, os.strerror(reason))
        self._engine.tell_dial_failure(self._backends.name, endpoint)

    def _wait_for_this_host(self, error: OSError) -> None:
        engine = self._engine
        now = engine.loop.time()
        if self._give_up_at is None:
            self._give_up_at = now + _LOCAL_LIMIT_S
        if now >= self._give_up_at:
            self._abandon(f"this host cannot open a connection: {error.strerror}")
            return
        engine.dials.add(self)
        if error.errno in OUT_OF_RESOURCES:
            engine.gate.close(error)
            engine.gate.wait(self._try_again)
        else:
            self._timer = engine.loop.call_later(_LOCAL_RETRY_S, self._try_again)

    def _try_again(self) -> None:
        """Go on where a fault of this host stopped us: at the same endpoint, if it still is one."""
        if self._client_fd < 0:
            return
        self._leave()
        if not self._backends.serves(self._origin, self._target.endpoint) or not self._connect():
            self.start()

    def cancel(self) -> None:
        """End the dial and close the client."""
        self._leave()
        self._engine.poller.close(self._client_fd)
        self._client_fd = -1
        self._release()

    def _place(self) -> HeldConnection:
        """Return what stands for the client in the waiting room: the same each time, as its time goes on."""
        if self._held is None:
            family = SOCKET_FAMILY[self._origin[1]]
            self._held = HeldConnection(self._engine.waiting, self._backends.name, self._client_fd, family, self)
        return self._held

    def _run_out(self) -> None:
        """No attempt is left: wait for endpoints that may be about to listen, or close the client."""
        if not self._engine.waiting.hold_for_retry(self._place()):
            self._abandon(f"no endpoint could be reached, the last was {self._target.endpoint}")

    def _abandon(self, why: str) -> None:
        self._engine.abandoned += 1
        self._engine.complain(self._backends.name, f"a connection was closed, as {why}")
        self.cancel()

    def _release(self) -> None:
        """The client has ended before it was relayed."""
        self._engine.admission.released(self._backends.name)

    def _leave(self) -> None:
        """Stop waiting, and drop the connect that is under way."""
        self._engine.dials.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sock is not None:
            self._engine.poller.close(self._sock.detach())
            self._sock = None
