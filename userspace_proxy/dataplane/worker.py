"""A worker: dials and relays the clients that another process accepts, and serves the UDP service ports it is given.

Started by that process with one end of a channel; ends when the other end is closed, so it is never left behind.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import assert_never

from userspace_proxy.core.balancer import RoundRobin
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePortName
from userspace_proxy.dataplane.backends import Backends, Origin, Target
from userspace_proxy.dataplane.channel import Channel
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.handed_dial import HandedDial
from userspace_proxy.dataplane.handover import (
    ORIGIN_NUMBERS,
    ORIGINS,
    Ask,
    CloseDatagrams,
    Complained,
    Configure,
    DialFailed,
    Forget,
    ForgetDatagrams,
    GivenBack,
    Lead,
    ListenForDatagrams,
    NeedsPods,
    Next,
    Ready,
    Said,
    Start,
    Take,
    ToWorker,
    UpdateDatagrams,
    WantsNext,
)
from userspace_proxy.dataplane.interface import Notices
from userspace_proxy.dataplane.reporting import DatagramPort, LeadTarget, ReportedSessions, Reporter
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.udp import UdpListener
from userspace_proxy.garbage import keep_out_of_collections

Send = Callable[[object], None]

_log = logging.getLogger(__name__)


class WorkerEngine(Engine):
    """An engine that leaves to the other process what is told to people, and tells it who has ended."""

    reporter: Reporter

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: DataPlaneSettings, send: Send) -> None:
        notices = Notices(
            dial_failed=lambda name, endpoint: send(DialFailed(name, endpoint)),
            needs_pods=lambda name: send(NeedsPods(name)),
        )
        super().__init__(loop, settings, notices)
        self._send = send

    def ended(self, target: Target) -> None:
        assert isinstance(target, LeadTarget)
        self.reporter.note_end(target)

    def complain(self, name: ServicePortName, text: str) -> None:
        self._send(Complained(name, text))

    def _free_descriptors(self) -> None:
        """No descriptor is left: say so, and again when there are some."""
        super()._free_descriptors()
        self.reporter.plan()
        self.gate.wait(self.reporter.plan)


class Worker:
    """Carries out what comes through the channel, which is first of all how to work."""

    _engine: WorkerEngine
    _sessions: ReportedSessions
    _reporter: Reporter

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.has_ended = asyncio.Event()
        self._loop = loop
        self._has_started = False
        self._dials: dict[int, HandedDial] = {}
        self._last_dial = 0
        self._channel: Channel[ToWorker] = Channel(loop, sock, ToWorker, on_message=self._take, on_end=self._end)

    def close(self) -> None:
        """Close everything, at once."""
        self._channel.close()
        if not self._has_started:
            return
        self._sessions.end_all()
        for port in self._reporter.datagram_ports.values():
            for listener in port.listeners.values():
                listener.close()
        self._engine.close()

    def _take(self, message: ToWorker, descriptors: list[int]) -> None:
        match message:
            case Take():
                self._take_clients(message, descriptors)
            case Next():
                self._go_on(message)
            case Ask(number):
                self._reporter.answer(number)
            case Forget(numbers):
                self._reporter.forget(numbers)
            case Start(settings, log_level):
                self._start(settings, log_level)
            case Configure(settings, log_level):
                self._configure(settings, log_level)
            case UpdateDatagrams():
                self._update(message)
            case ListenForDatagrams(name, address):
                self._listen(name, address, descriptors)
            case CloseDatagrams(name, address):
                listener = self._reporter.datagram_ports[name].listeners.pop(address, None)
                if listener is not None:
                    listener.close()
                self._reporter.report_datagrams(name)
            case ForgetDatagrams(name):
                self._engine.forget(name)
                self._reporter.report_datagrams(name)
                del self._reporter.datagram_ports[name]
            case _:
                assert_never(message)

    def _end(self, reason: str) -> None:
        if reason:
            _log.error("the process that accepts cannot be understood: %s", reason)
        self.has_ended.set()

    def _start(self, settings: DataPlaneSettings, log_level: int) -> None:
        self._engine = WorkerEngine(self._loop, settings, self._send)
        self._sessions = ReportedSessions(
            self._loop, idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or 1
        )
        self._reporter = self._engine.reporter = Reporter(self._engine, self._sessions, self._send)
        self._has_started = True
        forward_log(self._send, log_level)
        self._send(Ready())

    def ask(
        self, dial: HandedDial, target: LeadTarget, origin: Origin, client: str, tried: tuple[Endpoint, ...]
    ) -> None:
        """Have a dial told of its next target."""
        self._last_dial += 1
        self._dials[self._last_dial] = dial
        self._send(WantsNext(self._last_dial, target.number, ORIGIN_NUMBERS[origin], client, list(tried)))

    def give_back(self, client_fd: int, target: LeadTarget, origin: Origin, client: str, *, has_run_out: bool) -> None:
        """Leave a client to the other process."""
        self._channel.send(GivenBack(target.number, ORIGIN_NUMBERS[origin], client, has_run_out), [client_fd])

    def _send(self, message: object) -> None:
        self._channel.send(message)

    def _take_clients(self, take: Take, descriptors: list[int]) -> None:
        self._meet(take.leads)
        engine, targets = self._engine, self._reporter.leads
        for (number, origin, client), fd in zip(take.clients, descriptors, strict=False):
            target = targets[number]
            HandedDial(engine, self, target, ORIGINS[origin], fd, client).connect_to(target)
        for number, _, _ in take.clients[len(descriptors) :]:  # there was no room for these, so the kernel closed them
            engine.accept_errors += 1
            self._reporter.note_end(targets[number])
            engine.gate.close(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    def _meet(self, leads: list[Lead]) -> None:
        for lead in leads:
            backends = Backends(lead.name, RoundRobin, cross_family=False)
            self._reporter.leads[lead.number] = LeadTarget(lead, backends)

    def _go_on(self, answer: Next) -> None:
        self._meet(answer.leads)
        dial = self._dials.pop(answer.dial)
        if answer.number:
            dial.connect_to(self._reporter.leads[answer.number])
        else:
            dial.give_back(has_run_out=False)

    def _configure(self, settings: DataPlaneSettings, log_level: int) -> None:
        logging.getLogger().setLevel(log_level)
        self._engine.reconfigure(settings)
        self._sessions.reconfigure(idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or 1)

    def _update(self, update: UpdateDatagrams) -> None:
        ports = self._reporter.datagram_ports
        port = ports.get(update.name)
        if port is None:
            cross_family = self._engine.settings.cross_family
            port = ports[update.name] = DatagramPort(Backends(update.name, RoundRobin, cross_family=cross_family))
        service_port = update.service_port()
        port.backends.update(service_port)
        for listener in port.listeners.values():
            listener.end_sessions_of_removed_endpoints()
        self._engine.waiting.update(service_port)
        self._reporter.report_datagrams(update.name)

    def _listen(self, name: ServicePortName, address: ListenAddress, descriptors: list[int]) -> None:
        if not descriptors:
            _log.error("%s (%s): %s is not served, as no descriptor is left", name, name.protocol, address)
            return
        port = self._reporter.datagram_ports[name]
        sock = socket.socket(fileno=descriptors[0])
        port.listeners[address] = UdpListener(self._engine, self._sessions, port.backends, address, sock)


class _LogForwarder(logging.Handler):
    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Said(record.name, record.levelno, self.format(record)))


def forward_log(send: Send, level: int) -> None:
    """Let the other process write what is logged here."""
    logging.basicConfig(handlers=[_LogForwarder(send)], format="%(message)s", level=level, force=True)


async def work(sock: socket.socket) -> None:
    """Work until the other process closes its end."""
    worker = Worker(asyncio.get_running_loop(), sock)
    keep_out_of_collections()
    try:
        await worker.has_ended.wait()
    finally:
        worker.close()


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop or asyncio."""
    if kind == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def main(fd: str, loop_kind: str) -> None:
    """Be the process: `fd` is the descriptor that it has inherited, `loop_kind` is `uvloop` or `asyncio`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the other process, which drains first
    sock = socket.socket(fileno=int(fd))
    with asyncio.Runner(loop_factory=lambda: new_event_loop(loop_kind)) as runner:
        runner.run(work(sock))


if __name__ == "__main__":
    main(*sys.argv[1:])
