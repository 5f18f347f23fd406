"""What was relayed: in total, for each service port up to a limit, and for each endpoint where that is wanted.

No series tells of a client. A series goes with its service port or endpoint; the totals stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from userspace_proxy.core.counters import WAKE_TIME_BUCKETS_S, EndpointCounters, LiveCounters, WakeTimes, add_up
from userspace_proxy.core.model import ServicePortName
from userspace_proxy.metrics.exposition import header, label_set, number

_PREFIX = "userspace_proxy_"


@dataclass(frozen=True, slots=True)
class _Family:
    """One field of the counters: how its metric is called after the prefix, and what it means."""

    name: str
    kind: str
    documentation: str
    field: str


_FAMILIES = (
    _Family("connections_total", "counter", "TCP connections that were relayed.", "connections"),
    _Family("open_connections", "gauge", "TCP connections that are relayed now.", "open_connections"),
    _Family("dial_failures_total", "counter", "Attempts to reach an endpoint that failed.", "dial_failures"),
    _Family("sessions_total", "counter", "UDP sessions that were opened.", "sessions"),
    _Family("open_sessions", "gauge", "UDP sessions that are open now.", "open_sessions"),
    _Family("to_endpoint_bytes_total", "counter", "Payload that clients sent to endpoints.", "bytes_to_endpoint"),
    _Family("to_client_bytes_total", "counter", "Payload that endpoints sent to clients.", "bytes_to_client"),
)
_HOST_FAMILIES = (
    _Family("accept_errors_total", "counter", "Connections that could not be accepted.", "accept_errors"),
    _Family("dropped_datagrams_total", "counter", "Datagrams that could not be passed on.", "dropped_datagrams"),
    _Family("evicted_sessions_total", "counter", "UDP sessions that ended to make room.", "evicted_sessions"),
)
_LIMITS = (
    _Family("max_connections", "gauge", "Limit of TCP connections; 0 is none.", "max_connections"),
    _Family(
        "max_connections_per_service_port",
        "gauge",
        "Limit of TCP connections of each service port; 0 is none.",
        "max_connections_per_service_port",
    ),
    _Family("admitted_connections", "gauge", "TCP connections that count against it.", "admitted_connections"),
    _Family("paused_listeners", "gauge", "Listeners whose clients wait, as a limit is reached.", "paused_listeners"),
    _Family(
        "max_connections_reached_total", "counter", "Times a listener paused at that limit.", "max_connections_reached"
    ),
    _Family(
        "max_connections_per_service_port_reached_total",
        "counter",
        "Times a listener paused at that limit.",
        "max_connections_per_service_port_reached",
    ),
    _Family(
        "abandoned_connections_total",
        "counter",
        "TCP connections that were closed, as no endpoint could be reached.",
        "abandoned_connections",
    ),
    _Family("idle_timeouts_total", "counter", "TCP connections that ended, as nothing moved.", "idle_timeouts"),
    _Family(
        "half_close_timeouts_total",
        "counter",
        "Half-closed TCP connections that ended, as nothing moved.",
        "half_close_timeouts",
    ),
    _Family(
        "peer_timeouts_total", "counter", "TCP connections that ended, as a peer acknowledged nothing.", "peer_timeouts"
    ),
)
_WAKING_FAMILIES = (
    _Family("held_connections", "gauge", "TCP connections that wait at idled service ports.", "held_connections"),
    _Family("held_udp_clients", "gauge", "UDP clients whose last datagrams wait.", "held_udp_clients"),
    _Family("wake_ups_total", "counter", "Times that a client began to wait at an idled service port.", "wake_ups"),
    _Family("held_expired_total", "counter", "Held clients that were sent away, as their time was up.", "expired"),
    _Family("held_displaced_total", "counter", "Held clients that were sent away to make room.", "displaced"),
)

_WORKERS = (
    _Family("worker_resident_memory_bytes", "gauge", "Resident memory size of a worker.", "resident_bytes"),
    _Family("worker_open_connections", "gauge", "TCP connections that it relays now.", "open_connections"),
    _Family("worker_open_sessions", "gauge", "UDP sessions that it has open now.", "open_sessions"),
    _Family("worker_restarts_total", "counter", "Times its process was replaced.", "restarts"),
)

_Rows = list[tuple[str, EndpointCounters]]
"""Labels as text, and what was counted."""


def traffic_pieces(live: LiveCounters, *, service_port_limit: int, with_endpoints: bool) -> Iterator[str]:
    """Yield the metrics as text; empty pieces while counters are read.

    The first `service_port_limit` service ports, which are the oldest ones, have series of their own.
    """
    total = live.gone
    service_ports: _Rows = []
    endpoints: _Rows = []
    for each in live.service_ports:
        reading = each.total()
        total = add_up((total, reading))
        if len(service_ports) < service_port_limit:
            labels = _service_port_labels(each.name)
            service_ports.append((label_set(labels), reading))
            if with_endpoints:
                for endpoint, counted in each.counters().items():
                    endpoints.append((label_set({**labels, "endpoint": str(endpoint)}), counted))
        yield ""
    yield from _totals(live, total)
    left_out = len(live.service_ports) - len(service_ports)
    yield _single("service_ports", "gauge", "Service ports that are served.", len(live.service_ports))
    yield _single("service_ports_without_series", "gauge", "Service ports beyond the limit for series.", left_out)
    yield from _workers(live)
    yield from _series("service_port_", service_ports)
    if with_endpoints:
        yield from _series("endpoint_", endpoints)


def _totals(live: LiveCounters, total: EndpointCounters) -> Iterator[str]:
    for family in _FAMILIES:
        # What is open is known for the whole at once, while the sum took its time.
        source: object = live if family.kind == "gauge" else total
        yield _single(family.name, family.kind, family.documentation, getattr(source, family.field))
    for family in _HOST_FAMILIES:
        yield _single(family.name, family.kind, family.documentation, getattr(live, family.field))
    for family in _LIMITS:
        yield _single(family.name, family.kind, family.documentation, getattr(live.limits, family.field))
    for family in _WAKING_FAMILIES:
        yield _single(family.name, family.kind, family.documentation, getattr(live.waking, family.field))
    yield _wake_times(live.waking.wake_times)


def _wake_times(times: WakeTimes) -> str:
    name = f"{_PREFIX}wake_up_duration_seconds"
    documentation = "How long wake-ups took, from the first client to the first endpoint. Failed ones are not counted."
    cumulated = tuple(accumulate(times.counts))
    limits = [*map(str, WAKE_TIME_BUCKETS_S), "+Inf"]
    buckets = "".join(f'{name}_bucket{{le="{limit}"}} {n}\n' for limit, n in zip(limits, cumulated, strict=True))
    return (
        f"{header(name, 'histogram', documentation)}{buckets}"
        f"{name}_sum {number(times.total_s)}\n{name}_count {cumulated[-1]}\n"
    )


def _workers(live: LiveCounters) -> Iterator[str]:
    for family in _WORKERS if live.workers else ():
        name = _PREFIX + family.name
        yield header(name, family.kind, family.documentation)
        for worker in live.workers:
            yield f"{name}{label_set({'process': worker.name})} {getattr(worker, family.field)}\n"


def _series(level: str, rows: Iterable[tuple[str, EndpointCounters]]) -> Iterator[str]:
    for family in _FAMILIES:
        name = f"{_PREFIX}{level}{family.name}"
        read = attrgetter(family.field)
        yield header(name, family.kind, family.documentation)
        for labels, counted in rows:
            yield f"{name}{labels} {read(counted)}\n"


def _single(name: str, kind: str, documentation: str, value: int) -> str:
    return f"{header(_PREFIX + name, kind, documentation)}{_PREFIX}{name} {value}\n"


def _service_port_labels(name: ServicePortName) -> dict[str, str]:
    """Return labels that do not collide with those that Prometheus gives to what it scrapes."""
    return {
        "service_namespace": name.namespace,
        "service_name": name.service,
        "service_port": name.port,
        "protocol": name.protocol.value,
    }
