"""What was asked of the cluster to wake idled services: metrics that kube-proxy does not have."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from userspace_proxy.core.idling import WakeRequest, WakeResult


class WakingMetrics:
    """How each request has ended that was made for pods."""

    def __init__(self, registry: CollectorRegistry) -> None:
        events = Counter(
            "userspace_proxy_wake_events_total",
            "Events that pods are needed for an idled service, by how it ended.",
            ("result",),
            registry=registry,
        )
        scalings = Counter(
            "userspace_proxy_wake_scalings_total",
            "Workloads of idled services to be scaled up from 0, by how it ended.",
            ("result",),
            registry=registry,
        )
        self._counters: dict[WakeRequest, Counter] = {"event": events, "scaling": scalings}
        for counter in self._counters.values():
            for result in get_args(WakeResult):
                counter.labels(result)

    def count(self, request: WakeRequest, result: WakeResult) -> None:
        """Count one request."""
        self._counters[request].labels(result).inc()
