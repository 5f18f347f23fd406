"""All relayed connections of a data path: how they begin, and what ends them beside their own two sides."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from userspace_proxy.dataplane.backends import Target
from userspace_proxy.dataplane.idle import IdleWatch
from userspace_proxy.dataplane.parting import Partings
from userspace_proxy.dataplane.poller import Poller
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.side import Side
from userspace_proxy.dataplane.sockets import borrowed, reset_on_close
from userspace_proxy.dataplane.splice import CAN_SPLICE, PipePool
from userspace_proxy.dataplane.sweeper import Sweeper
from userspace_proxy.dataplane.timeouts import TimeOuts


class Relay:
    """All relayed connections of a data path. `on_closed` is told of each that is closed."""

    def __init__(
        self,
        poller: Poller,
        loop: asyncio.AbstractEventLoop,
        settings: DataPlaneSettings,
        on_closed: Callable[[Target], None],
    ) -> None:
        self.poller = poller
        self.pipes = PipePool(settings.pipe_pool_bytes) if CAN_SPLICE and settings.use_splice else None
        self.timeouts = TimeOuts(loop)
        self._loop = loop
        self._settings = settings
        self._tell_closed = on_closed
        self._partings = Partings(poller, loop, settings.half_close_timeout_s)
        self._half_closed: Sweeper[Side] = Sweeper(loop, _sweep_interval_s(settings), self._close_if_silent)
        self._last_progress: dict[Side, tuple[int, float]] = {}  # bytes moved both ways, and when that was seen
        self._targets: dict[Side, Target] = {}  # by client side, for each connection that is not closed
        self._idle = IdleWatch(loop, self._targets, self._end_idle, settings.tcp_idle_timeout_s)

    def __len__(self) -> int:
        return len(self._targets)

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs, also for connections that are open."""
        self._settings = settings
        self._partings.timeout_s = settings.half_close_timeout_s
        self._half_closed.interval_s = _sweep_interval_s(settings)
        self._idle.reconfigure(settings.tcp_idle_timeout_s)

    def start(
        self, client_fd: int, client_family: int, backend: socket.SocketType, target: Target
    ) -> tuple[Side, Side]:
        """Relay between an accepted descriptor and a connected socket, both taken over.

        Returns the client's side and the backend's. The caller lets the poller watch them, in this order.
        """
        client = Side(self, client_fd, client_family, None, target.to_endpoint)
        server = Side(self, backend.fileno(), target.socket_family, backend, target.to_client)
        client.peer, server.peer = server, client
        self._targets[client] = target
        target.connections += 1
        target.open_connections += 1
        return client, server

    def close(self, side: Side) -> None:
        """Close both sockets. What was written to them still arrives, unless there is input that nobody read."""
        peer = side.peer
        client = self._forget(side)
        self.poller.close(side.release())
        self.poller.close(peer.release())
        self._on_closed(client)

    def part(self, survivor: Side, *, reset: bool) -> None:
        """Close the survivor's dead peer now, and the survivor, with a reset or without, when it has all its bytes."""
        gone = survivor.peer
        client = self._forget(survivor)
        family = survivor.family
        fd = survivor.release()
        self.poller.close(gone.release())
        self._partings.add(fd, family, reset=reset, on_closed=lambda: self._on_closed(client))

    def watch_half_closed(self, side: Side) -> None:
        """Close the connection when nothing has moved for the half-close time-out."""
        client = _client_of(side)
        self._last_progress[client] = (client.moved + client.peer.moved, self._loop.time())
        self._half_closed.add(client)

    def note_error(self, side: Side, error: OSError) -> None:
        """Count it where the peer of a socket has acknowledged nothing for too long."""
        if error.errno == errno.ETIMEDOUT:
            self.timeouts.note_peer(self._targets[_client_of(side)])

    def free_descriptors(self) -> None:
        """Close pipes that nobody uses."""
        if self.pipes is not None:
            self.pipes.trim()

    def close_all(self) -> None:
        """Close every connection at once."""
        self._idle.stop()
        self._partings.close_all()
        self._half_closed.clear()
        for client in list(self._targets):
            self.close(client)

    def _forget(self, side: Side) -> Side:
        client = _client_of(side)
        self._half_closed.discard(client)
        self._last_progress.pop(client, None)
        return client

    def _on_closed(self, client: Side) -> None:
        target = self._targets.pop(client)
        target.open_connections -= 1
        self._tell_closed(target)
        if not self._targets:
            self.free_descriptors()

    def _close_if_silent(self, client: Side, now: float) -> bool:
        moved, since = self._last_progress[client]
        moved_now = client.moved + client.peer.moved
        if moved_now != moved:
            self._last_progress[client] = (moved_now, now)
        elif now - since >= self._settings.half_close_timeout_s:
            self.timeouts.note_half_close(self._targets[client], self._settings.half_close_timeout_s)
            dead = next((side for side in (client, client.peer) if side.is_dead), None)
            if dead is not None:
                self.part(dead.peer, reset=not dead.ended)
            else:  # the one that has sent its end was not sent one: without a reset it would take this for it
                self.part(client if client.ended else client.peer, reset=True)
        return False

    def _end_idle(self, client: Side) -> None:
        """Close both sockets, each with a reset where its peer had not ended: a time-out is no clean end."""
        self.timeouts.note_idle(self._targets[client], self._settings.tcp_idle_timeout_s)
        for side in (client, client.peer):
            if not side.peer.ended:
                with borrowed(side.fd, side.family) as sock:
                    reset_on_close(sock)
        self.close(client)


def _client_of(side: Side) -> Side:
    return side if side.sock is None else side.peer


def _sweep_interval_s(settings: DataPlaneSettings) -> float:
    return min(5.0, max(0.02, settings.half_close_timeout_s / 10))
