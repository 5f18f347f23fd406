"""The metrics of kube-proxy under its names and with its labels, so that its dashboards and alerts go on working.

Source: kube-proxy 1.25, and 1.28 for the two that count health answers.
"""

from __future__ import annotations

import platform
import sys

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SYNC_BUCKETS_S = tuple(0.001 * 2**n for n in range(15))
_PROGRAMMING_BUCKETS_S = (0, 0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
_REQUEST_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)


class KubeProxyMetrics:
    """Each attribute is a metric, named as it is exposed, without the prefix `kubeproxy_`. Times are seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"kubeproxy_{name}", documentation, labels, registry=registry)

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(f"kubeproxy_{name}", documentation, labels, registry=registry)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kubeproxy_{name}", documentation, buckets=buckets, registry=registry)

        self.sync_proxy_rules_duration_seconds = histogram(
            "sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds", _SYNC_BUCKETS_S
        )
        self.sync_proxy_rules_last_timestamp_seconds = gauge(
            "sync_proxy_rules_last_timestamp_seconds", "The last time proxy rules were successfully synced"
        )
        self.sync_proxy_rules_last_queued_timestamp_seconds = gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds", "The last time a sync of proxy rules was queued"
        )
        self.sync_proxy_rules_endpoint_changes_pending = gauge(
            "sync_proxy_rules_endpoint_changes_pending", "Pending proxy rules Endpoint changes"
        )
        self.sync_proxy_rules_endpoint_changes_total = counter(
            "sync_proxy_rules_endpoint_changes_total", "Cumulative proxy rules Endpoint changes"
        )
        self.sync_proxy_rules_service_changes_pending = gauge(
            "sync_proxy_rules_service_changes_pending", "Pending proxy rules Service changes"
        )
        self.sync_proxy_rules_service_changes_total = counter(
            "sync_proxy_rules_service_changes_total", "Cumulative proxy rules Service changes"
        )
        self.sync_proxy_rules_iptables_restore_failures_total = counter(
            "sync_proxy_rules_iptables_restore_failures_total", "Cumulative proxy iptables restore failures"
        )
        self.sync_proxy_rules_iptables_total = gauge(  # a gauge whose name ends in _total: kube-proxy's choice
            "sync_proxy_rules_iptables_total", "Number of proxy iptables rules programmed", "table"
        )
        self.sync_proxy_rules_no_local_endpoints_total = gauge(
            "sync_proxy_rules_no_local_endpoints_total",
            "Number of services with a Local traffic policy and no endpoints",
            "traffic_policy",
        )
        self.network_programming_duration_seconds = histogram(
            "network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds",
            _PROGRAMMING_BUCKETS_S,
        )
        self.proxy_healthz_total = counter("proxy_healthz_total", "Cumulative proxy healthz HTTP status", "code")
        self.proxy_livez_total = counter("proxy_livez_total", "Cumulative proxy livez HTTP status", "code")

    def synced(self, duration_s: float, *, wall_now: float) -> None:
        """Rules and listeners were brought to what is wanted, at `wall_now` in seconds since the epoch."""
        self.sync_proxy_rules_duration_seconds.observe(duration_s)
        self.sync_proxy_rules_last_timestamp_seconds.set(wall_now)


class RestClientMetrics:
    """What requests to the API server cost, under the names of Kubernetes' own client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_total = Counter(
            "rest_client_requests_total",
            "Number of HTTP requests, partitioned by status code, method, and host.",
            ("code", "method", "host"),
            registry=registry,
        )
        self.request_duration_seconds = Histogram(
            "rest_client_request_duration_seconds",
            "Request latency in seconds. Broken down by verb, and host.",
            ("verb", "host"),
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )

    def answered(self, method: str, host: str, status: int | None, duration_s: float) -> None:
        """The first byte of an answer is here after `duration_s`; `status` is None where none came."""
        self.requests_total.labels("<error>" if status is None else str(status), method, host).inc()
        self.request_duration_seconds.labels(method, host).observe(duration_s)


class HealthCheckMetrics:
    """The indicators of /metrics/slis: how each check of /healthz went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.healthcheck = Gauge(
            "kubernetes_healthcheck",
            "This metric records the result of a single healthcheck.",
            ("name", "type"),
            registry=registry,
        )
        self.healthchecks_total = Counter(
            "kubernetes_healthchecks_total",
            "This metric records the results of all healthcheck.",
            ("name", "type", "status"),
            registry=registry,
        )

    def succeeded(self, name: str, kind: str) -> None:
        """A check was asked for and is fine."""
        self.healthcheck.labels(name, kind).set(1)
        self.healthchecks_total.labels(name, kind, "success").inc()


def register_build(registry: CollectorRegistry, version: str) -> None:
    """Say what runs, with our own version and Python in the place of Go's."""
    major, minor, *_ = f"{version}..".split(".")
    labels = {
        "build_date": "",
        "compiler": platform.python_implementation(),
        "git_commit": "",
        "git_tree_state": "",
        "git_version": f"v{version}",
        "go_version": "",
        "major": major,
        "minor": minor,
        "platform": f"{sys.platform}/{platform.machine()}",
    }
    Gauge(
        "kubernetes_build_info",
        "A metric with a constant '1' value labeled by version, compiler and platform: here those of this program.",
        tuple(labels),
        registry=registry,
    ).labels(**labels).set(1)
