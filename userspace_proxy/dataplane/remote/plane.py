"""What stands in the control process for the data path of the data process.

It knows all that the data process should have, and has a copy of each of its listening sockets. So nothing is lost when
the data process dies: its clients wait in the backlog, and the next data process gets all of it again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

from userspace_proxy.core.counters import Counters, LiveCounters
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import ListenAddress, ServicePort, ServicePortName
from userspace_proxy.core.plan import Listening, Plan
from userspace_proxy.dataplane.channel import Channel
from userspace_proxy.dataplane.interface import Applied, Found, Notices
from userspace_proxy.dataplane.opening import by_name, open_sockets
from userspace_proxy.dataplane.remote.messages import (
    LISTENERS_PER_MESSAGE,
    NAMES_PER_MESSAGE,
    SERVICE_PORTS_PER_MESSAGE,
    AllPresent,
    Configure,
    DialFailed,
    Done,
    Drain,
    Keep,
    NeedsPods,
    Page,
    Present,
    ReadCounters,
    Reading,
    Report,
    Served,
    Step,
    in_batches,
    in_batches_of_listeners,
)
from userspace_proxy.dataplane.remote.presence import Presence
from userspace_proxy.dataplane.remote.readings import Lasting, at_once
from userspace_proxy.dataplane.remote.requests import Answer, Requests
from userspace_proxy.dataplane.settings import DataPlaneSettings

_READ_S = 2.0
_NO_ROOM = "too many open files in the data process"

_log = logging.getLogger(__name__)


class RemotePlane:
    """A `DataPath` in another process, which is met when `attach` is called, and may be replaced by another one.

    While there is none, plans are carried out as far as this process can, and the next one gets the result. With
    `outlives`, the data process goes on when this is closed, and is found again by the next control process.
    `on_lost` is called when the connection to a data process has ended.
    """

    def __init__(
        self,
        settings: DataPlaneSettings,
        notices: Notices,
        *,
        outlives: bool,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._logging: tuple[int, str] | None = None
        self._notices = notices
        self._outlives = outlives
        self._on_lost = on_lost
        self._channel: Channel[Report] | None = None
        self._process: int | None = None
        self._has_met = asyncio.Event()
        self._has_planned = False
        self._unbriefed: int | None = None  # a process that can be given what we have only after our first plan
        self._service_ports: dict[ServicePortName, ServicePort] = {}
        self._sockets: dict[Listening, socket.socket] = {}
        self._bound: dict[Listening, ListenAddress] = {}
        self._present = Presence()
        self._requests = Requests()  # from when the data process has what we have, or is being sent it
        self._lasting = Lasting()
        self._reading = asyncio.Lock()

    @property
    def is_attached(self) -> bool:
        return self._channel is not None

    def attach(self, sock: socket.socket) -> None:
        """Use the data process at the other end of this socket from now on. It has to tell first what it has."""
        self._detach()
        self._channel = Channel(self._loop, sock, Report, on_message=self._take, on_end=self._end)
        self._configure()

    async def found(self) -> Found:
        """Return what the first data process had when it was met, for which this waits."""
        await self._has_met.wait()
        found: dict[ServicePortName, dict[ListenAddress, ListenAddress]] = {name: {} for name in self._service_ports}
        for (name, asked), bound in self._bound.items():
            found[name][asked] = bound
        return found

    async def apply(self, plan: Plan, applied: Applied) -> None:
        """Carry out a plan and fill in `applied`. Cancelled, it is carried out all the same before this returns."""
        cancelled: asyncio.CancelledError | None = None
        for answer in self._carry_out(plan, applied):
            while not answer.done():
                try:
                    await asyncio.wait([answer])
                except asyncio.CancelledError as error:
                    cancelled = error
        self._has_planned = True
        if self._unbriefed is not None:
            self._agree(self._unbriefed)
        if cancelled is not None:
            raise cancelled

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs and limits from now on."""
        self._settings = settings
        self._configure()

    def set_up_logging(self, verbosity: int, log_format: str) -> None:
        """Let the data process log like this from now on."""
        self._logging = verbosity, log_format
        self._configure()

    async def counters(self) -> Counters:
        """Return a reading of all counters."""
        return at_once(await self.live_counters())

    async def live_counters(self) -> LiveCounters:
        """Return the counters as plain data, which come in pages that hold up neither process.

        From a data process that takes seconds to answer, and where there is none, these are what was read last.
        """
        async with self._reading:
            try:
                async with asyncio.timeout(_READ_S):
                    return await self._read_all()
            except TimeoutError:
                return self._lasting.last

    async def _read_all(self) -> LiveCounters:
        whole: LiveCounters | None = None
        readings: list[Reading] = []
        while True:
            page = await self._requests.send(ReadCounters(len(readings)))
            if not isinstance(page, Page):
                return self._lasting.without_process()
            whole = page.whole or whole
            readings += page.readings
            if page.is_last:
                return self._lasting.add_up(whole or LiveCounters(), readings)

    async def drain(self, timeout_s: float) -> None:
        """Stop listening at once, then wait for the open connections to end. Where these outlive us, do nothing."""
        if self._outlives:
            return
        answer = self._requests.send(Drain(timeout_s))
        self._close_sockets()
        await answer

    def close(self) -> None:
        """Leave the data process. Whoever started it ends it."""
        self._detach()
        self._close_sockets()

    def _carry_out(self, plan: Plan, applied: Applied) -> Iterator[Answer]:
        """Do all that can be done here, and yield what is to be waited for before the next thing."""
        yield from self._close_each(plan.release)
        for ports in in_batches(plan.update, SERVICE_PORTS_PER_MESSAGE):
            self._service_ports.update({each.name: each for each in ports})
            yield self._update(ports)
        for batch in in_batches_of_listeners(by_name(plan.open)):
            yield from self._open(batch, applied)
        yield from self._close_each(plan.close)
        for names in in_batches(plan.remove, NAMES_PER_MESSAGE):
            for name in names:
                self._service_ports.pop(name, None)
            yield self._remove(names)

    def _open(self, batch: Iterable[tuple[ServicePortName, list[ListenAddress]]], applied: Applied) -> Iterator[Answer]:
        opened: dict[Listening, socket.socket] = {}
        for name, addresses in batch:
            sockets, refused = open_sockets(name, addresses, proxy_ports=self._settings.proxy_ports, bound=self._bound)
            for asked, sock in sockets.items():
                opened[name, asked] = self._sockets[name, asked] = sock
                self._bound[name, asked] = applied.bound[name, asked] = replace(asked, port=sock.getsockname()[1])
            if refused:
                applied.failures[name] = refused
        for passed in in_batches(opened.items(), LISTENERS_PER_MESSAGE):
            answer = self._pass_on(dict(passed))
            yield answer
            done = answer.result()
            for listening in done.refused if isinstance(done, Done) else ():
                name, asked = listening
                self._forget(listening).close()
                del applied.bound[listening]
                failure = ListenFailed(str(asked), _NO_ROOM, "EMFILE")
                applied.failures[name] = (*applied.failures.get(name, ()), failure)

    def _close_each(self, listenings: Iterable[Listening]) -> Iterator[Answer]:
        """Let the data process close its copies, and then close ours, after which the ports are free."""
        for batch in in_batches(listenings, LISTENERS_PER_MESSAGE):
            ours = [self._forget(each) for each in batch if each in self._sockets]
            yield self._requests.send(Step(close=batch))
            for sock in ours:
                sock.close()

    def _forget(self, listening: Listening) -> socket.socket:
        del self._bound[listening]
        return self._sockets.pop(listening)

    def _update(self, service_ports: Iterable[ServicePort]) -> Answer:
        served = tuple(map(Served.of, service_ports))
        return self._requests.send(Step(update=served))

    def _pass_on(self, sockets: Mapping[Listening, socket.socket]) -> Answer:
        """Send sockets. Where that fails, the connection ends, and all is sent again over the next one."""
        try:
            return self._requests.send(Step(open=tuple(sockets)), sockets.values())
        except OSError as error:
            _log.error("sockets cannot be passed to the data process: %s; trying again", error.strerror)
            self._end()
            return self._requests.send(Step())

    def _remove(self, names: tuple[ServicePortName, ...]) -> Answer:
        return self._requests.send(Step(remove=names))

    def _configure(self) -> None:
        if self._channel is not None:
            verbosity, log_format = self._logging or (None, "text")
            settings = replace(self._settings, proxy_ports=None)  # listeners are opened here
            self._channel.send(Configure(settings, verbosity, log_format))

    def _take(self, report: Report, fds: list[int]) -> None:
        match report:
            case Present():
                self._present.add(report, fds)
            case Keep():
                self._present.counted_before.append(report.part)
            case AllPresent():
                self._agree(report.process)
            case Done() | Page():
                self._requests.take(report)
            case DialFailed() | NeedsPods():
                self._notice(report)
            case _:
                assert_never(report)

    def _notice(self, report: DialFailed | NeedsPods) -> None:
        try:
            if isinstance(report, DialFailed):
                self._notices.dial_failed(report.name, report.endpoint)
            else:
                self._notices.needs_pods(report.name)
        except Exception:
            _log.exception("%s (%s): fault while telling what happened to it", report.name, report.name.protocol)

    def _agree(self, process: int) -> None:
        """Take over what the first data process has; bring each other one to what we have.

        Before our first plan that is no more than sockets: their clients wait until it is known where they are to go.
        """
        if self._has_met.is_set() and not self._has_planned:
            self._unbriefed = process
            return
        self._unbriefed = None
        if self._process not in (None, process):
            self._lasting.process_is_gone()
        self._process = process
        channel = self._channel
        assert channel is not None
        self._requests.use(channel)
        present, self._present = self._present, Presence()
        for lost in in_batches(present.lost, LISTENERS_PER_MESSAGE):
            self._requests.send(Step(close=lost))
        if not self._has_met.is_set():
            self._service_ports = {name: ServicePort(name, 0) for name in present.names}
            self._bound, self._sockets = present.bound, present.sockets
            self._lasting.go_on_from(present.counted_before)
            self._has_met.set()
            return
        present.close_sockets()
        for number, part in enumerate(self._lasting.before()):
            channel.send(Keep(number == 0, part))
        for unwanted in in_batches(present.sockets.keys() - self._sockets.keys(), LISTENERS_PER_MESSAGE):
            self._requests.send(Step(close=unwanted))
        for gone in in_batches(present.names - self._service_ports.keys(), NAMES_PER_MESSAGE):
            self._remove(gone)
        for ports in in_batches(self._service_ports.values(), SERVICE_PORTS_PER_MESSAGE):
            self._update(ports)
        missing = [(key, sock) for key, sock in self._sockets.items() if key not in present.sockets]
        for batch in in_batches(missing, LISTENERS_PER_MESSAGE):
            self._pass_on(dict(batch)).add_done_callback(self._note_refused)
        if self.is_attached:
            _log.info(
                "the data process has %d service ports and %d listeners again", len(self._service_ports), len(missing)
            )

    def _note_refused(self, answer: Answer) -> None:
        """Where the data process had no room for what it is to have again, begin again with another connection."""
        done = answer.result()
        if isinstance(done, Done) and done.refused:
            _log.error("%d listeners are not served: %s; trying again", len(done.refused), _NO_ROOM)
            self._end()

    def _end(self, reason: str = "") -> None:
        if reason:
            _log.error("the data process cannot be understood: %s", reason)
        self._detach()
        self._on_lost()

    def _detach(self) -> None:
        """Leave the data process, if there is one. Whoever waits for its answers gets none."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        self._present.close_sockets()
        self._present = Presence()
        self._unbriefed = None
        self._requests.stop()

    def _close_sockets(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        self._bound.clear()
