"""Totals never fall, whatever comes and goes."""

from __future__ import annotations

import time

import pytest

from userspace_proxy.core.balancer import RoundRobin
from userspace_proxy.core.counters import EndpointCounters
from userspace_proxy.core.model import Endpoint, ServicePort, ServicePortName
from userspace_proxy.dataplane.backends import Backends, Target
from userspace_proxy.dataplane.past import Past

NAME = ServicePortName("shop", "web")
ONE, OTHER = Endpoint("10.0.0.1", 80), Endpoint("10.0.0.2", 80)


@pytest.fixture
def backends() -> Backends:
    return Backends(NAME, RoundRobin, cross_family=True)


def use(backends: Backends, *endpoints: Endpoint) -> list[Target]:
    """Give the service port these endpoints and return their targets."""
    backends.update(ServicePort(NAME, 80, endpoints))
    return [backends._targets[endpoint] for endpoint in endpoints]


def test_a_total_keeps_what_a_removed_endpoint_counted(backends: Backends) -> None:
    one, other = use(backends, ONE, OTHER)
    one.connections, other.connections = 3, 4
    use(backends, OTHER)
    assert backends.total().connections == 7
    assert backends.counters() == {OTHER: EndpointCounters(connections=4)}


def test_a_connection_that_stays_with_a_removed_endpoint_is_still_counted(backends: Backends) -> None:
    (one,) = use(backends, ONE)
    one.connections = one.open_connections = 1
    use(backends, OTHER)
    one.to_client.bytes += 1000
    assert backends.total() == EndpointCounters(connections=1, open_connections=1, bytes_to_client=1000)
    one.open_connections = 0
    assert backends.total().open_connections == 0


def test_an_endpoint_that_comes_back_starts_anew_and_the_total_does_not(backends: Backends) -> None:
    (one,) = use(backends, ONE)
    one.connections = 2
    use(backends)
    (again,) = use(backends, ONE)
    again.connections = 1
    assert backends.counters()[ONE].connections == 1
    assert backends.total().connections == 3


def test_a_removed_service_port_leaves_its_totals_and_can_still_be_read(backends: Backends) -> None:
    gone = Past()
    one, other = use(backends, ONE, OTHER)
    one.connections, other.sessions = 1, 2
    use(backends, OTHER)
    backends.hand_over(gone)
    other.sessions = 3
    assert gone.total() == backends.total() == EndpointCounters(connections=1, sessions=3)


def test_only_the_numbers_are_kept_of_what_was_removed_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    past = Past()
    quiet, busy = Target(NAME, ONE), Target(NAME, OTHER)
    quiet.connections = busy.connections = busy.open_connections = 1
    past.retire([quiet, busy])
    now += 100.0
    assert past.total().connections == 2
    assert [each for _, each in past._recent] == [busy]
    busy.open_connections = 0
    now += 100.0
    assert past.total() == EndpointCounters(connections=2)
    assert not past._recent
