"""A Kubernetes source that follows a test API server, with short times and bounded waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.apiserver import ApiServer
from userspace_proxy.core.desired import DesiredState
from userspace_proxy.core.model import Snapshot
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.kubernetes import KubernetesSettings, KubernetesSource
from userspace_proxy.sources.reflector import WatchSettings

LIMIT_S = 10.0
QUICK = WatchSettings(
    watch_timeout_s=(60.0, 60.0),
    answer_timeout_s=5.0,
    backoff_min_s=0.01,
    backoff_max_s=0.05,
    unreachable_max_s=0.05,
)


class Following:
    """A running source and what it has said so far."""

    def __init__(self, source: KubernetesSource) -> None:
        self.source = source
        self.snapshot = Snapshot()

    async def first(self) -> Snapshot:
        """Return the first snapshot."""
        return await self.until(lambda snapshot: True)

    async def until(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Return the first snapshot that comes and fulfils a condition."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                self.snapshot = await self.source.next_snapshot()
                if condition(self.snapshot):
                    return self.snapshot

    async def until_endpoints(self, service: str, *endpoints: str) -> None:
        """Return when a service has these endpoints, which may be so already."""
        if endpoints_of(self.snapshot, service) != endpoints:
            await self.until(lambda snapshot: endpoints_of(snapshot, service) == endpoints)

    async def until_services(self, *services: str) -> None:
        """Return when these are the services, which may be so already."""
        if services_of(self.snapshot) != set(services):
            await self.until(lambda snapshot: services_of(snapshot) == set(services))


@asynccontextmanager
async def following(
    api: ApiServer,
    settings: KubernetesSettings | None = None,
    *,
    access: Access | None = None,
    desired: DesiredState | None = None,
    qps: float = 0,
    **options: Any,
) -> AsyncIterator[Following]:
    """Follow `api` while the context is open."""
    settings = settings or KubernetesSettings(watch=QUICK)
    access = access or Access(api.url, origin="the test")
    answer_timeout_s = settings.watch.answer_timeout_s
    async with ApiConnection(access, qps=qps, answer_timeout_s=answer_timeout_s, environ={}) as connection:
        source = KubernetesSource(connection, settings, desired=desired, **options)
        running = asyncio.create_task(source.run())
        try:
            yield Following(source)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def endpoints_of(snapshot: Snapshot, service: str) -> tuple[str, ...]:
    """Return the endpoints of the only port of `namespace/name`; none when there is no such service."""
    found = [port for name, port in snapshot.service_ports.items() if name.service_name == service]
    return tuple(str(each) for each in found[0].endpoints) if found else ()


def services_of(snapshot: Snapshot) -> set[str]:
    return {name.service_name for name in snapshot.service_ports}


async def eventually(condition: Callable[[], object]) -> None:
    """Return when a condition holds that nothing tells us of."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
