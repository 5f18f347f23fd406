"""The services of a cluster as a source for `userspace-proxy local`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from userspace_proxy.core.model import ServicePortName, Snapshot
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.kubernetes import KubernetesSettings, KubernetesSource
from userspace_proxy.sources.this_node import node_name
from userspace_proxy.sources.waking import Waker, WakeSettings


class ClusterSource:
    """The services of all namespaces of a cluster, or of those named. Snapshots come while `run` runs.

    `scales` lets it scale up the workloads of idled services, beside asking the cluster to, which it tries for
    `hold_timeout_s` seconds.
    """

    def __init__(
        self,
        access: Access,
        namespaces: tuple[str, ...] = (),
        *,
        scales: bool = False,
        hold_timeout_s: float = 120.0,
    ) -> None:
        self._connection = ApiConnection(access)
        followed = KubernetesSettings(tuple(dict.fromkeys(namespaces)), unidling=True)
        self._source = KubernetesSource(self._connection, followed, linger_s=lambda: hold_timeout_s)
        settings = WakeSettings(hold_timeout_s, scales)
        self._waker = Waker(self._connection, node_name(""), self._source.idled, lambda: settings)

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with self._connection, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._source.run())
            tasks.create_task(self._waker.run())

    def needs_pods(self, name: ServicePortName) -> None:
        """Ask the cluster for pods, as a client waits for them."""
        self._waker.needs_pods(name)

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the services once they are known, and again whenever they change."""
        while True:
            yield await self._source.next_snapshot()
