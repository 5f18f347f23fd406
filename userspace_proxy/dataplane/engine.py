"""What all listeners, dials and sessions of a data path share."""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import Protocol

from userspace_proxy.core.counters import LimitCounters
from userspace_proxy.core.model import Endpoint, ServicePortName
from userspace_proxy.dataplane.admission import Admission
from userspace_proxy.dataplane.backends import Target
from userspace_proxy.dataplane.batches import DatagramBatches, make_batches
from userspace_proxy.dataplane.interface import Notices
from userspace_proxy.dataplane.poller import make_poller
from userspace_proxy.dataplane.relay import Relay
from userspace_proxy.dataplane.resources import DescriptorGate
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.waiting import WaitingRoom

_COMPLAINT_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


class Cancellable(Protocol):
    """Something under way that can be ended."""

    def cancel(self) -> None:
        """End it and release what it holds."""


class Engine:
    """The poller, the relayed connections, the gate for descriptors, and the counts that belong to no endpoint."""

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: DataPlaneSettings, notices: Notices) -> None:
        self.loop = loop
        self.settings = settings
        self._notices = notices
        self.poller = make_poller(settings.poller, loop, are_shared=settings.workers > 1)
        self.admission = Admission(loop, settings.max_connections, settings.max_connections_per_service_port)
        self.relay = Relay(self.poller, loop, settings, self.ended)
        self.waiting = WaitingRoom(
            loop, self.poller, settings, needs_pods=self.tell_need_of_pods, complain=self.complain
        )
        self.gate = DescriptorGate(loop, self._free_descriptors)
        self.dials: set[Cancellable] = set()
        """Dials that are under way."""
        self.abandoned = 0
        self.accept_errors = 0
        self.dropped_datagrams = 0
        self._last_complaint: dict[ServicePortName, float] = {}

    @cached_property
    def batches(self) -> DatagramBatches | None:
        """What receives and sends many datagrams at once, for all listeners. None where each is to go by itself."""
        return make_batches(self) if self.settings.use_mmsg else None

    @property
    def accept_error_count(self) -> int:
        """How often a connection could not be accepted, or none for want of descriptors."""
        return self.accept_errors + self.gate.times_closed

    def limits(self) -> LimitCounters:
        """Return how near the limits are, and how often they were reached."""
        admission, timeouts = self.admission, self.relay.timeouts
        return LimitCounters(
            max_connections=admission.max_connections,
            max_connections_per_service_port=admission.max_connections_per_service_port,
            admitted_connections=admission.open_connections,
            paused_listeners=admission.waiting,
            max_connections_reached=admission.times_full,
            max_connections_per_service_port_reached=admission.times_service_port_full,
            abandoned_connections=self.abandoned,
            idle_timeouts=timeouts.idle,
            half_close_timeouts=timeouts.half_close,
            peer_timeouts=timeouts.peer,
        )

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs and limits from now on."""
        self.settings = settings
        self.admission.reconfigure(settings.max_connections, settings.max_connections_per_service_port)
        self.relay.reconfigure(settings)
        self.waiting.settings = settings

    def ended(self, target: Target) -> None:
        """A connection that was relayed to this target is closed."""
        self.admission.released(target.name)

    def complain(self, name: ServicePortName, text: str) -> None:
        """Log a warning about a service port, at most one each 10 s."""
        now = self.loop.time()
        if now - self._last_complaint.get(name, -_COMPLAINT_INTERVAL_S) >= _COMPLAINT_INTERVAL_S:
            self._last_complaint[name] = now
            _log.warning("%s (%s): %s", name, name.protocol, text)

    def tell_dial_failure(self, name: ServicePortName, endpoint: Endpoint) -> None:
        """Tell whoever wants to know that an endpoint could not be reached. A fault of theirs ends no connection."""
        try:
            self._notices.dial_failed(name, endpoint)
        except Exception:
            _log.exception("%s (%s): fault while telling of a dial failure", name, name.protocol)

    def tell_need_of_pods(self, name: ServicePortName) -> None:
        """Tell whoever wants to know that a client waits at an idled service port. A fault of theirs harms nobody."""
        try:
            self._notices.needs_pods(name)
        except Exception:
            _log.exception("%s (%s): fault while telling that pods are needed", name, name.protocol)

    def _free_descriptors(self) -> None:
        self.relay.free_descriptors()
        self.waiting.free_descriptors()

    def forget(self, name: ServicePortName) -> None:
        """Keep nothing about a service port that is gone."""
        self.waiting.forget(name)
        self._last_complaint.pop(name, None)

    def close(self) -> None:
        """Close all connections and end all dials."""
        self.admission.shutdown()
        self.gate.shutdown()
        self.waiting.close()
        for dial in list(self.dials):
            dial.cancel()
        self.relay.close_all()
        self.poller.shutdown()
