"""Asking for pods: once per wake-up of a service port, and only while somebody waits for them.

async with asyncio.TaskGroup() as tasks:
    waker = Waker(connection, node_name, source.idled)
    tasks.create_task(waker.run())
    waker.needs_pods(name)

The cluster is told by a core/v1 Event, as OpenShift's unidling controller knows no other kind. Where that is permitted,
the workloads behind the service are scaled up, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from userspace_proxy.core.errors import ApiRefused, ProxyError, StreamBroken
from userspace_proxy.core.idling import IdledService, ScaleTarget, WakeRequest, WakeResult
from userspace_proxy.core.model import ServicePortName
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.events import CONTROLLER, ApiEvents, EventNames, ObjectReference, may_pass
from userspace_proxy.sources.pace import Backoff, Clock, Sleep
from userspace_proxy.sources.resources import path_of

_SILENCE_S = 10.0
_UNAUTHORIZED, _FORBIDDEN, _CONFLICT = 401, 403, 409

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WakeSettings:
    """How long a wake-up lasts at most, in seconds, and whether workloads are scaled up in it."""

    hold_timeout_s: float = 120.0
    scales: bool = False


@dataclass(frozen=True, slots=True)
class _WakeUp:
    """A wake-up of a service port: when it began, in seconds since the epoch, and when it ends, by the clock."""

    name: ServicePortName
    began_at: float
    ends_at: float


class Waker:
    """Does what is needed to wake service ports, while `run` runs. One never waits for another.

    `find` returns what is known of a service port that is idled now, and None once it is awake, or gone: then nothing
    is done for it any more. `settings` is asked at each wake-up. `on_result` is told how each request has ended.
    """

    def __init__(
        self,
        connection: ApiConnection,
        host_name: str,
        find: Callable[[ServicePortName], IdledService | None],
        settings: Callable[[], WakeSettings] = WakeSettings,
        *,
        on_result: Callable[[WakeRequest, WakeResult], None] = lambda request, result: None,
        new_backoff: Callable[[], Backoff] = Backoff,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        self._connection = connection
        self._events = ApiEvents(connection)
        self._host_name = host_name
        self._find = find
        self._settings = settings
        self._on_result = on_result
        self._new_backoff = new_backoff
        self._sleep = sleep
        self._clock = clock
        self._wall_clock = wall_clock
        self._names = EventNames()
        self._begun = asyncio.Queue[_WakeUp]()
        self._told = set[tuple[str, str]]()

    def needs_pods(self, name: ServicePortName) -> None:
        """Ask for pods for a service port, once. To be called at the beginning of each wake-up."""
        self._begun.put_nowait(_WakeUp(name, self._wall_clock(), self._clock() + self._settings().hold_timeout_s))

    async def run(self) -> None:
        """Ask for pods until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                wake_up = await self._begun.get()
                idled = self._find(wake_up.name)
                if idled is None:
                    _log.debug("%s: awake before pods could be asked for", wake_up.name)
                    continue
                _log.info("%s (%s): idled, and a client waits: asking for pods", wake_up.name, wake_up.name.protocol)
                tasks.create_task(self._tell(wake_up, idled))
                if self._settings().scales:
                    if not idled.targets:
                        _log.info("%s: nothing is scaled, as no annotation names a workload", wake_up.name)
                    for target in idled.targets:
                        tasks.create_task(self._scale_up(wake_up, target))

    async def _tell(self, wake_up: _WakeUp, idled: IdledService) -> None:
        name = wake_up.name
        event = self._event(wake_up, idled)

        async def create() -> WakeResult:
            try:
                await self._events.create(name.namespace, event)
            except ApiRefused as refused:
                if refused.status != _CONFLICT:  # else an earlier try that seemed lost has arrived
                    raise
            return "done"

        right = 'grant the verb create on events (API group "")'
        self._on_result("event", await self._persist(wake_up, create, right))

    async def _scale_up(self, wake_up: _WakeUp, target: ScaleTarget) -> None:
        group = target.api_version.rpartition("/")[0]
        right = f'grant the verbs get and update on {target.plural}/scale (API group "{group}")'
        action = partial(self._scale_from_zero, wake_up.name, target)
        self._on_result("scaling", await self._persist(wake_up, action, right))

    async def _persist(self, wake_up: _WakeUp, action: Callable[[], Awaitable[WakeResult]], right: str) -> WakeResult:
        """Return how an action has ended, which is tried for as long as somebody waits for it.

        `right` is what is to be granted where the action is forbidden.
        """
        backoff = self._new_backoff()
        while True:
            try:
                return await action()
            except ApiRefused as refused:
                if not (may_pass(refused) or refused.status in (_UNAUTHORIZED, _CONFLICT)):
                    self._tell_refusal(wake_up.name, refused, right)
                    return "failed"
                failure: Exception = refused
            except ProxyError as error:
                failure = error
            except Exception:
                _log.exception("%s: a fault of ours while asking for pods", wake_up.name)
                return "failed"
            await self._sleep(max(0.0, min(backoff.delay_s(failure), wake_up.ends_at - self._clock())))
            if self._find(wake_up.name) is None:
                _log.debug("%s: awake, though %s", wake_up.name, failure)
                return "unneeded"
            if self._clock() >= wake_up.ends_at:
                _log.warning("%s: pods were not asked for in time: %s", wake_up.name, failure)
                return "failed"

    def _tell_refusal(self, name: ServicePortName, refused: ApiRefused, right: str) -> None:
        """Say what was refused. What is forbidden is told once, as each wake-up would repeat it."""
        if refused.status != _FORBIDDEN:
            _log.error("%s: pods cannot be asked for: %s", name, refused)
        elif (refused.verb, right) not in self._told:
            self._told.add((refused.verb, right))
            _log.error("%s: pods cannot be asked for: %s; %s, see docs/waking.md", name, refused, right)

    async def _scale_from_zero(self, name: ServicePortName, target: ScaleTarget) -> WakeResult:
        """Give a workload its former size if it has none now. What anyone else changes meanwhile is a conflict."""
        scale = await self._scale("get", name.namespace, target)
        if scale["spec"].get("replicas", 0):
            return "unneeded"
        scale["spec"]["replicas"] = target.replicas
        await self._scale("update", name.namespace, target, scale)
        _log.info("%s: scaled %s from 0 to %d", name, target, target.replicas)
        return "done"

    async def _scale(self, verb: str, namespace: str, target: ScaleTarget, body: object = None) -> dict[str, Any]:
        resource = f"{target.plural}/scale {namespace}/{target.name}"
        path = f"{path_of(target.api_version, namespace, target.plural)}/{quote(target.name, safe='')}/scale"
        async with self._connection.request(verb, resource, path, silence_s=_SILENCE_S, body=body) as response:
            answer = await response.read()
        try:
            scale = msgspec.json.decode(answer, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StreamBroken(verb, resource, f"no Scale: {error}") from error
        if not isinstance(scale.get("spec"), dict):
            raise StreamBroken(verb, resource, "a Scale without a spec")
        return scale

    def _event(self, wake_up: _WakeUp, idled: IdledService) -> Mapping[str, object]:
        """Return the Event. Source: OpenShift, whose message has the names of service and port, which may be empty."""
        name = wake_up.name
        service = ObjectReference(
            "Service", name.service, name.namespace, idled.uid, resource_version=idled.resource_version
        )
        began_at = f"{datetime.fromtimestamp(wake_up.began_at, UTC):%Y-%m-%dT%H:%M:%SZ}"
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": self._names.fresh(name.service, wake_up.began_at), "namespace": name.namespace},
            "involvedObject": service.as_mapping(),
            "reason": "NeedPods",
            "message": f"The service-port {name.service}:{name.port} needs pods.",
            "source": {"component": CONTROLLER, "host": self._host_name},
            "firstTimestamp": began_at,
            "lastTimestamp": began_at,
            "count": 1,
            "type": "Normal",
        }
