"""Keeps workers going: starts each, asks it for reports, and replaces one whose process has ended or hangs.

A worker that does not answer gets no more clients after 5 s, and is ended after 30 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.handover import Start
from userspace_proxy.dataplane.served import Pending
from userspace_proxy.dataplane.worker_link import WorkerLink

HEARTBEAT_S = 0.25
STUCK_AFTER_S = 5.0
REPLACED_AFTER_S = 30.0

_IDLE_BEATS = 4
"""One that has nothing to do is asked at each of so many heartbeats only."""

_FORGET_AFTER_BEATS = 240
_FIRST_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 10.0

_log = logging.getLogger(__name__)


class KeeperOwner(Protocol):
    """What the keeper asks for, and tells."""

    def how_to_start(self, link: WorkerLink) -> Start:
        """Return how a worker is to work."""

    def on_started(self, link: WorkerLink) -> None:
        """A process has been started, and can be sent messages."""

    def on_ending(self, link: WorkerLink) -> None:
        """A worker's process has ended or is about to be, and its counts are still those of its last report."""

    def hand_on(self, pending: list[Pending]) -> None:
        """Clients that were not sent to a worker yet need another one."""


@dataclass(slots=True)
class _Conduct:
    """How a worker has behaved."""

    silent_s: float = 0.0
    failed_starts: int = 0
    restarts: int = 0
    restart: asyncio.TimerHandle | None = None


class WorkerKeeper:
    """Keeps the processes of these workers."""

    def __init__(self, engine: Engine, links: Sequence[WorkerLink], owner: KeeperOwner) -> None:
        self._loop = engine.loop
        self._loop_kind = type(engine.loop).__module__.partition(".")[0]
        self._owner = owner
        self._conduct = {link: _Conduct() for link in links}
        self._beats = 0
        self._beat_at = self._loop.time()
        for link in links:
            self._start(link)
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)

    def restarts(self, link: WorkerLink) -> int:
        """Return how often the process of a worker was replaced."""
        return self._conduct[link].restarts

    def replace_ended(self, link: WorkerLink) -> None:
        """Replace a worker whose process has ended by itself."""
        what, count = link.end_text(), link.open_connections
        _log.error("%s (process %d) %s, and its %d connections with it", link.name, link.process_id, what, count)
        self._replace(link)

    def close(self) -> None:
        """End all workers at once, and wait until they have ended."""
        self._heartbeat.cancel()
        for link, conduct in self._conduct.items():
            if conduct.restart is not None:
                conduct.restart.cancel()
            link.close()

    def _start(self, link: WorkerLink) -> None:
        conduct = self._conduct[link]
        conduct.restart, conduct.silent_s = None, 0.0
        try:
            link.start(self._loop_kind, self._owner.how_to_start(link))
        except OSError as error:
            _log.error("%s cannot be started: %s", link.name, error.strerror)
            self._start_later(link)
        else:
            self._owner.on_started(link)

    def _start_later(self, link: WorkerLink) -> None:
        conduct = self._conduct[link]
        delay_s = min(_MAX_BACK_OFF_S, _FIRST_BACK_OFF_S * 2**conduct.failed_starts)
        conduct.failed_starts += 1
        conduct.restart = self._loop.call_later(delay_s, self._start, link)

    def _replace(self, link: WorkerLink) -> None:
        """Start another process for a worker: at once where the last one had started, else after a while."""
        conduct, had_started = self._conduct[link], link.is_ready
        self._owner.on_ending(link)
        pending = link.take_pending()
        link.close()
        conduct.restarts += 1
        if had_started:
            conduct.failed_starts = 0
            self._start(link)
        else:
            self._start_later(link)
        self._owner.hand_on(pending)

    def _beat(self) -> None:
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)
        now = self._loop.time()
        elapsed_s = min(now - self._beat_at, 2 * HEARTBEAT_S)  # more means that this process stood still, not a worker
        self._beat_at = now
        self._beats += 1
        for link in self._conduct:
            if link.is_running:
                self._look_after(link, elapsed_s)
                if self._beats % _FORGET_AFTER_BEATS == 0:
                    link.forget_unused()

    def _look_after(self, link: WorkerLink, elapsed_s: float) -> None:
        conduct = self._conduct[link]
        if not link.is_silent:
            if link.is_stuck:
                link.is_stuck = False
                _log.warning("%s answers again", link.name)
            conduct.silent_s = 0.0
            if link.is_busy or self._beats % _IDLE_BEATS == 0:
                link.ask()
            return
        conduct.silent_s += elapsed_s
        what = f"{link.name} (process {link.process_id}) has not answered for {conduct.silent_s:.3g} s"
        if conduct.silent_s >= REPLACED_AFTER_S:
            _log.error("%s: it is ended, and its %d connections with it", what, link.open_connections)
            self._replace(link)
        elif conduct.silent_s >= STUCK_AFTER_S and not link.is_stuck:
            _log.warning("%s: it gets no more connections until it does", what)
            link.is_stuck = True
            link.stop_waiting()
            self._owner.hand_on(link.take_pending())
