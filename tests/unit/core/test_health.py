"""kube-proxy's health rules."""

from __future__ import annotations

import pytest

from userspace_proxy.core.health import (
    HealthAnswer,
    ProxyHealth,
    ServiceHealthCheck,
    rfc3339,
    service_health_answer,
    service_health_checks,
)
from userspace_proxy.core.model import Endpoint, IPFamily, L4Protocol, ServicePort, ServicePortName, Snapshot

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
START_WALL_S = 1_700_000_000.0  # 2023-11-14T22:13:20Z, at the monotonic time 0


@pytest.fixture
def health() -> ProxyHealth:
    """A proxy that syncs each 30 s, on a node that is as it should be."""
    made = ProxyHealth(30.0)
    made.is_node_eligible = True
    return made


def healthz(health: ProxyHealth, now: float) -> HealthAnswer:
    return health.healthz(now=now, wall_now=START_WALL_S + now)


def livez(health: ProxyHealth, now: float) -> HealthAnswer:
    return health.livez(now=now, wall_now=START_WALL_S + now)


def test_a_proxy_that_starts_is_healthy_and_says_it_was_updated_now(health: ProxyHealth) -> None:
    assert healthz(health, 5.0) == HealthAnswer(
        200,
        {
            "lastUpdated": "2023-11-14T22:13:25Z",
            "currentTime": "2023-11-14T22:13:25Z",
            "nodeEligible": True,
            "healthy": True,
        },
    )


def test_a_change_that_waits_for_less_than_two_sync_periods_is_no_fault(health: ProxyHealth) -> None:
    health.queued(V4, now=10.0)
    assert livez(health, 69.9).status == 200


def test_a_change_that_has_waited_for_two_sync_periods_makes_unhealthy(health: ProxyHealth) -> None:
    health.updated(V4, now=8.5)
    health.queued(V4, now=10.0)
    health.queued(V4, now=60.0)  # the oldest one counts
    answer = livez(health, 70.0)
    assert answer == HealthAnswer(
        503,
        {
            "lastUpdated": "2023-11-14T22:13:28.5Z",
            "currentTime": "2023-11-14T22:14:30Z",
            "healthy": False,
            "status": {"IPv4": {"lastUpdated": "2023-11-14T22:13:28.5Z", "healthy": False}},
        },
    )


def test_a_sync_makes_healthy_again(health: ProxyHealth) -> None:
    health.queued(V4, now=0.0)
    assert not health.is_healthy(now=100.0)
    health.updated(V4, now=101.0)
    assert health.is_healthy(now=1000.0)


def test_one_family_that_hangs_is_named(health: ProxyHealth) -> None:
    health.updated(V6, now=1.0)
    health.queued(V4, now=0.0)
    document = healthz(health, 60.0).document
    assert document["status"] == {
        "IPv4": {"lastUpdated": "0001-01-01T00:00:00Z", "healthy": False},
        "IPv6": {"lastUpdated": "2023-11-14T22:13:21Z", "healthy": True},
    }
    assert document["lastUpdated"] == "2023-11-14T22:13:21Z"


@pytest.mark.parametrize("is_eligible", [None, False])
def test_a_node_that_is_unknown_or_goes_away_concerns_healthz_alone(
    health: ProxyHealth, is_eligible: bool | None
) -> None:
    health.is_node_eligible = is_eligible
    answer = healthz(health, 1.0)
    assert (answer.status, answer.document["nodeEligible"], answer.document["healthy"]) == (503, False, True)
    assert answer.document["lastUpdated"] == "0001-01-01T00:00:00Z"
    assert livez(health, 1.0).status == 200
    assert "nodeEligible" not in livez(health, 1.0).document


def test_a_step_of_the_wall_clock_makes_nobody_unhealthy(health: ProxyHealth) -> None:
    health.queued(V4, now=0.0)
    assert health.livez(now=1.0, wall_now=START_WALL_S + 86_400.0).status == 200


@pytest.mark.parametrize(
    ("wall_s", "text"),
    [
        (0.0, "1970-01-01T00:00:00Z"),
        (1_700_000_000.5, "2023-11-14T22:13:20.5Z"),
        (1.000001, "1970-01-01T00:00:01.000001Z"),
    ],
)
def test_times_are_rfc_3339_in_utc(wall_s: float, text: str) -> None:
    assert rfc3339(wall_s) == text


def endpoints(*hosts: int, port: int = 80) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(f"10.0.0.{host}", port) for host in hosts)


def service_port(
    port: str, inside: tuple[Endpoint, ...], outside: tuple[Endpoint, ...] | None, *, check: int = 30_001
) -> ServicePort:
    return ServicePort(
        ServicePortName("shop", "web", port, L4Protocol.TCP),
        80,
        endpoints=inside,
        external_endpoints=outside,
        health_check_node_port=check,
    )


def test_the_local_endpoints_of_all_ports_count_by_address() -> None:
    snapshot = Snapshot.of(
        service_port("http", endpoints(1, 2, 3), endpoints(1, 2)),
        service_port("https", endpoints(1, 2, 3, port=443), endpoints(2, 3, port=443)),
    )
    assert service_health_checks(snapshot) == {("shop", "web"): ServiceHealthCheck(30_001, 3)}


def test_endpoints_that_are_all_local_count() -> None:
    snapshot = Snapshot.of(service_port("http", endpoints(1, 2), None))
    assert service_health_checks(snapshot)["shop", "web"].local_endpoints == 2


def test_a_service_without_local_endpoints_is_checked_and_one_without_a_check_is_not() -> None:
    assert service_health_checks(Snapshot.of(service_port("http", endpoints(1), ()))) == {
        ("shop", "web"): ServiceHealthCheck(30_001, 0)
    }
    assert not service_health_checks(Snapshot.of(service_port("http", endpoints(1), (), check=0)))


@pytest.mark.parametrize(
    ("local_endpoints", "is_proxy_healthy", "status"), [(2, True, 200), (0, True, 503), (2, False, 503)]
)
def test_a_service_wants_traffic_where_it_has_endpoints_and_the_proxy_works(
    local_endpoints: int, is_proxy_healthy: bool, status: int
) -> None:
    answer = service_health_answer(("shop", "web"), local_endpoints, is_proxy_healthy=is_proxy_healthy)
    assert answer.status == status
    assert answer.document == {
        "service": {"namespace": "shop", "name": "web"},
        "localEndpoints": local_endpoints,
        "serviceProxyHealthy": is_proxy_healthy,
    }
