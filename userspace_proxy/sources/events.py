"""Events: what the cluster is told about this node's proxy. Telling never blocks, never fails, never piles up.

async with asyncio.TaskGroup() as tasks:
    events = EventRecorder(ApiEvents(connection), host_name)
    tasks.create_task(events.run())
    events.record(node_reference(name), STARTING)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from userspace_proxy.core.errors import ApiRefused, ProxyError
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.pace import Backoff, Clock, Sleep
from userspace_proxy.sources.resources import path_of

CONTROLLER = "kube-proxy"
_CAPACITY = 64
_TRIES = 6
_LONGEST_NOTE = 1024
_LONGEST_INSTANCE = 128
_SILENCE_S = 10.0
_RETRIED_STATUSES = frozenset({408, 429})

_log = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """The object that an event is about."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"
    resource_version: str = ""

    def as_mapping(self) -> Mapping[str, str]:
        """Return the reference as an event has it."""
        reference = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
            "resourceVersion": self.resource_version,
        }
        return {key: value for key, value in reference.items() if value}


@dataclass(frozen=True, slots=True)
class Occurrence:
    """What happened. `reason` and `action` are words for machines, `note` is for people."""

    reason: str
    action: str
    type: EventType = "Normal"
    note: str = ""


STARTING = Occurrence("Starting", "StartKubeProxy")
READ_ONLY_SYS = Occurrence(
    "readOnlySysFS",
    "StartKubeProxy",
    "Warning",
    "CRI error: /sys is read-only: cannot modify conntrack limits, problems may arise later "
    "(If running Docker, see docker issue #24000)",
)


def server_failed(event_reason: str, note: str) -> Occurrence:
    """Return what is told when a server that must be there cannot listen, such as FailedToStartMetricServer."""
    return Occurrence(event_reason, "StartKubeProxy", "Warning", note)


def service_health_failed(node_name: str, service: str, port: int, why: str) -> Occurrence:
    """Return what is told of a service whose health check cannot be served."""
    note = f'node {node_name} failed to start healthcheck "{service}" on port {port}: {why}'
    return Occurrence("FailedToStartServiceHealthcheck", "Listen", "Warning", note)


def node_port_unavailable(node_name: str, service_port: str, why: str) -> Occurrence:
    """Return what is told of a service whose node port another program has."""
    note = f"node {node_name} does not serve the node port of {service_port}: {why}; trying again"
    return Occurrence("NodePortUnavailable", "Listen", "Warning", note)


def node_reference(name: str) -> ObjectReference:
    """Return the reference to a node. `kubectl describe node` finds events by the name in the place of the UID."""
    return ObjectReference("Node", name, uid=name)


class EventSink(Protocol):
    """Where events go."""

    async def create(self, namespace: str, event: Mapping[str, object]) -> None:
        """Create an event, of events.k8s.io/v1 or v1 as its `apiVersion` says. Raises ProxyError."""


class ApiEvents:
    """Creates events in an API server."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection = connection

    async def create(self, namespace: str, event: Mapping[str, object]) -> None:
        api_version = str(event["apiVersion"])
        group = api_version.rpartition("/")[0]
        resource, path = f"events.{group}" if group else "events", path_of(api_version, namespace, "events")
        async with self._connection.request("create", resource, path, silence_s=_SILENCE_S, body=event) as response:
            await response.read()


class EventNames:
    """Names for events, each of them new."""

    def __init__(self) -> None:
        self._last_ns = 0

    def fresh(self, regarding: str, now: float) -> str:
        """Return a name for an event about the object `regarding`, at `now` in seconds since the epoch."""
        self._last_ns = max(int(now * 1e9), self._last_ns + 1)
        return f"{regarding}.{self._last_ns:x}"


def may_pass(refused: ApiRefused) -> bool:
    """Tell whether the same request may be accepted later."""
    return refused.status >= 500 or refused.status in _RETRIED_STATUSES


class EventRecorder:
    """Sends events one after the other while `run` runs; those that come too fast are dropped and counted.

    `dropped` counts events that nobody will see, for whatever reason.
    """

    def __init__(
        self,
        sink: EventSink,
        host_name: str,
        *,
        capacity: int = _CAPACITY,
        backoff: Backoff | None = None,
        sleep: Sleep = asyncio.sleep,
        wall_clock: Clock = time.time,
    ) -> None:
        self.dropped = 0
        self._sink = sink
        self._instance = f"{CONTROLLER}-{host_name}"[:_LONGEST_INSTANCE]
        self._capacity = capacity
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._wall_clock = wall_clock
        self._overflow_is_told = False
        self._names = EventNames()
        self._waiting: deque[tuple[str, Mapping[str, object]]] = deque()
        self._has_waiting = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def record(self, regarding: ObjectReference, occurrence: Occurrence) -> None:
        """Send an event soon."""
        if len(self._waiting) >= self._capacity:
            self.dropped += 1
            if not self._overflow_is_told:
                self._overflow_is_told = True
                _log.warning("events are dropped, as %d wait to be sent: %s", self._capacity, occurrence.reason)
            return
        namespace = regarding.namespace or "default"
        self._waiting.append((namespace, self._event(namespace, regarding, occurrence)))
        self._is_empty.clear()
        self._has_waiting.set()

    async def run(self) -> None:
        """Send events until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._waiting:
                namespace, event = self._waiting[0]
                await self._send(namespace, event)
                self._waiting.popleft()
            self._has_waiting.clear()
            self._is_empty.set()
            self._overflow_is_told = False

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all events are sent or given up, at most so long. Return whether all were."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True

    async def _send(self, namespace: str, event: Mapping[str, object]) -> None:
        self._backoff.reset()
        reason = str(event["reason"])
        for _ in range(_TRIES):
            try:
                await self._sink.create(namespace, event)
            except ApiRefused as refused:
                if refused.status == 409:  # an earlier try that seemed lost has arrived
                    return
                if not may_pass(refused):
                    self._drop(reason, str(refused))
                    return
                failure: Exception = refused
            except ProxyError as unreachable:
                failure = unreachable
            except Exception:
                _log.exception("event %s: a fault of ours", reason)
                self.dropped += 1
                return
            else:
                return
            await self._sleep(self._backoff.delay_s(failure))
        self._drop(reason, str(failure))

    def _drop(self, reason: str, why: str) -> None:
        self.dropped += 1
        _log.warning("the event %s is not recorded: %s", reason, why)

    def _event(self, namespace: str, regarding: ObjectReference, occurrence: Occurrence) -> Mapping[str, object]:
        now = self._wall_clock()
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": self._names.fresh(regarding.name, now), "namespace": namespace},
            "eventTime": f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": occurrence.action,
            "reason": occurrence.reason,
            "regarding": regarding.as_mapping(),
            "note": occurrence.note[:_LONGEST_NOTE],
            "type": occurrence.type,
        }
