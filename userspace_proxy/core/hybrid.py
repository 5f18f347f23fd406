"""Hybrid mode: the services that this proxy owns beside a kube-proxy in another mode, which has all others.

    not idled --idled--> idled --endpoints--> waking --after a minute--> not idled
                           ^------idled again----'

Kernel rules lead an idled service port here. One that wakes has none any more, so that new clients go the other
proxy's way, but it is served here for as long as those need who came before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from userspace_proxy.core.model import ServicePortName, Snapshot

WAKING_S = 60.0
"""Source: OpenShift's hybrid proxy."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The service ports that are owned here, idled or waking. `waking` says until when, in monotonic seconds."""

    idled: frozenset[ServicePortName] = frozenset()
    waking: Mapping[ServicePortName, float] = field(default_factory=lambda: MappingProxyType({}))

    def after(self, snapshot: Snapshot, *, now: float) -> Ownership:
        """Return what is owned once this snapshot is known. `now` is monotonic seconds."""
        idled, waking = set(), {}
        for name, service_port in snapshot.service_ports.items():
            if service_port.is_idled:
                idled.add(name)
            elif name in self.idled and (service_port.endpoints or service_port.external_endpoints):
                waking[name] = now + WAKING_S
            elif name in self.waking and now < self.waking[name]:
                waking[name] = self.waking[name]
        return Ownership(frozenset(idled), MappingProxyType(waking))

    def served(self, snapshot: Snapshot) -> Snapshot:
        """Return what the data path serves of a snapshot: all that is owned."""
        owned = {
            name: service_port
            for name, service_port in snapshot.service_ports.items()
            if name in self.idled or name in self.waking
        }
        return Snapshot(MappingProxyType(owned))

    @property
    def changes_at(self) -> float:
        """When the next one is waking no more, in monotonic seconds; infinity for never."""
        return min(self.waking.values(), default=math.inf)
