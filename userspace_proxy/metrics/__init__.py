"""All metrics of a node's proxy in one place: kube-proxy's, those of its traffic, and those that every process has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry

from userspace_proxy.core.counters import LiveCounters
from userspace_proxy.metrics.backlog import backlog_pieces
from userspace_proxy.metrics.exposition import CONTENT_TYPE, registry_pieces
from userspace_proxy.metrics.kube_proxy import (
    HealthCheckMetrics,
    KubeProxyMetrics,
    RestClientMetrics,
    register_build,
)
from userspace_proxy.metrics.process import ProcessMetrics
from userspace_proxy.metrics.processes import ReadProcesses, just_this_one, processes_pieces
from userspace_proxy.metrics.syncing import SyncFailureMetrics
from userspace_proxy.metrics.traffic import traffic_pieces
from userspace_proxy.metrics.waking import WakingMetrics

__all__ = ["CONTENT_TYPE", "SERVICE_PORT_LIMIT", "Metrics"]

SERVICE_PORT_LIMIT = 2000


async def _no_counters() -> LiveCounters:
    return LiveCounters()


class Metrics:
    """The metrics of one daemon, in registries of their own.

    `read_counters` is asked for the counters of the data path at each exposition; it may be set later. The first
    `service_port_limit` service ports get series of their own, and their endpoints only `with_endpoints`.
    """

    def __init__(
        self,
        version: str,
        *,
        read_counters: Callable[[], Awaitable[LiveCounters]] = _no_counters,
        read_processes: ReadProcesses = just_this_one,
        service_port_limit: int = SERVICE_PORT_LIMIT,
        with_endpoints: bool = False,
    ) -> None:
        self.read_counters = read_counters
        self._read_processes = read_processes
        self.registry = CollectorRegistry()
        self.kube_proxy = KubeProxyMetrics(self.registry)
        self.rest_client = RestClientMetrics(self.registry)
        self.failures = SyncFailureMetrics(self.registry)
        self.waking = WakingMetrics(self.registry)
        register_build(self.registry, version)
        self._sli_registry = CollectorRegistry()
        self.health_checks = HealthCheckMetrics(self._sli_registry)
        self._process = ProcessMetrics()
        self._service_port_limit = service_port_limit
        self._with_endpoints = with_endpoints

    def reconfigure(self, *, service_port_limit: int, with_endpoints: bool) -> None:
        """Use another limit for series of service ports from now on, and series of endpoints or none."""
        self._service_port_limit = service_port_limit
        self._with_endpoints = with_endpoints

    async def scrape(self) -> Iterator[str]:
        """Return the text of /metrics in pieces, with the counters of the data path as they are now."""
        return self.pieces(await self.read_counters())

    def pieces(self, live: LiveCounters) -> Iterator[str]:
        """Yield the text of /metrics with these counters of the data path."""
        yield from registry_pieces(self.registry)
        yield from self._process.pieces()
        yield from processes_pieces(self._read_processes())
        yield from backlog_pieces()
        yield from traffic_pieces(
            live, service_port_limit=self._service_port_limit, with_endpoints=self._with_endpoints
        )

    async def scrape_slis(self) -> Iterator[str]:
        """Return the text of /metrics/slis in pieces."""
        return registry_pieces(self._sli_registry)
