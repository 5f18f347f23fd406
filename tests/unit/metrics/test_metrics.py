"""What Prometheus is told, read back by its own parser."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from userspace_proxy.core.counters import (
    EndpointCounters,
    LimitCounters,
    LiveCounters,
    WakeTimes,
    WakingCounters,
    WorkerReading,
    add_up,
)
from userspace_proxy.core.model import Endpoint, L4Protocol, ServicePortName
from userspace_proxy.metrics import Metrics, process
from userspace_proxy.metrics.backlog import backlog_pieces
from userspace_proxy.metrics.exposition import header, label_set, number

WEB = ServicePortName("shop", "web", "http")
DNS = ServicePortName("kube-system", "dns", "dns", L4Protocol.UDP)

KUBE_PROXY = {
    "kubeproxy_sync_proxy_rules_duration_seconds",
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
    "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
    "kubeproxy_sync_proxy_rules_endpoint_changes_total",
    "kubeproxy_sync_proxy_rules_service_changes_pending",
    "kubeproxy_sync_proxy_rules_service_changes_total",
    "kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
    "kubeproxy_sync_proxy_rules_iptables_total",
    "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
    "kubeproxy_network_programming_duration_seconds",
    "kubeproxy_proxy_healthz_total",
    "kubeproxy_proxy_livez_total",
    "kubernetes_build_info",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
    "rest_client_request_duration_seconds",
    "rest_client_requests_total",
}


class ServicePort:
    """A service port that has counted something."""

    def __init__(self, name: ServicePortName, counters: dict[Endpoint, EndpointCounters]) -> None:
        self.name = name
        self._counters = counters

    def counters(self) -> dict[Endpoint, EndpointCounters]:
        return self._counters

    def total(self) -> EndpointCounters:
        return add_up(self._counters.values())


def web(connections: int = 3) -> ServicePort:
    reading = EndpointCounters(connections=connections, bytes_to_endpoint=2**60 + 1)
    return ServicePort(WEB, {Endpoint("10.0.0.1", 80): reading, Endpoint("10.0.0.2", 80): EndpointCounters(1)})


def dns() -> ServicePort:
    return ServicePort(DNS, {Endpoint("fd00::1", 53): EndpointCounters(sessions=5, open_sessions=2)})


def filled(*, service_port_limit: int = 2000, with_endpoints: bool = True) -> Metrics:
    """Return metrics of which each has a sample."""
    metrics = Metrics(
        "1.2.3",
        service_port_limit=service_port_limit,
        with_endpoints=with_endpoints,
    )
    kube_proxy = metrics.kube_proxy
    kube_proxy.synced(0.003, wall_now=1_700_000_000.25)
    kube_proxy.sync_proxy_rules_iptables_total.labels("nat").set(12)
    kube_proxy.sync_proxy_rules_no_local_endpoints_total.labels("external").set(1)
    kube_proxy.proxy_healthz_total.labels("200").inc()
    kube_proxy.proxy_livez_total.labels("503").inc()
    metrics.rest_client.answered("GET", "10.96.0.1:443", 200, 0.02)
    metrics.rest_client.answered("GET", "10.96.0.1:443", None, 30.0)
    return metrics


def parsed(pieces: Iterable[str]) -> dict[str, Metric]:
    """Return the metrics of an exposition by the names that stand in it."""
    text = "".join(pieces)
    families = {}
    for metric in text_string_to_metric_families(text):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert name not in families, "the samples of a metric stand together"
        families[name] = metric
    return families


def samples(metric: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(each.labels.values()): each.value for each in metric.samples}


@pytest.fixture
def families() -> dict[str, Metric]:
    return parsed(filled().pieces(LiveCounters((web(), dns()))))


def test_all_of_kube_proxys_metrics_are_there_and_filled(families: dict[str, Metric]) -> None:
    assert {name for name in families if not name.startswith("userspace_proxy_")} == KUBE_PROXY
    assert all(families[name].samples for name in KUBE_PROXY)


def test_requests_for_pods_are_counted_by_how_they_end() -> None:
    metrics = filled()
    metrics.waking.count("event", "done")
    metrics.waking.count("event", "done")
    metrics.waking.count("scaling", "failed")
    families = parsed(metrics.pieces(LiveCounters()))
    assert samples(families["userspace_proxy_wake_events_total"]) == {("done",): 2, ("unneeded",): 0, ("failed",): 0}
    assert samples(families["userspace_proxy_wake_scalings_total"]) == {("done",): 0, ("unneeded",): 0, ("failed",): 1}


def test_syncs_have_kube_proxys_buckets(families: dict[str, Metric]) -> None:
    buckets = [
        float(each.labels["le"])
        for each in families["kubeproxy_sync_proxy_rules_duration_seconds"].samples
        if each.name.endswith("_bucket")
    ]
    assert buckets == [*(0.001 * 2**n for n in range(15)), math.inf]


def test_requests_to_the_api_server_carry_its_clients_labels(families: dict[str, Metric]) -> None:
    assert {tuple(each.labels.items()) for each in families["rest_client_requests_total"].samples} == {
        (("code", "200"), ("method", "GET"), ("host", "10.96.0.1:443")),
        (("code", "<error>"), ("method", "GET"), ("host", "10.96.0.1:443")),
    }


def test_the_build_is_ours(families: dict[str, Metric]) -> None:
    (sample,) = families["kubernetes_build_info"].samples
    assert sample.value == 1
    assert sample.labels["git_version"] == "v1.2.3"
    assert (sample.labels["major"], sample.labels["minor"]) == ("1", "2")


def test_a_service_port_has_series_of_its_own(families: dict[str, Metric]) -> None:
    connections = families["userspace_proxy_service_port_connections_total"]
    assert samples(connections) == {("shop", "web", "http", "TCP"): 4, ("kube-system", "dns", "dns", "UDP"): 0}
    assert list(connections.samples[0].labels) == ["service_namespace", "service_name", "service_port", "protocol"]
    assert samples(families["userspace_proxy_service_port_open_sessions"])["kube-system", "dns", "dns", "UDP"] == 2


def test_endpoints_have_series_only_where_that_is_wanted(families: dict[str, Metric]) -> None:
    connections = samples(families["userspace_proxy_endpoint_connections_total"])
    assert connections["shop", "web", "http", "TCP", "10.0.0.1:80"] == 3
    assert ("kube-system", "dns", "dns", "UDP", "[fd00::1]:53") in connections
    without = parsed(filled(with_endpoints=False).pieces(LiveCounters((web(),))))
    assert not any(name.startswith("userspace_proxy_endpoint_") for name in without)


def test_large_counts_are_exact() -> None:
    text = "".join(filled().pieces(LiveCounters((web(),))))
    assert f"userspace_proxy_to_endpoint_bytes_total {2**60 + 1}\n" in text


def test_beyond_the_limit_only_totals_count_and_the_rest_is_named() -> None:
    families = parsed(filled(service_port_limit=1).pieces(LiveCounters((web(), dns()))))
    assert list(samples(families["userspace_proxy_service_port_sessions_total"])) == [("shop", "web", "http", "TCP")]
    assert ("kube-system", "dns", "dns", "UDP", "[fd00::1]:53") not in samples(
        families["userspace_proxy_endpoint_sessions_total"]
    )
    assert samples(families["userspace_proxy_sessions_total"]) == {(): 5}
    assert samples(families["userspace_proxy_service_ports"]) == {(): 2}
    assert samples(families["userspace_proxy_service_ports_without_series"]) == {(): 1}


def test_totals_stay_when_a_service_port_goes_and_its_series_do_not() -> None:
    live = LiveCounters((web(), dns()), accept_errors=1, open_connections=7)
    after = replace(live, service_ports=(dns(),), gone=web().total())
    before_text, after_text = (parsed(filled().pieces(each)) for each in (live, after))
    name = "userspace_proxy_connections_total"
    assert samples(before_text[name]) == samples(after_text[name]) == {(): 4}
    assert ("shop", "web", "http", "TCP") not in samples(after_text["userspace_proxy_service_port_connections_total"])
    assert samples(after_text["userspace_proxy_open_connections"]) == {(): 7}
    assert samples(after_text["userspace_proxy_accept_errors_total"]) == {(): 1}


def test_metrics_without_a_data_path_are_whole() -> None:
    assert samples(parsed(Metrics("1.2.3").pieces(LiveCounters()))["userspace_proxy_service_ports"]) == {(): 0}


def test_each_worker_can_be_watched() -> None:
    workers = (WorkerReading("worker-0", 30 << 20, 3, 4, 0), WorkerReading("worker-1", 31 << 20, 5, 6, 1))
    found = parsed(filled().pieces(LiveCounters(workers=workers)))
    assert samples(found["userspace_proxy_worker_resident_memory_bytes"]) == {
        ("worker-0",): 30 << 20,
        ("worker-1",): 31 << 20,
    }
    assert samples(found["userspace_proxy_worker_open_connections"]) == {("worker-0",): 3, ("worker-1",): 5}
    assert samples(found["userspace_proxy_worker_open_sessions"]) == {("worker-0",): 4, ("worker-1",): 6}
    assert samples(found["userspace_proxy_worker_restarts_total"]) == {("worker-0",): 0, ("worker-1",): 1}
    assert not [name for name in parsed(filled().pieces(LiveCounters())) if "_worker_" in name]


def test_each_limit_can_be_watched_and_tells_how_often_it_was_reached() -> None:
    limits = LimitCounters(*range(1, 11))
    found = parsed(filled().pieces(LiveCounters(limits=limits)))
    told = {
        name: samples(found[f"userspace_proxy_{name}"])[()]
        for name in (
            "max_connections",
            "max_connections_per_service_port",
            "admitted_connections",
            "paused_listeners",
            "max_connections_reached_total",
            "max_connections_per_service_port_reached_total",
            "abandoned_connections_total",
            "idle_timeouts_total",
            "half_close_timeouts_total",
            "peer_timeouts_total",
        )
    }
    assert list(told.values()) == list(range(1, 11))


def test_the_kernels_count_of_full_backlogs_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "self/net").mkdir(parents=True)
    (tmp_path / "self/net/netstat").write_text("TcpExt: A ListenOverflows B\nTcpExt: 1 22 3\nIpExt: C\nIpExt: 4\n")
    found = parsed(backlog_pieces(tmp_path))
    assert samples(found["userspace_proxy_listen_overflows_total"]) == {(): 22}
    assert list(backlog_pieces(tmp_path / "nowhere")) == []


def test_names_and_texts_pass_the_lint_of_prometheus(families: dict[str, Metric]) -> None:
    kube_proxys_own = {
        "kubeproxy_sync_proxy_rules_iptables_total",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
    }
    for name, metric in families.items():
        assert metric.documentation, name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert (metric.type == "counter") == name.endswith("_total") or name in kube_proxys_own, name
        assert not re.search(r"_(count|sum|bucket|gauge|counter|histogram)(_|$)", name.removesuffix("_total")), name
        assert not re.search(r"(milli|micro|kilo|mega|minutes|hours|bits)", name), name
        for each in metric.samples:
            assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in each.labels), name
            assert not any("client" in label for label in each.labels), name


def test_no_metric_brings_its_creation_time_as_another_one() -> None:
    assert "_created" not in "".join(filled().pieces(LiveCounters()))


async def test_health_checks_are_in_an_exposition_of_their_own() -> None:
    metrics = Metrics("1.2.3")
    metrics.health_checks.succeeded("ping", "healthz")
    families = parsed(await metrics.scrape_slis())
    assert samples(families["kubernetes_healthcheck"]) == {("ping", "healthz"): 1}
    assert samples(families["kubernetes_healthchecks_total"]) == {("ping", "healthz", "success"): 1}


def test_odd_labels_and_texts_are_escaped() -> None:
    odd = 'a"b\\c\n'
    text = header("x", "gauge", "two\nlines \\") + "x" + label_set({"name": odd}) + " 1\n"
    (metric,) = text_string_to_metric_families(text)
    assert metric.documentation == "two\nlines \\"
    assert metric.samples[0].labels == {"name": odd}


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (0.25, "0.25"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (2**53, str(2**53))],
)
def test_numbers_are_written_as_prometheus_reads_them(value: float, text: str) -> None:
    assert number(value) == text


def test_the_process_is_described_as_it_is(families: dict[str, Metric]) -> None:
    value = {name: samples(metric)[()] for name, metric in families.items() if name.startswith("process_")}
    assert 0 < value["process_cpu_seconds_total"] < 3600
    assert abs(time.time() - value["process_start_time_seconds"]) < 3600
    assert value["process_virtual_memory_bytes"] > value["process_resident_memory_bytes"] > 1 << 20
    assert 0 < value["process_open_fds"] <= value["process_max_fds"]


def test_an_old_kernels_descriptors_are_counted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "told_count", lambda folder: 0)
    descriptors = tmp_path / "self" / "fd"
    descriptors.mkdir(parents=True)
    (tmp_path / "self" / "stat").write_text("1 (a) b) " + " ".join(map(str, range(50))))
    for each in range(600):
        (descriptors / str(each)).touch()
    pieces = list(process.ProcessMetrics(tmp_path).pieces())
    assert samples(parsed(pieces)["process_open_fds"]) == {(): 600}
    assert pieces.count("") == 2
    assert "process_start_time_seconds" not in "".join(pieces), "the fake has no boot time"


def test_without_proc_there_are_no_process_metrics(tmp_path: Path) -> None:
    assert not list(process.ProcessMetrics(tmp_path).pieces())


def test_failures_are_counted_once_for_as_long_as_they_last() -> None:
    metrics = Metrics("1.2.3")
    for failing in ({WEB}, {WEB, DNS}, {DNS}, {WEB, DNS}):
        metrics.failures.fail_now("listen", failing)
    found = parsed(metrics.pieces(LiveCounters()))
    assert samples(found["userspace_proxy_failing_service_ports"]) == {("listen",): 2, ("rules",): 0}
    assert samples(found["userspace_proxy_service_port_failures_total"]) == {("listen",): 3, ("rules",): 0}


def test_a_changed_limit_counts_at_the_next_exposition() -> None:
    metrics = filled()
    metrics.reconfigure(service_port_limit=1, with_endpoints=False)
    found = parsed(metrics.pieces(LiveCounters((web(), dns()))))
    assert len(found["userspace_proxy_service_port_connections_total"].samples) == 1
    assert "userspace_proxy_endpoint_connections_total" not in found


def test_changes_are_pending_until_they_are_applied() -> None:
    metrics = Metrics("1.2.3")
    metrics.kube_proxy.changed(services=2, endpoints=3)
    metrics.kube_proxy.changed(services=1, endpoints=0)
    name = "kubeproxy_sync_proxy_rules_service_changes"
    assert samples(parsed(metrics.pieces(LiveCounters()))[f"{name}_pending"]) == {(): 3}
    metrics.kube_proxy.nothing_pending()
    found = parsed(metrics.pieces(LiveCounters()))
    assert (samples(found[f"{name}_pending"]), samples(found[f"{name}_total"])) == ({(): 0}, {(): 3})


def test_waking_is_counted_with_a_histogram_of_how_long_it_took() -> None:
    times = WakeTimes().with_another(0.3).with_another(2.0).with_another(300.0)
    waking = WakingCounters(
        held_connections=3, held_udp_clients=2, wake_ups=4, expired=5, displaced=6, wake_times=times
    )
    found = parsed(Metrics("1.2.3").pieces(LiveCounters(waking=waking)))
    for name, value in {
        "held_connections": 3,
        "held_udp_clients": 2,
        "wake_ups_total": 4,
        "held_expired_total": 5,
        "held_displaced_total": 6,
    }.items():
        assert samples(found[f"userspace_proxy_{name}"]) == {(): value}
    counted = {
        (each.name.rpartition("_")[2], *each.labels.values()): each.value
        for each in found["userspace_proxy_wake_up_duration_seconds"].samples
    }
    assert (counted["bucket", "0.25"], counted["bucket", "0.5"], counted["bucket", "2.5"]) == (0, 1, 2)
    assert (counted["bucket", "120.0"], counted["bucket", "+Inf"], counted["count",]) == (2, 3, 3)
    assert counted["sum",] == 302.3
