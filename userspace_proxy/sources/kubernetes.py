"""The desired state of a cluster, followed: services, endpoint slices and this node, as one snapshot after the other.

async with ApiConnection(load_access(kubeconfig)) as connection, asyncio.TaskGroup() as tasks:
    source = KubernetesSource(connection)
    tasks.create_task(source.run())
    while True:
        await proxy.apply(await source.next_snapshot())
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from userspace_proxy.core.desired import DesiredState
from userspace_proxy.core.endpoints import NodeFacts
from userspace_proxy.core.errors import ApiRefused
from userspace_proxy.core.idling import IdledService
from userspace_proxy.core.model import ServicePortName, Snapshot
from userspace_proxy.core.objects import (
    Endpoints,
    EndpointSlice,
    EndpointsMetadata,
    KubernetesObject,
    Node,
    ObjectKey,
    Service,
    triggered_at,
)
from userspace_proxy.garbage import keep_out_of_collections
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.pace import Clock, Pace, Sleep
from userspace_proxy.sources.reflector import Reflector, WatchSettings
from userspace_proxy.sources.report import Report, WatchHealth
from userspace_proxy.sources.resources import (
    ObjectT,
    Resource,
    endpoint_slices,
    endpoints,
    endpoints_metadata,
    services,
    this_node,
)
from userspace_proxy.sources.this_node import ThisNode, observe

_RETRY_S = 10.0
_LOOK_FOR_SLICES_S = 60.0
_LINGER_S = 120.0
_COLLECTED_TOGETHER = 50  # services: changes free as much as they make, so Python itself would let thousands pile up

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """What is followed: all namespaces or those named, and the node `node_name`, if it is named.

    An empty `node_name` means that topology hints and the policies `Local` do not apply. `unidling` lets annotations
    say which services their first client is to wake, also those of Endpoints.
    `work_s` and `rest_s` are how long the source works at a time, and how long it then leaves the event loop alone.
    """

    namespaces: tuple[str, ...] = ()
    node_name: str = ""
    unidling: bool = False
    watch: WatchSettings = field(default_factory=WatchSettings)
    work_s: float = 0.001
    rest_s: float = 0.001


class KubernetesSource:
    """Follows a cluster while `run` runs. Everything it knows is in `desired`.

    `build_errors` counts services whose state could not be worked out; they stay as they were and are tried again.
    `on_node` is told what becomes of this node, as soon as it is known. `linger_s` says for how many seconds an idled
    service stays so whose annotation was taken away, as long as it has no endpoints.
    """

    def __init__(
        self,
        connection: ApiConnection,
        settings: KubernetesSettings | None = None,
        *,
        desired: DesiredState | None = None,
        on_node: Callable[[ThisNode], None] = lambda node: None,
        linger_s: Callable[[], float] = lambda: _LINGER_S,
        rng: random.Random | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self._connection = connection
        self._settings = settings or KubernetesSettings()
        self._desired = desired or DesiredState(unidling=self._settings.unidling, lingers=True)
        self._on_node = on_node
        self._linger_s = linger_s
        self._lingering: dict[ObjectKey, asyncio.TimerHandle] = {}
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._clock = clock
        access = connection.access
        self._report = Report(access.server, access.origin, clock=clock, on_listed=self._wake)
        self._pace = Pace(self._settings.work_s, self._settings.rest_s)
        self._services: list[Reflector[Service]] = []
        self._endpoints: dict[str, Reflector[EndpointSlice] | Reflector[Endpoints]] = {}
        self._metadata: dict[str, Reflector[EndpointsMetadata]] = {}
        self._has_changed = asyncio.Event()
        self._handed_out: Snapshot | None = None
        self._node: ThisNode | None = None
        self._settled = 0
        self._started_at = time.time()
        self._triggered_at: list[float] = []
        self.build_errors = 0
        if self._settings.node_name:
            self._desired.set_node(NodeFacts(self._settings.node_name))

    @property
    def has_synced(self) -> bool:
        """Whether the first lists of services and of endpoints are complete, those that the server refuses left out."""
        followed = [*self._services, *self._endpoints.values(), *self._metadata.values()]
        return bool(followed) and all(each.is_listed for each in followed)

    @property
    def node(self) -> ThisNode | None:
        """This node as last heard of; None before."""
        return self._node

    def watches(self) -> tuple[WatchHealth, ...]:
        """Return how each list and watch does."""
        return self._report.watches()

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        namespaces = self._settings.namespaces or ("",)
        self._services = [self._reflector(services(namespace)) for namespace in namespaces]
        slices = {namespace: self._reflector(endpoint_slices(namespace)) for namespace in namespaces}
        self._endpoints = {**slices}
        if self._settings.unidling:
            self._metadata = {namespace: self._reflector(endpoints_metadata(namespace)) for namespace in namespaces}
        async with asyncio.TaskGroup() as tasks:
            for each in self._services:
                tasks.create_task(each.run())
            for namespace, reflector in slices.items():
                tasks.create_task(self._follow_endpoints(namespace, reflector))
            for namespace, metadata in list(self._metadata.items()):
                tasks.create_task(self._follow_metadata(namespace, metadata, slices[namespace]))
            if self._settings.node_name:
                tasks.create_task(self._reflector(this_node(self._settings.node_name)).run())

    def idled(self, name: ServicePortName) -> IdledService | None:
        """Return what it takes to wake a service port; None when it is not idled by the last snapshot."""
        port = self._handed_out.service_ports.get(name) if self._handed_out else None
        return self._desired.idled(name.namespace, name.service) if port and port.is_idled else None

    async def next_snapshot(self) -> Snapshot:
        """Return the state of the cluster once it differs from the last one returned.

        The first one comes when services and endpoints have both been listed, even if there are none.
        """
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            if not self.has_synced:
                continue
            await self._settle()
            snapshot = self._desired.snapshot()
            self._limit_lingering()
            for notice in self._desired.take_notices():
                _log.warning("%s", notice)
            if snapshot is not self._handed_out:
                self._handed_out = snapshot
                return snapshot
            self._triggered_at.clear()

    def take_trigger_times(self) -> tuple[float, ...]:
        """Return when pods changed in ways that the last snapshot tells of first, in seconds since the epoch.

        What changed before this source was made does not count. Source: kube-proxy.
        """
        times, self._triggered_at = self._triggered_at, []
        return tuple(times)

    async def _settle(self) -> None:
        """Work out what has changed, a service at a time. One that fails never stops another."""
        self._pace.start()
        while not self._desired.is_settled:
            try:
                self._desired.settle()
            except Exception:
                self.build_errors += 1
                _log.exception("a service cannot be worked out; it stays as it was, and is tried again")
                asyncio.get_running_loop().call_later(_RETRY_S, self._wake)
            self._settled += 1
            if self._settled % _COLLECTED_TOGETHER == 0:
                keep_out_of_collections()
            await self._pace.breathe()

    def _limit_lingering(self) -> None:
        """Give services that wait for endpoints without an annotation some time, and no more."""
        for key in self._desired.take_lingering():
            if known := self._lingering.pop(key, None):
                known.cancel()
            self._lingering[key] = asyncio.get_running_loop().call_later(self._linger_s(), self._end_lingering, key)

    def _end_lingering(self, key: ObjectKey) -> None:
        del self._lingering[key]
        self._desired.end_lingering(key)
        self._wake()

    async def _follow_endpoints(self, namespace: str, slices: Reflector[EndpointSlice]) -> None:
        """Follow slices; where they are not served, Endpoints, until slices are. Then both: the slices win."""
        try:
            await slices.run()
        except ApiRefused as refused:
            _log.info("%s; endpoints are followed instead, which are deprecated", refused)
        self._metadata.pop(namespace, None)
        fallback = self._reflector(endpoints(namespace))
        self._endpoints[namespace] = fallback
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fallback.run())
            while True:
                await self._sleep(_LOOK_FOR_SLICES_S)
                with suppress(ApiRefused):
                    await slices.run()

    async def _follow_metadata(
        self, namespace: str, metadata: Reflector[EndpointsMetadata], slices: Reflector[EndpointSlice]
    ) -> None:
        """Follow the annotations of Endpoints beside slices. Where that is refused, only those of services count."""
        await slices.until_listed()
        is_told = False
        while True:
            try:
                await metadata.run()
            except ApiRefused as refused:
                if not is_told:
                    _log.warning("%s; annotations of Endpoints do not count, those of Services do", refused)
                is_told = True
            if self._metadata.pop(namespace, None):
                self._wake()
            await self._sleep(_LOOK_FOR_SLICES_S)

    def _reflector(self, resource: Resource[ObjectT]) -> Reflector[ObjectT]:
        return Reflector(
            self._connection,
            resource,
            self,
            self._report,
            self._settings.watch,
            pace=self._pace,
            rng=self._rng,
            sleep=self._sleep,
            clock=self._clock,
        )

    def upsert(self, each: KubernetesObject | Node) -> None:
        """Take in an object. For reflectors."""
        if isinstance(each, Node):
            self._observe(observe(each))
        else:
            if self._desired.upsert(each):
                moment = None if isinstance(each, EndpointsMetadata) else triggered_at(each)  # its slices tell the same
                if moment is not None and moment > self._started_at:
                    self._triggered_at.append(moment)
            self._wake()

    def delete(self, kind: type[KubernetesObject | Node], namespace: str, name: str) -> None:
        """Forget an object. For reflectors."""
        if issubclass(kind, Node):
            if self._node is not None:
                self._observe(self._node.deleted())
        else:
            self._desired.delete(kind, namespace, name)
            self._wake()

    def _observe(self, node: ThisNode) -> None:
        if self._node is not None and self._node.is_eligible and not node.is_eligible:
            _log.warning("this node, %s, is going away", node.name)
        self._node = node
        self._on_node(node)
        self._desired.set_node(node.facts)
        self._wake()

    def _wake(self) -> None:
        self._has_changed.set()
