"""The services of a cluster as a source for `userspace-proxy local`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from userspace_proxy.core.model import Snapshot
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.kubernetes import KubernetesSettings, KubernetesSource


class ClusterSource:
    """The services of all namespaces of a cluster, or of those named. Snapshots come while `run` runs."""

    def __init__(self, access: Access, namespaces: tuple[str, ...] = ()) -> None:
        self._connection = ApiConnection(access)
        self._source = KubernetesSource(self._connection, KubernetesSettings(tuple(dict.fromkeys(namespaces))))

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with self._connection:
            await self._source.run()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the services once they are known, and again whenever they change."""
        while True:
            yield await self._source.next_snapshot()
