"""Counters of data processes, added up over their lives, so that no total ever falls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from userspace_proxy.core.counters import Counters, EndpointCounters, LiveCounters, add_up
from userspace_proxy.core.model import Endpoint, ServicePortName
from userspace_proxy.dataplane.remote.messages import Reading

_GAUGES = ("open_", "held_")
"""How the names of counters begin that say what is now: they end with their process."""

_OF_THE_WHOLE = tuple(field.name for field in fields(LiveCounters) if field.name not in ("service_ports", "gone"))


@dataclass(frozen=True, slots=True)
class CountedPort:
    """What one service port has counted, as plain data."""

    name: ServicePortName
    of_all: EndpointCounters = field(default_factory=EndpointCounters)
    of_each: Mapping[Endpoint, EndpointCounters] = field(default_factory=dict)

    def total(self) -> EndpointCounters:
        return self.of_all

    def counters(self) -> Mapping[Endpoint, EndpointCounters]:
        return self.of_each


class Lasting:
    """Adds what the processes had counted that are gone to what the present one says."""

    def __init__(self) -> None:
        self._before = LiveCounters()
        self._ports_before: dict[ServicePortName, CountedPort] = {}
        self.last = LiveCounters()
        """What was read last."""

    def add_up(self, whole: LiveCounters, readings: Iterable[Reading]) -> LiveCounters:
        """Return the totals over all processes, given a reading of the present one."""
        ports = [self._with_before(reading) for reading in readings]
        missing = self._ports_before.keys() - {port.name for port in ports}
        gone = add_up((self._before.gone, whole.gone, *(self._ports_before[name].of_all for name in missing)))
        counts = {
            name: getattr(whole, name) + (0 if name.startswith(_GAUGES) else getattr(self._before, name))
            for name in _OF_THE_WHOLE
        }
        self.last = LiveCounters(service_ports=tuple(ports), gone=gone, **counts)
        return self.last

    def without_process(self) -> LiveCounters:
        """Return the totals as they were last read, with nothing open."""
        ports = tuple(
            CountedPort(
                port.name,
                without_gauges(port.total()),
                {endpoint: without_gauges(counted) for endpoint, counted in port.counters().items()},
            )
            for port in self.last.service_ports
        )
        counts = {name: 0 if name.startswith(_GAUGES) else getattr(self.last, name) for name in _OF_THE_WHOLE}
        return LiveCounters(service_ports=ports, gone=self.last.gone, **counts)

    def process_is_gone(self) -> None:
        """Begin with what was last read when the next process counts from zero."""
        self.last = self.without_process()
        self._before = replace(self.last, service_ports=())
        self._ports_before = {
            port.name: CountedPort(port.name, port.total(), port.counters()) for port in self.last.service_ports
        }

    def _with_before(self, reading: Reading) -> CountedPort:
        total = EndpointCounters(*reading.total)
        each = {Endpoint(address, port): EndpointCounters(*counted) for address, port, counted in reading.endpoints}
        before = self._ports_before.get(reading.name)
        if before is None:
            return CountedPort(reading.name, total, each)
        known = before.of_each
        return CountedPort(
            reading.name,
            add_up((before.of_all, total)),
            {key: add_up((known[key], counted)) if key in known else counted for key, counted in each.items()},
        )


def without_gauges(counters: EndpointCounters) -> EndpointCounters:
    """Return the counters with nothing open."""
    gauges = {each.name: 0 for each in fields(EndpointCounters) if each.name.startswith(_GAUGES)}
    return replace(counters, **gauges)


def at_once(live: LiveCounters) -> Counters:
    """Return live counters as one reading."""
    service_ports = {each.name: each.total() for each in live.service_ports}
    return Counters(
        endpoints={each.name: each.counters() for each in live.service_ports},
        service_ports=service_ports,
        total=add_up((live.gone, *service_ports.values())),
        **{name: getattr(live, name) for name in _OF_THE_WHOLE},
    )
