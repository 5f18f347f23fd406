"""All metrics of a node's proxy in one place: kube-proxy's, those of its traffic, and those that every process has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from userspace_proxy.core.counters import LiveCounters
from userspace_proxy.metrics.exposition import CONTENT_TYPE, registry_pieces
from userspace_proxy.metrics.kube_proxy import (
    HealthCheckMetrics,
    KubeProxyMetrics,
    RestClientMetrics,
    register_build,
)
from userspace_proxy.metrics.process import ProcessMetrics
from userspace_proxy.metrics.traffic import traffic_pieces

__all__ = ["CONTENT_TYPE", "SERVICE_PORT_LIMIT", "Metrics"]

SERVICE_PORT_LIMIT = 2000


class Metrics:
    """The metrics of one daemon, in registries of their own.

    `read_counters` is asked for the counters of the data path at each exposition; it may be set later. The first
    `service_port_limit` service ports get series of their own, and their endpoints only `with_endpoints`.
    """

    def __init__(
        self,
        version: str,
        *,
        read_counters: Callable[[], LiveCounters] = LiveCounters,
        service_port_limit: int = SERVICE_PORT_LIMIT,
        with_endpoints: bool = False,
    ) -> None:
        self.read_counters = read_counters
        self.registry = CollectorRegistry()
        self.kube_proxy = KubeProxyMetrics(self.registry)
        self.rest_client = RestClientMetrics(self.registry)
        register_build(self.registry, version)
        self._sli_registry = CollectorRegistry()
        self.health_checks = HealthCheckMetrics(self._sli_registry)
        self._process = ProcessMetrics()
        self._service_port_limit = service_port_limit
        self._with_endpoints = with_endpoints

    def pieces(self) -> Iterator[str]:
        """Yield the text of /metrics."""
        yield from registry_pieces(self.registry)
        yield from self._process.pieces()
        yield from traffic_pieces(
            self.read_counters(), service_port_limit=self._service_port_limit, with_endpoints=self._with_endpoints
        )

    def sli_pieces(self) -> Iterator[str]:
        """Yield the text of /metrics/slis."""
        yield from registry_pieces(self._sli_registry)
