"""What the data path has counted, as plain data, or bit by bit where reading all of it at once would take too long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from userspace_proxy.core.model import Endpoint, ServicePortName

OF_THE_MOMENT = frozenset(
    {
        "open_connections",
        "open_sessions",
        "held_connections",
        "held_udp_clients",
        "max_connections",
        "max_connections_per_service_port",
        "admitted_connections",
        "paused_listeners",
    }
)
"""The fields of all counters below that say what is now; the others only grow. `workers` have both."""


@dataclass(frozen=True, slots=True)
class EndpointCounters:
    """Totals of one endpoint since it became one, and what is open now; or of several, added up. Bytes are payload."""

    connections: int = 0
    open_connections: int = 0
    dial_failures: int = 0
    sessions: int = 0
    open_sessions: int = 0
    bytes_to_endpoint: int = 0
    bytes_to_client: int = 0


def add_up(readings: Iterable[EndpointCounters]) -> EndpointCounters:
    """Return the sum of several readings."""
    connections = open_connections = dial_failures = sessions = open_sessions = to_endpoint = to_client = 0
    for each in readings:
        connections += each.connections
        open_connections += each.open_connections
        dial_failures += each.dial_failures
        sessions += each.sessions
        open_sessions += each.open_sessions
        to_endpoint += each.bytes_to_endpoint
        to_client += each.bytes_to_client
    return EndpointCounters(
        connections, open_connections, dial_failures, sessions, open_sessions, to_endpoint, to_client
    )


WAKE_TIME_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class WakeTimes:
    """How long wake-ups took from the first client to the first endpoint, as a histogram.

    `counts` has one number for each of WAKE_TIME_BUCKETS_S: how many took no longer than that, but longer than the one
    before. The last number is of those that took longer than all.
    """

    counts: tuple[int, ...] = (0,) * (len(WAKE_TIME_BUCKETS_S) + 1)
    total_s: float = 0.0

    def with_another(self, seconds: float) -> WakeTimes:
        """Return the histogram with one more wake-up."""
        counts = list(self.counts)
        counts[bisect_left(WAKE_TIME_BUCKETS_S, seconds)] += 1
        return WakeTimes(tuple(counts), self.total_s + seconds)

    def plus(self, other: WakeTimes) -> WakeTimes:
        """Return the sum of both."""
        return WakeTimes(tuple(map(sum, zip(self.counts, other.counts, strict=True))), self.total_s + other.total_s)


@dataclass(frozen=True, slots=True)
class WakingCounters:
    """Clients of idled service ports: those that are held now, and what became of others.

    `held_udp_clients` are those whose last datagrams are kept. `expired` were held for the whole hold time-out,
    `displaced` had to go before: for others, or for want of descriptors. Those that left by themselves are in neither.
    """

    held_connections: int = 0
    held_udp_clients: int = 0
    wake_ups: int = 0
    expired: int = 0
    displaced: int = 0
    wake_times: WakeTimes = field(default_factory=WakeTimes)

    def plus(self, other: WakingCounters) -> WakingCounters:
        """Return the sum of both, which are of two processes."""
        return WakingCounters(
            self.held_connections + other.held_connections,
            self.held_udp_clients + other.held_udp_clients,
            self.wake_ups + other.wake_ups,
            self.expired + other.expired,
            self.displaced + other.displaced,
            self.wake_times.plus(other.wake_times),
        )


@dataclass(frozen=True, slots=True)
class LimitCounters:
    """Limits on TCP connections, what there is against them, and how often each was reached. A maximum of 0 is none.

    `admitted_connections` are those that count: relayed, being dialled, or being closed. `max_connections_reached` and
    the one for service ports say how often a listener paused. `abandoned_connections` were accepted, and no endpoint
    could be reached for them. `peer_timeouts` are connections one of whose peers acknowledged nothing any more.
    """

    max_connections: int = 0
    max_connections_per_service_port: int = 0
    admitted_connections: int = 0
    paused_listeners: int = 0
    max_connections_reached: int = 0
    max_connections_per_service_port_reached: int = 0
    abandoned_connections: int = 0
    idle_timeouts: int = 0
    half_close_timeouts: int = 0
    peer_timeouts: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One of the processes that move the bytes, where there are several. `restarts` counts those it took over from."""

    name: str
    resident_bytes: int = 0
    open_connections: int = 0
    open_sessions: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """A reading of all counters of a data path at one moment.

    `endpoints` has those that are endpoints now. The totals in `service_ports` and `total` include what has been
    removed since, so they never fall.
    """

    endpoints: Mapping[ServicePortName, Mapping[Endpoint, EndpointCounters]]
    service_ports: Mapping[ServicePortName, EndpointCounters] = field(default_factory=dict)
    total: EndpointCounters = field(default_factory=EndpointCounters)
    open_connections: int = 0
    open_sessions: int = 0
    accept_errors: int = 0
    dropped_datagrams: int = 0
    evicted_sessions: int = 0
    limits: LimitCounters = field(default_factory=LimitCounters)
    waking: WakingCounters = field(default_factory=WakingCounters)
    workers: tuple[WorkerReading, ...] = ()


class CountedServicePort(Protocol):
    """One service port of a data path, read when asked, also after it has been removed."""

    @property
    def name(self) -> ServicePortName: ...

    def total(self) -> EndpointCounters:
        """Return the totals over all endpoints that it ever had."""

    def counters(self) -> Mapping[Endpoint, EndpointCounters]:
        """Return a reading of each present endpoint."""


@dataclass(frozen=True, slots=True)
class LiveCounters:
    """The counters of a data path, for reading one service port after the other while others work.

    `gone` is what those service ports had counted that were removed before. It was read first, and each of
    `service_ports` can be read whatever becomes of it, so the sum of all never falls from one reading to the next.
    """

    service_ports: tuple[CountedServicePort, ...] = ()
    gone: EndpointCounters = field(default_factory=EndpointCounters)
    open_connections: int = 0
    open_sessions: int = 0
    accept_errors: int = 0
    dropped_datagrams: int = 0
    evicted_sessions: int = 0
    limits: LimitCounters = field(default_factory=LimitCounters)
    waking: WakingCounters = field(default_factory=WakingCounters)
    workers: tuple[WorkerReading, ...] = ()
