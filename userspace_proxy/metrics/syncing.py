"""What could not be brought to what is wanted: metrics that kube-proxy does not have."""

from __future__ import annotations

from collections.abc import Hashable, Set
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Cause = Literal["listen", "rules"]


class SyncFailureMetrics:
    """Service ports that are not served, or not everywhere: now, and how often one came to be so."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sync_errors_total = Counter(
            "userspace_proxy_sync_errors_total", "Syncs that ended in an error of any kind.", registry=registry
        )
        self._failing = Gauge(
            "userspace_proxy_failing_service_ports",
            "Service ports that lack a listener (a held port, or a proxy port), or rules that were refused.",
            ("cause",),
            registry=registry,
        )
        self._failures = Counter(
            "userspace_proxy_service_port_failures_total",
            "How often a service port could not be listened on, or had its rules refused, after it could be.",
            ("cause",),
            registry=registry,
        )
        self._known: dict[Cause, Set[Hashable]] = {"listen": frozenset(), "rules": frozenset()}
        for cause in self._known:
            self.fail_now(cause, frozenset())

    def fail_now(self, cause: Cause, failing: Set[Hashable]) -> None:
        """These are all that fail now for this cause; those that did not before are counted."""
        self._failures.labels(cause).inc(len(failing - self._known[cause]))
        self._failing.labels(cause).set(len(failing))
        self._known[cause] = failing
