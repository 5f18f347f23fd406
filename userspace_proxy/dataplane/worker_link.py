"""One worker as the process sees it that accepts: its process, the clients that it has, and what it reports."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from userspace_proxy.dataplane.backends import Backends, Origin, Target
from userspace_proxy.dataplane.channel import MAX_DESCRIPTORS, Channel
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.handover import (
    ORIGIN_NUMBERS,
    ORIGINS,
    Ask,
    Complained,
    DialFailed,
    Forget,
    FromWorker,
    GivenBack,
    HostCounts,
    Lead,
    NeedsPods,
    Next,
    Ready,
    Report,
    Said,
    Start,
    Take,
    WantsNext,
)
from userspace_proxy.dataplane.served import Pending, Served
from userspace_proxy.dataplane.worker_process import WorkerProcess

Notice = DialFailed | NeedsPods | Complained | Said


class LinkOwner(Protocol):
    """What a link tells."""

    def on_wants_next(self, link: WorkerLink, wish: WantsNext) -> None:
        """A dial in the worker needs an endpoint."""

    def on_given_back(self, client: Pending, *, has_run_out: bool) -> None:
        """The worker could not connect a client, which is not its client any more."""

    def on_report(self, link: WorkerLink, report: Report) -> None:
        """The worker has reported; what it said about its clients has been counted."""

    def on_notice(self, link: WorkerLink, notice: Notice) -> None:
        """The worker tells of something that the rest of the program wants to know."""

    def on_lost(self, link: WorkerLink) -> None:
        """The process has ended without being asked to, and all that it had with it."""


class WorkerLink:
    """A place for a worker. When its process ends another one can be started in it."""

    def __init__(self, name: str, engine: Engine, owner: LinkOwner) -> None:
        self.name = name
        self.clients = 0
        """How many clients it has: pending, on their way, dialled or relayed."""
        self.open_connections = 0
        self.is_ready = self.is_stuck = self.is_full = self.has_ended = False
        self.host = HostCounts()
        self.resident_bytes = 0
        self._engine = engine
        self._owner = owner
        self._process: WorkerProcess | None = None
        self._channel: Channel[FromWorker] | None = None
        self._end_reason = ""
        self._last_number = 0
        self._served: dict[int, Served] = {}
        self._by_target: dict[Target, Served] = {}
        self._untold: list[Lead] = []
        self._last_asked = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._forgotten: dict[int, list[int]] = {}  # by the number of the answer after which nothing is told of them
        self._pending: list[Pending] = []

    @property
    def is_blocked(self) -> bool:
        """Tell whether what it is sent has to wait."""
        return self._channel is not None and self._channel.pending_bytes > 0

    @property
    def is_running(self) -> bool:
        return self._channel is not None and not self.has_ended

    @property
    def is_busy(self) -> bool:
        """Tell whether it has anything that counts."""
        return self.clients > 0 or self.host.open_sessions > 0

    @property
    def is_silent(self) -> bool:
        """Tell whether it was asked something that it has not answered yet."""
        return bool(self._waiting)

    @property
    def process_id(self) -> int:
        return self._process.id if self._process is not None else 0

    def start(self, loop_kind: str, how: Start) -> None:
        """Start a process, which is ready a moment later. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._process = WorkerProcess(theirs, loop_kind)
            except OSError:
                ours.close()
                raise
        self._channel = Channel(self._engine.loop, ours, FromWorker, on_message=self._take, on_end=self._end)
        self.has_ended = False
        self.send(how)

    def send(self, message: object, *descriptors: int) -> None:
        """Send a message, and descriptors, which are closed here."""
        assert self._channel is not None
        self._channel.send(message, descriptors)

    def ask(self) -> asyncio.Future[None]:
        """Ask for a report. The future is done when it has come, which is after all that was sent before was done.

        It is done as well when nothing will come any more.
        """
        self._last_asked += 1
        future = self._waiting[self._last_asked] = self._engine.loop.create_future()
        self.send(Ask(self._last_asked))
        return future

    def stop_waiting(self) -> None:
        """Let nobody wait for answers any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)

    def give(self, backends: Backends, target: Target, origin: Origin, client_fd: int, client: str) -> None:
        """Give the worker a client, which it gets at the next `flush`."""
        served = self._serve(backends, target)
        served.clients += 1
        self.clients += 1
        self._pending.append(Pending(served, origin, client_fd, client))

    def flush(self) -> None:
        """Send all clients that wait, many at once."""
        channel, pending = self._channel, self._pending
        if channel is None or self.has_ended or not pending:
            return
        for start in range(0, len(pending), MAX_DESCRIPTORS):
            some = pending[start : start + MAX_DESCRIPTORS]
            clients = [(each.served.number, ORIGIN_NUMBERS[each.origin], each.client) for each in some]
            channel.send(Take(self._take_untold(), clients), [each.client_fd for each in some])
        self._pending = []

    def take_pending(self) -> list[Pending]:
        """Return the clients that are not on their way yet, for others to have."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.served.clients -= 1
        self.clients -= len(pending)
        return pending

    def served(self, number: int) -> Served:
        """Return what the worker calls by this number."""
        return self._served[number]

    def answer(self, wish: WantsNext, target: Target) -> None:
        """Let a dial of the worker go on with this target."""
        before = self._served[wish.lead]
        served = self._serve(before.backends, target)
        before.clients -= 1
        served.clients += 1
        self.send(Next(wish.dial, self._take_untold(), served.number))

    def refuse(self, wish: WantsNext) -> None:
        """Let a dial of the worker end, as there is no endpoint. It gives the client back."""
        self.send(Next(wish.dial, [], 0))

    def forget_unused(self) -> None:
        """Let the worker forget the targets that had no client since this was called last.

        Here they are remembered until it has, as it may have counted something about them.
        """
        if self._untold or self._pending:
            return
        unused = [served for served in self._by_target.values() if not served.clients and not served.is_recent]
        for served in self._by_target.values():
            served.is_recent = False
        if unused:
            for served in unused:
                del self._by_target[served.target]
            numbers = [served.number for served in unused]
            self.send(Forget(numbers))
            self.ask()
            self._forgotten[self._last_asked] = numbers

    def close(self) -> None:
        """End the process at once, and wait until it has ended. What it had is counted as closed."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for pending in self.take_pending():
            self._engine.poller.close(pending.client_fd)
            self._engine.admission.released(pending.served.target.name)
        if self._process is not None:
            self._process.end()
            self._process = None
        for served in self._served.values():
            served.target.open_connections -= served.open_connections
            for _ in range(served.clients):
                self._engine.admission.released(served.target.name)
        self.stop_waiting()
        self._waiting.clear()
        self._forgotten.clear()
        self._served.clear()
        self._by_target.clear()
        self._untold.clear()
        self.clients = self.open_connections = self.resident_bytes = 0
        self.host = HostCounts()
        self.is_ready = self.is_stuck = self.is_full = False

    def end_text(self) -> str:
        """Return how the process has ended, as part of a sentence."""
        assert self._process is not None
        still_runs = f"cannot be understood ({self._end_reason})" if self._end_reason else "has closed its channel"
        return self._process.end_text() or still_runs

    def _take(self, message: FromWorker, descriptors: list[int]) -> None:
        match message:
            case Report():
                self._count(message)
                self._owner.on_report(self, message)
                self._note_answer(message.answers)
            case WantsNext():
                self._owner.on_wants_next(self, message)
            case GivenBack(number, origin, client, has_run_out):
                served = self._served[number]
                served.clients -= 1
                self.clients -= 1
                if descriptors:
                    self._owner.on_given_back(
                        Pending(served, ORIGINS[origin], descriptors[0], client), has_run_out=has_run_out
                    )
                else:
                    self._engine.admission.released(served.target.name)
            case Ready():
                self.is_ready = True
            case _:
                self._owner.on_notice(self, message)

    def _end(self, reason: str) -> None:
        """Tell of it in a moment, as this may be in the middle of sending something."""
        self.has_ended, self._end_reason = True, reason
        self._engine.loop.call_soon(self._tell_end, self._channel)

    def _tell_end(self, channel: Channel[FromWorker] | None) -> None:
        if channel is self._channel:
            self._owner.on_lost(self)

    def _serve(self, backends: Backends, target: Target) -> Served:
        served = self._by_target.get(target)
        if served is None:
            self._last_number += 1
            served = self._served[self._last_number] = Served(self._last_number, backends, target)
            self._by_target[target] = served
            self._untold.append(Lead(served.number, target.name, target.endpoint))
        served.is_recent = True
        return served

    def _note_answer(self, number: int) -> None:
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(None)
        for forgotten in self._forgotten.pop(number, ()):
            del self._served[forgotten]

    def _take_untold(self) -> list[Lead]:
        untold, self._untold = self._untold, []
        return untold

    def _count(self, report: Report) -> None:
        admission = self._engine.admission
        for number, ended, connections, opened, dial_failures, to_endpoint, to_client in report.leads:
            served = self._served[number]
            target = served.target
            target.connections += connections
            target.open_connections += opened
            target.dial_failures += dial_failures
            target.to_endpoint.bytes += to_endpoint
            target.to_client.bytes += to_client
            served.open_connections += opened
            self.open_connections += opened
            served.clients -= ended
            self.clients -= ended
            for _ in range(ended):
                admission.released(target.name)
        self.host = report.host
        self.is_full = report.is_full
        if report.resident_bytes:
            self.resident_bytes = report.resident_bytes
