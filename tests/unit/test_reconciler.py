"""The reconciler against a data path that only notes what it is told."""

from __future__ import annotations

import logging

import pytest

from userspace_proxy import Endpoint, ListenAddress, ListenFailed, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import Plan
from userspace_proxy.dataplane.interface import Applied
from userspace_proxy.reconciler import Reconciler

WEB = ServicePortName("default", "web")
GOOD, BAD = Endpoint("10.0.0.1", 80), Endpoint("10.0.0.2", 80)


class NotingPlane:
    """Binds whatever is asked for, except port 1."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    async def apply(self, plan: Plan, applied: Applied) -> None:
        if plan:
            self.plans.append(plan)
        for name, address in plan.open:
            if address.port == 1:
                applied.failures[name] = (ListenFailed(str(address), "permission denied", "EACCES"),)
            else:
                applied.bound[name, address] = address


async def test_the_filter_applies_to_endpoints_for_traffic_from_inside_and_from_outside() -> None:
    plane = NotingPlane()
    reconciler = Reconciler(plane, lambda name, endpoint: endpoint == GOOD)  # type: ignore[arg-type]
    await reconciler.apply(Snapshot.of(ServicePort(WEB, 80, (GOOD, BAD), external_endpoints=(BAD, GOOD))))
    await reconciler.apply(Snapshot.of(ServicePort(WEB, 80, (GOOD, BAD))))
    updates = [plan.update[0] for plan in plane.plans]
    assert [(port.endpoints, port.external_endpoints) for port in updates] == [((GOOD,), (GOOD,)), ((GOOD,), None)]


async def test_the_same_snapshot_again_does_nothing() -> None:
    plane = NotingPlane()
    reconciler = Reconciler(plane)  # type: ignore[arg-type]
    snapshot = Snapshot.of(ServicePort(WEB, 80, (GOOD,), listen=(ListenAddress("127.0.0.1", 80),)))
    assert await reconciler.apply(snapshot) == {}
    assert await reconciler.apply(snapshot) == {}
    assert len(plane.plans) == 1


async def test_a_refused_address_is_asked_for_again_with_each_apply() -> None:
    plane = NotingPlane()
    reconciler = Reconciler(plane)  # type: ignore[arg-type]
    refused = (WEB, ListenAddress("127.0.0.1", 1))
    snapshot = Snapshot.of(ServicePort(WEB, 80, (GOOD,), listen=(refused[1],)))
    for _ in range(2):
        assert (await reconciler.apply(snapshot, quiet=True)).keys() == {WEB}
    assert [plan.open for plan in plane.plans] == [(refused,), (refused,)]
    assert reconciler.addresses(WEB) == ()


async def test_failures_are_told_whenever_something_was_tried() -> None:
    told: list[set[ServicePortName]] = []
    reconciler = Reconciler(NotingPlane(), on_failures=lambda failures: told.append(set(failures)))  # type: ignore[arg-type]
    refused, fine = (ServicePort(WEB, 80, (GOOD,), listen=(ListenAddress("127.0.0.1", port),)) for port in (1, 2))
    await reconciler.apply(Snapshot.of(refused), quiet=True)
    await reconciler.apply(Snapshot.of(fine), quiet=True)
    assert told == [{WEB}, set()]


async def test_an_idled_service_port_is_said_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reconciler = Reconciler(NotingPlane())  # type: ignore[arg-type]
    await reconciler.apply(
        Snapshot.of(ServicePort(WEB, 80, listen=(ListenAddress("127.0.0.1", 80),), wakes_on_connect=True))
    )
    assert "default/web (TCP): 127.0.0.1:80 -> waits for pods" in caplog.messages
