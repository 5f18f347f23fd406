"""Hybrid mode: the services that this proxy owns beside a kube-proxy in another mode, which has all others.

    not idled --idled--> idled --endpoints--> waking --after a minute--> not idled
                           ^------idled again----'

Kernel rules lead an idled service port here. One that wakes has none any more, so that new clients go the other
proxy's way, but it is served here for as long as those need who came before.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from userspace_proxy.core.model import ServicePort, ServicePortName, Snapshot

WAKING_S = 60.0
"""Source: OpenShift's hybrid proxy."""


class State(enum.Enum):
    """What a service port is that is owned here."""

    IDLED = enum.auto()
    WAKING = enum.auto()


@dataclass(frozen=True, slots=True)
class Owned:
    """A state and when it ends, in monotonic seconds. What is idled stays so while it asks for waking."""

    state: State
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Ownership:
    """The service ports that are owned here. All others are not idled."""

    owned: Mapping[ServicePortName, Owned] = field(default_factory=lambda: MappingProxyType({}))

    def after(self, snapshot: Snapshot, *, now: float, hold_timeout_s: float) -> Ownership:
        """Return what is owned once this snapshot is known. `now` is monotonic seconds.

        A service port that was idled and neither asks for waking any more nor has endpoints yet stays idled for
        `hold_timeout_s`: OpenShift's controller takes the annotation away before the pods are there.
        """
        owned = {}
        for name, service_port in snapshot.service_ports.items():
            after = _next(self.owned.get(name), service_port, now, hold_timeout_s)
            if after is not None:
                owned[name] = after
        return Ownership(MappingProxyType(owned))

    def served(self, snapshot: Snapshot) -> Snapshot:
        """Return what the data path serves: what is owned, of the snapshot that `after` was told."""
        return Snapshot(MappingProxyType(dict(self._served(snapshot))))

    def those(self, state: State, service_ports: Iterable[ServicePort]) -> tuple[ServicePort, ...]:
        """Return the service ports that are in this state."""
        owned = self.owned
        return tuple(each for each in service_ports if each.name in owned and owned[each.name].state is state)

    @property
    def changes_at(self) -> float:
        """When the next state ends by itself, in monotonic seconds; infinity for never."""
        return min((each.until for each in self.owned.values()), default=math.inf)

    def _served(self, snapshot: Snapshot) -> Iterator[tuple[ServicePortName, ServicePort]]:
        for name, owned in self.owned.items():
            service_port = snapshot.service_ports[name]
            if owned.state is State.IDLED and not service_port.wakes_on_connect:
                service_port = replace(service_port, wakes_on_connect=True)  # its clients still wait
            yield name, service_port


def _next(before: Owned | None, service_port: ServicePort, now: float, hold_timeout_s: float) -> Owned | None:
    if service_port.is_idled:
        return Owned(State.IDLED)
    if before is None:
        return None
    after = before
    if before.state is State.IDLED:
        if service_port.endpoints or service_port.external_endpoints:
            return Owned(State.WAKING, now + WAKING_S)
        after = Owned(State.IDLED, min(before.until, now + hold_timeout_s))
    return after if now < after.until else None
