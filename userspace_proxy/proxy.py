"""The proxy as a Python object, for programs that bring their own snapshots: benchmarks, tests, tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from userspace_proxy.core.balancer import Balancer, RoundRobin
from userspace_proxy.core.counters import Counters, LiveCounters
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePortName, Snapshot
from userspace_proxy.dataplane.interface import DataPath, MakeDataPath, Notices
from userspace_proxy.dataplane.plane import DataPlane
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.reconciler import EndpointFilter, Failures, OnFailures, Reconciler, Redirect


def in_this_process(settings: DataPlaneSettings, make_balancer: Callable[[], Balancer], notices: Notices) -> DataPath:
    """Return a data path in this process."""
    return DataPlane(settings, make_balancer=make_balancer, notices=notices)


class Proxy:
    """Proxies the service ports of a snapshot while its context is open.

        async with Proxy() as proxy:
            await proxy.apply(snapshot)

    `balancer` makes the balancer of each service port and address family. `endpoint_filter` may drop endpoints before
    they are used. `on_dial_failure` is told of each endpoint that could not be reached, `needs_pods` of each wake-up of
    an idled service port, when it begins. `redirect` leads traffic from elsewhere to the listeners, after new ones were
    opened and before old ones are closed. `on_failures` is told of what cannot be listened on, whenever something was
    tried. On leaving, listeners close at once, and open connections get `drain_timeout_s` seconds to end by themselves.
    `data_path` makes what relays.
    """

    def __init__(
        self,
        settings: DataPlaneSettings | None = None,
        *,
        balancer: Callable[[], Balancer] = RoundRobin,
        endpoint_filter: EndpointFilter | None = None,
        on_dial_failure: Callable[[ServicePortName, Endpoint], None] = lambda name, endpoint: None,
        needs_pods: Callable[[ServicePortName], None] = lambda name: None,
        redirect: Redirect | None = None,
        on_failures: OnFailures = lambda failures: None,
        drain_timeout_s: float = 0.0,
        data_path: MakeDataPath = in_this_process,
    ) -> None:
        self._settings = settings or DataPlaneSettings()
        self._balancer = balancer
        self._endpoint_filter = endpoint_filter
        self._notices = Notices(dial_failed=on_dial_failure, needs_pods=needs_pods)
        self._redirect = redirect
        self._on_failures = on_failures
        self._drain_timeout_s = drain_timeout_s
        self._make_data_path = data_path
        self._tasks = asyncio.TaskGroup()
        self._has_entered = False

    async def __aenter__(self) -> Self:
        if self._has_entered:
            raise RuntimeError("a Proxy is entered once; make another one")
        self._has_entered = True
        self._data_path = self._make_data_path(self._settings, self._balancer, self._notices)
        try:
            found = await self._data_path.found()
        except BaseException:
            self._data_path.close()
            raise
        self._reconciler = Reconciler(
            self._data_path, self._endpoint_filter, self._redirect, self._on_failures, found=found
        )
        await self._tasks.__aenter__()
        self._retries = self._tasks.create_task(self._reconciler.retry_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._retries.cancel()
        try:
            await self._reconciler.stop()
            await self._data_path.drain(self._drain_timeout_s)
        finally:
            self._data_path.close()
            if kind is asyncio.CancelledError:  # the group needs to know, as it may have caused it
                await self._tasks.__aexit__(kind, error, traceback)
            else:  # an error of the body comes out as itself, not in an exception group
                await self._tasks.__aexit__(None, None, None)

    async def apply(self, snapshot: Snapshot, *, quiet: bool = False) -> Failures:
        """Serve the service ports of `snapshot` and no others. Return those that cannot be listened on, and why.

        They are logged, unless `quiet`, and tried again each second. What did not change is not touched: established
        connections stay in any case. Whatever `endpoint_filter` raises is raised, and then nothing has changed.
        """
        if not self._has_entered:
            raise RuntimeError("a Proxy serves while its context is open: async with Proxy() as proxy")
        return await self._reconciler.apply(snapshot, quiet=quiet)

    def addresses(self, name: ServicePortName) -> tuple[ListenAddress, ...]:
        """Return where the proxy listens for a service port, with real port numbers, in the order asked for."""
        return self._reconciler.addresses(name)

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs and limits from now on. The poller, splicing and the pipes stay as they are."""
        self._data_path.reconfigure(settings)

    async def counters(self) -> Counters:
        """Return a reading of all counters, as plain data."""
        return await self._data_path.counters()

    async def live_counters(self) -> LiveCounters:
        """Return all counters for reading them bit by bit, which holds nothing up however many there are."""
        return await self._data_path.live_counters()
