"""Several processes for the bytes: this one accepts, chooses the endpoint, and hands the client to the worker that has
the fewest.

So turns and affinity are exact over all workers, and what they count is added up here.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import resource
import sys
from dataclasses import replace
from typing import TypeVar

from userspace_proxy.core.counters import Counters, LiveCounters, WakingCounters, WorkerReading
from userspace_proxy.core.errors import NoEndpoints
from userspace_proxy.dataplane.backends import Backends, Origin
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.handed_dial import WaitingDial
from userspace_proxy.dataplane.handover import (
    ORIGINS,
    Complained,
    Configure,
    DialFailed,
    HostCounts,
    NeedsPods,
    Report,
    Said,
    Start,
    WantsNext,
)
from userspace_proxy.dataplane.remote_datagrams import RemoteDatagrams
from userspace_proxy.dataplane.served import Pending
from userspace_proxy.dataplane.settings import DataPlaneSettings, default_max_sessions
from userspace_proxy.dataplane.worker_keeper import WorkerKeeper
from userspace_proxy.dataplane.worker_link import Notice, WorkerLink

_SAID_FOR_S = 10.0
_OWN_DESCRIPTORS = 40
"""What a worker has beside two for each client."""

CountersT = TypeVar("CountersT", Counters, LiveCounters)


class Workers:
    """The workers of a data path, and all that is counted there."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._links = [WorkerLink(f"worker-{index}", engine, self) for index in range(count)]
        self._max_clients = _max_clients()
        self._past = HostCounts()
        self.datagrams = RemoteDatagrams(self._links)
        self._said: dict[tuple[str, str], tuple[WorkerLink, float]] = {}
        self._is_flush_due = False
        self._link_of_held: WorkerLink | None = None
        self._is_new = True
        engine.gate.may_open = self.has_room
        self._keeper = WorkerKeeper(engine, self._links, self)

    @property
    def clients(self) -> int:
        """How many TCP clients the workers have, relayed or on the way to that."""
        return sum(link.clients for link in self._links)

    def serve(self, backends: Backends, origin: Origin, client_fd: int, client: str) -> None:
        """Choose an endpoint for a client, and hand both to a worker; where none can take it, serve it here."""
        self._hand_over(self._choose(), backends, origin, client_fd, client)

    def serve_held(self, backends: Backends, origin: Origin, client_fd: int, client: str) -> None:
        """The same for a client that was held. One worker gets all that go on together, and so keeps their order."""
        if self._link_of_held is None or not self._is_usable(self._link_of_held):
            self._link_of_held = self._choose()
        self._hand_over(self._link_of_held, backends, origin, client_fd, client)

    def has_room(self) -> bool:
        """Tell whether another client can be taken."""
        ready = [link for link in self._links if link.is_ready and not link.is_stuck]
        return not ready or any(map(self._is_usable, ready))

    def reconfigure(self) -> None:
        """Let the workers use the settings of the engine as they are now."""
        self.datagrams.have_shares_changed = False
        for link in self._links:
            if link.is_running:
                link.send(Configure(self._settings(link), _log_level()))

    async def settle(self) -> None:
        """Wait until the workers have done all that they were sent, and all that they have counted is counted here.

        Nobody waits for one that is stuck.
        """
        self._is_new, sent = False, self.datagrams.sent
        asked = [link for link in self._links if not link.is_stuck]
        answers = [link.ask() for link in asked if link.is_running]
        if answers:
            await asyncio.wait(answers)
        self.datagrams.note_settled(sent, [link for link in asked if not link.is_stuck])

    async def settle_datagrams(self) -> None:
        """Wait until the workers have started, and serve the UDP service ports as they were told."""
        if self.datagrams.have_shares_changed:
            self.reconfigure()
        if self._is_new or not self.datagrams.is_settled:
            await self.settle()

    def with_workers(self, counters: CountersT) -> CountersT:
        """Return the counters of this process with those of the workers added."""
        hosts = [self._past, *(link.host for link in self._links)]
        limits = counters.limits
        return replace(
            counters,
            open_connections=counters.open_connections + sum(link.open_connections for link in self._links),
            open_sessions=counters.open_sessions + sum(link.host.open_sessions for link in self._links),
            accept_errors=counters.accept_errors + sum(host.accept_errors for host in hosts),
            dropped_datagrams=counters.dropped_datagrams + sum(host.dropped_datagrams for host in hosts),
            evicted_sessions=counters.evicted_sessions + sum(host.evicted_sessions for host in hosts),
            limits=replace(
                limits,
                abandoned_connections=limits.abandoned_connections + sum(host.abandoned for host in hosts),
                idle_timeouts=limits.idle_timeouts + sum(host.idle_timeouts for host in hosts),
                half_close_timeouts=limits.half_close_timeouts + sum(host.half_close_timeouts for host in hosts),
                peer_timeouts=limits.peer_timeouts + sum(host.peer_timeouts for host in hosts),
            ),
            waking=functools.reduce(WakingCounters.plus, (host.waking for host in hosts), counters.waking),
            workers=tuple(
                WorkerReading(
                    name=link.name,
                    resident_bytes=link.resident_bytes,
                    open_connections=link.open_connections,
                    open_sessions=link.host.open_sessions,
                    restarts=self._keeper.restarts(link),
                )
                for link in self._links
            ),
        )

    def close(self) -> None:
        """End all workers at once, and wait until they have ended."""
        self._keeper.close()
        self.datagrams.close()

    def how_to_start(self, link: WorkerLink) -> Start:
        """Return how a worker is to work."""
        return Start(self._settings(link), _log_level())

    def on_started(self, link: WorkerLink) -> None:
        """A process has been started: give it the UDP service ports that it is to serve."""
        self.datagrams.restore(link)

    def on_ending(self, link: WorkerLink) -> None:
        """A process has ended: keep what it had counted."""
        self._past = self._past.plus(link.host)
        self.datagrams.lose(link)

    def hand_on(self, pending: list[Pending]) -> None:
        """Give clients that were not sent to a worker to another one."""
        for each in pending:
            backends, link = each.served.backends, self._choose()
            if link is None:
                self._dial(backends, each.origin, each.client_fd, each.client).start()
            else:
                link.give(backends, each.served.target, each.origin, each.client_fd, each.client)
        self._flush()

    def on_wants_next(self, link: WorkerLink, wish: WantsNext) -> None:
        """Choose the next endpoint for a dial, as `Dial` does."""
        served = link.served(wish.lead)
        backends, origin, endpoint = served.backends, ORIGINS[wish.origin], served.target.endpoint
        if endpoint not in wish.tried and backends.serves(origin, endpoint):
            link.answer(wish, served.target)
            return
        try:
            now = self._engine.loop.time()
            link.answer(wish, backends.pick(origin, wish.client, now=now, tried=wish.tried))
        except NoEndpoints:
            link.refuse(wish)

    def on_given_back(self, client: Pending, *, has_run_out: bool) -> None:
        """A worker could not connect a client."""
        backends = client.served.backends
        if has_run_out:
            self._dial(backends, client.origin, client.client_fd, client.client).run_out(client.served.target)
        else:
            self.serve(backends, client.origin, client.client_fd, client.client)

    def on_report(self, link: WorkerLink, report: Report) -> None:
        """A worker has reported."""
        self.datagrams.count(report.datagrams)
        if link.is_full:
            self._close_gate_if_full()

    def on_notice(self, link: WorkerLink, notice: Notice) -> None:
        """A worker tells something."""
        match notice:
            case DialFailed(name, endpoint):
                self._engine.tell_dial_failure(name, endpoint)
            case NeedsPods(name):
                self._engine.tell_need_of_pods(name)
            case Complained(name, text):
                self._engine.complain(name, text)
            case Said() as said:
                self._write(link, said)

    def on_lost(self, link: WorkerLink) -> None:
        """A worker's process has ended, which nobody wanted."""
        self._keeper.replace_ended(link)

    def _write(self, link: WorkerLink, said: Said) -> None:
        """Write to the log what a worker says, but not what another one has just said."""
        now = self._engine.loop.time()
        if said.level >= logging.WARNING:
            self._said = {what: by for what, by in self._said.items() if now - by[1] < _SAID_FOR_S}
            if self._said.setdefault((said.logger, said.text), (link, now))[0] is not link:
                return
        logging.getLogger(said.logger).log(said.level, "%s", said.text)

    def _hand_over(
        self, link: WorkerLink | None, backends: Backends, origin: Origin, client_fd: int, client: str
    ) -> None:
        if link is None:
            self._dial(backends, origin, client_fd, client).start()
            return
        try:
            target = backends.pick(origin, client, now=self._engine.loop.time())
        except NoEndpoints:
            self._dial(backends, origin, client_fd, client).start()
            return
        link.give(backends, target, origin, client_fd, client)
        if link.clients >= self._max_clients:
            self._close_gate_if_full()
        if not self._is_flush_due:
            self._is_flush_due = True
            self._engine.poller.defer(self._flush)

    def _choose(self) -> WorkerLink | None:
        """Return the worker that has the fewest clients; one that takes no bytes at present comes last."""
        best: WorkerLink | None = None
        for link in self._links:
            if self._is_usable(link) and (
                best is None or (link.is_blocked, link.clients) < (best.is_blocked, best.clients)
            ):
                best = link
        return best

    def _is_usable(self, link: WorkerLink) -> bool:
        is_well = link.is_ready and link.is_running and not link.is_stuck
        return is_well and not link.is_full and link.clients < self._max_clients

    def _close_gate_if_full(self) -> None:
        if not self.has_room():
            self._engine.gate.close(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    def _dial(self, backends: Backends, origin: Origin, client_fd: int, client: str) -> WaitingDial:
        return WaitingDial(self._engine, self.serve_held, backends, origin, client_fd, client)

    def _flush(self) -> None:
        self._is_flush_due, self._link_of_held = False, None
        for link in self._links:
            link.flush()

    def _settings(self, link: WorkerLink) -> DataPlaneSettings:
        """Return the settings of one worker, which has its share of what is limited in total."""
        settings = self._engine.settings
        return replace(
            settings,
            proxy_ports=None,
            max_sessions=self.datagrams.share(link, settings.max_sessions or default_max_sessions()),
            pipe_pool_bytes=settings.pipe_pool_bytes // len(self._links),
        )


def _max_clients() -> int:
    """Return how many clients a worker can have, each of which takes two descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, (soft - _OWN_DESCRIPTORS) // 2)


def _log_level() -> int:
    return logging.getLogger("userspace_proxy").getEffectiveLevel()
