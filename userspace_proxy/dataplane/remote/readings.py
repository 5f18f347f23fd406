"""Counters of data processes, added up over their lives, so that no total ever falls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import msgspec

from userspace_proxy.core.counters import (
    OF_THE_MOMENT,
    Counters,
    EndpointCounters,
    LiveCounters,
    WorkerReading,
    add_up,
)
from userspace_proxy.core.model import Endpoint, ServicePortName
from userspace_proxy.dataplane.remote.messages import SERVICE_PORTS_PER_MESSAGE, Reading, in_batches

Counted = TypeVar("Counted", EndpointCounters, LiveCounters)

_OF_THE_WHOLE = tuple(field.name for field in fields(LiveCounters) if field.name not in ("service_ports", "gone"))


@dataclass(frozen=True, slots=True)
class CountedPort:
    """What one service port has counted, as plain data."""

    name: ServicePortName
    of_all: EndpointCounters = field(default_factory=EndpointCounters)
    of_each: Mapping[Endpoint, EndpointCounters] = field(default_factory=dict)

    @classmethod
    def of(cls, reading: Reading) -> CountedPort:
        each = {Endpoint(address, port): EndpointCounters(*counted) for address, port, counted in reading.endpoints}
        return cls(reading.name, EndpointCounters(*reading.total), each)

    def total(self) -> EndpointCounters:
        return self.of_all

    def counters(self) -> Mapping[Endpoint, EndpointCounters]:
        return self.of_each

    def at_rest(self) -> CountedPort:
        """Return the same with nothing open."""
        return CountedPort(
            self.name,
            at_rest(self.of_all),
            {endpoint: at_rest(counted) for endpoint, counted in self.of_each.items()},
        )


class Lasting:
    """Adds what the processes had counted that are gone to what the present one says."""

    def __init__(self) -> None:
        self.last = LiveCounters()
        """What was read last, but for the service ports."""
        self._last_ports: dict[ServicePortName, CountedPort] = {}
        self._before = LiveCounters()
        self._ports_before: dict[ServicePortName, CountedPort] = {}

    def add_up(self, whole: LiveCounters, readings: Iterable[Reading]) -> LiveCounters:
        """Return the totals over all processes, given a reading of the present one."""
        self._last_ports = {reading.name: self._with_before(reading) for reading in readings}
        missing = self._ports_before.keys() - self._last_ports.keys()
        total = _added(self._before, whole)
        gone = add_up((total.gone, *(self._ports_before[name].of_all for name in missing)))
        self.last = replace(total, gone=gone, service_ports=tuple(self._last_ports.values()))
        return self.last

    def without_process(self) -> LiveCounters:
        """Return the totals as they were last read, with nothing open."""
        ports = tuple(port.at_rest() for port in self._last_ports.values())
        return replace(at_rest(self.last), service_ports=ports)

    def process_is_gone(self) -> None:
        """Begin with what was last read when the next process counts from zero."""
        self._ports_before = self._last_ports = {name: port.at_rest() for name, port in self._last_ports.items()}
        self._before = at_rest(self.last)
        self.last = self.without_process()

    def before(self) -> Iterator[bytes]:
        """Yield, bit by bit, what the processes had counted that are gone: for `go_on_from` of a successor."""
        yield msgspec.msgpack.encode(self._before)
        for ports in in_batches(self._ports_before.values(), SERVICE_PORTS_PER_MESSAGE):
            yield msgspec.msgpack.encode(tuple(map(Reading.of, ports)))

    def go_on_from(self, before: Sequence[bytes]) -> None:
        """Begin with what a former control process knew, so that nothing falls when it has died, too."""
        if not before:
            return
        whole, *rest = before
        self._before = msgspec.msgpack.decode(whole, type=LiveCounters)
        readings = (each for part in rest for each in msgspec.msgpack.decode(part, type=tuple[Reading, ...]))
        self._ports_before = self._last_ports = {each.name: CountedPort.of(each) for each in readings}
        self.last = replace(self._before, service_ports=tuple(self._last_ports.values()))

    def _with_before(self, reading: Reading) -> CountedPort:
        now = CountedPort.of(reading)
        before = self._ports_before.get(reading.name)
        if before is None:
            return now
        known = before.of_each
        return CountedPort(
            reading.name,
            add_up((before.of_all, now.of_all)),
            {key: add_up((known[key], counted)) if key in known else counted for key, counted in now.of_each.items()},
        )


def at_rest(counters: Counted) -> Counted:
    """Return the counters with nothing open, and without service ports."""
    resting: Counted = _added(counters, type(counters)())
    return resting


def at_once(live: LiveCounters) -> Counters:
    """Return live counters as one reading."""
    service_ports = {each.name: each.total() for each in live.service_ports}
    return Counters(
        endpoints={each.name: each.counters() for each in live.service_ports},
        service_ports=service_ports,
        total=add_up((live.gone, *service_ports.values())),
        **{name: getattr(live, name) for name in _OF_THE_WHOLE},
    )


def _added(before: Any, now: Any) -> Any:
    """Return the sum of two readings: of what grows, and of the moment only what is now."""
    values: dict[str, Any] = {}
    for each in fields(now):
        was, is_now = getattr(before, each.name), getattr(now, each.name)
        if each.name == "service_ports":
            values[each.name] = ()
        elif each.name == "workers":
            values[each.name] = _workers(was, is_now)
        elif each.name in OF_THE_MOMENT:
            values[each.name] = is_now
        else:
            values[each.name] = _sum(was, is_now)
    return type(now)(**values)


def _workers(before: Sequence[WorkerReading], now: Sequence[WorkerReading]) -> tuple[WorkerReading, ...]:
    """Return what the workers do now, with all restarts; where there are none now, what is left of the former ones."""
    restarts = {each.name: each.restarts for each in before}
    present = now or [WorkerReading(name) for name in restarts]
    return tuple(replace(each, restarts=each.restarts + restarts.get(each.name, 0)) for each in present)


def _sum(was: Any, is_now: Any) -> Any:
    if isinstance(is_now, tuple):
        return tuple(map(_sum, was, is_now))
    return was + is_now if isinstance(is_now, int | float) else _added(was, is_now)
