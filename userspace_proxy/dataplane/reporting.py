"""What a worker has counted since it said so last."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterable

from userspace_proxy.core.model import ListenAddress, ServicePortName
from userspace_proxy.dataplane.backends import Backends, Target
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.handover import DatagramRow, HostCounts, Lead, LeadRow, Report
from userspace_proxy.dataplane.udp import Sessions, UdpListener, UdpSession

_DELAY_S = 0.01
_SHORT_DELAY_S = 0.001
"""Ends of clients within this time are told together: a shorter one where others may wait for their place."""

_PAGE_BYTES = resource.getpagesize()

_Counts = tuple[int, int, int, int, int]
_NOTHING: _Counts = (0, 0, 0, 0, 0)


class LeadTarget(Target):
    """A target of TCP clients that were handed over."""

    __slots__ = ("backends", "ended", "number", "reported")

    def __init__(self, lead: Lead, backends: Backends) -> None:
        super().__init__(lead.name, lead.endpoint)
        self.number = lead.number
        self.backends = backends
        """The service port, of which only the name is known here."""
        self.ended = 0
        """Clients that have ended since the last report, relayed or not."""
        self.reported = _NOTHING

    def take_row(self) -> LeadRow | None:
        """Return what has changed since this was called last, or None when nothing has."""
        now = (
            self.connections,
            self.open_connections,
            self.dial_failures,
            self.to_endpoint.bytes,
            self.to_client.bytes,
        )
        if now == self.reported and not self.ended:
            return None
        row = self.number, self.ended, *_difference(now, self.reported)
        self.reported, self.ended = now, 0
        return row


class DatagramPort:
    """A UDP service port that is served here."""

    def __init__(self, backends: Backends) -> None:
        self.backends = backends
        self.listeners: dict[ListenAddress, UdpListener] = {}
        self._reported: dict[Target, _Counts] = {}

    @property
    def has_sessions(self) -> bool:
        return any(listener.open_sessions for listener in self.listeners.values())

    def take_rows(self) -> Iterable[DatagramRow]:
        """Yield what has changed since this was called last, also about endpoints that have gone meanwhile."""
        present = list(self.backends.targets.values())
        for target in {**self._reported, **dict.fromkeys(present)}:
            now = (
                target.sessions,
                target.open_sessions,
                target.dial_failures,
                target.to_endpoint.bytes,
                target.to_client.bytes,
            )
            before = self._reported.get(target, _NOTHING)
            if now != before:
                yield target.name, target.endpoint, *_difference(now, before)
            self._reported[target] = now
        self._reported = {target: self._reported[target] for target in present}


class ReportedSessions(Sessions):
    """Sessions, and the service ports that had any since they were reported last."""

    touched: set[ServicePortName]

    def add(self, session: UdpSession) -> None:
        self.touched.add(session.name)
        super().add(session)


class Reporter:
    """Makes reports: by itself soon after clients have ended, and when asked."""

    def __init__(self, engine: Engine, sessions: ReportedSessions, send: Callable[[object], None]) -> None:
        self.leads: dict[int, LeadTarget] = {}
        self.datagram_ports: dict[ServicePortName, DatagramPort] = {}
        self._engine = engine
        self._sessions = sessions
        self._send = send
        self._with_ends: dict[LeadTarget, None] = {}
        self._is_planned = False
        sessions.touched = set()

    def note_end(self, target: LeadTarget) -> None:
        """Count the end of a client, and tell it soon."""
        target.ended += 1
        self._with_ends[target] = None
        self.plan()

    def plan(self) -> None:
        """Report soon."""
        if not self._is_planned:
            self._is_planned = True
            settings = self._engine.settings
            is_limited = settings.max_connections or settings.max_connections_per_service_port
            self._engine.loop.call_later(_SHORT_DELAY_S if is_limited else _DELAY_S, self._report_ends)

    def answer(self, number: int) -> None:
        """Report everything."""
        self._report(number, self.leads.values(), self._sessions.touched, _resident_bytes())
        still = {name for name, port in self.datagram_ports.items() if port.has_sessions}
        self._sessions.touched &= still

    def forget(self, numbers: Iterable[int]) -> None:
        """Report on these leads a last time."""
        self._report(0, [self.leads.pop(number) for number in numbers], (), 0)

    def report_datagrams(self, name: ServicePortName) -> None:
        """Report on one service port now."""
        self._report(0, (), (name,), 0)

    def _report_ends(self) -> None:
        self._is_planned = False
        targets, self._with_ends = self._with_ends, {}
        self._report(0, targets, (), 0)

    def _report(
        self, answers: int, leads: Iterable[LeadTarget], names: Iterable[ServicePortName], resident_bytes: int
    ) -> None:
        engine = self._engine
        ports = [self.datagram_ports[name] for name in names if name in self.datagram_ports]
        host = HostCounts(
            abandoned=engine.abandoned,
            idle_timeouts=engine.relay.timeouts.idle,
            half_close_timeouts=engine.relay.timeouts.half_close,
            peer_timeouts=engine.relay.timeouts.peer,
            accept_errors=engine.accept_error_count,
            dropped_datagrams=engine.dropped_datagrams,
            evicted_sessions=self._sessions.evicted,
            waking=engine.waiting.counters(),
            open_sessions=len(self._sessions),
        )
        self._send(
            Report(
                answers=answers,
                leads=[row for target in leads if (row := target.take_row()) is not None],
                datagrams=[row for port in ports for row in port.take_rows()],
                host=host,
                is_full=engine.gate.is_closed,
                resident_bytes=resident_bytes,
            )
        )


def _difference(now: _Counts, before: _Counts) -> _Counts:
    return now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3], now[4] - before[4]


def _resident_bytes() -> int:
    """Return the memory of this process that is in use, or 0 where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
    return 0
