"""The control process's way to the data process and to the supervisor."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from userspace_proxy.core.balancer import Balancer, RoundRobin
from userspace_proxy.dataplane.interface import DataPath, Notices
from userspace_proxy.dataplane.remote.plane import RemotePlane
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.metrics.processes import Processes
from userspace_proxy.node.systemd import READY
from userspace_proxy.supervisor.lifeline import Lifeline
from userspace_proxy.supervisor.protocol import Word

_RECONNECT_S = 1.0  # longer than it takes to notice that a process has died, and to start another one


class ControlSide:
    """Brings the data path and the data processes together that the supervisor tells of. `on_end`: it is gone."""

    def __init__(self, descriptor: int, on_end: Callable[[], object]) -> None:
        self._lifeline = Lifeline(descriptor, on_peer=self._meet, on_end=on_end)
        self._peer: socket.socket | None = None  # met before there was a data path for it
        self._plane: RemotePlane | None = None
        self._logging: tuple[int, str] | None = None

    def make_data_path(
        self, settings: DataPlaneSettings, make_balancer: Callable[[], Balancer], notices: Notices
    ) -> DataPath:
        """Return the data path in the data process. Raises ValueError for a balancer that is not built in."""
        if make_balancer is not RoundRobin:
            raise ValueError("a balancer of one's own works only where the data path is in the same process")
        self._plane = RemotePlane(settings, notices, outlives=True, on_lost=self._connect_again_soon)
        if self._logging is not None:
            self._plane.set_up_logging(*self._logging)
        if self._peer is not None:
            self._plane.attach(self._peer)
            self._peer = None
        return self._plane

    def set_up_logging(self, verbosity: int, log_format: str) -> None:
        """Let the data process log like this."""
        self._logging = verbosity, log_format
        if self._plane is not None:
            self._plane.set_up_logging(verbosity, log_format)

    def notify(self, state: str) -> None:
        """Let the supervisor tell systemd that all is ready. Of the end it knows by itself."""
        if state == READY:
            self._lifeline.tell(Word.READY)

    def processes(self) -> Processes:
        """Return what the supervisor told last."""
        news = self._lifeline.news
        return Processes(news.pids, news.restarts, news.is_data_stuck)

    def close(self) -> None:
        self._lifeline.close()
        if self._peer is not None:
            self._peer.close()

    def _meet(self, peer: socket.socket) -> None:
        if self._plane is not None:
            self._plane.attach(peer)
            return
        if self._peer is not None:
            self._peer.close()
        self._peer = peer

    def _connect_again_soon(self) -> None:
        asyncio.get_running_loop().call_later(_RECONNECT_S, self._connect_again)

    def _connect_again(self) -> None:
        if self._plane is not None and not self._plane.is_attached:
            self._lifeline.tell(Word.RECONNECT)
