"""Which services are owned in hybrid mode, and how long."""

from __future__ import annotations

import math

import pytest

from userspace_proxy.core.hybrid import WAKING_S, Ownership
from userspace_proxy.core.model import Endpoint, ServicePort, ServicePortName, Snapshot

WEB = ServicePortName("default", "web")
ENDPOINTS = (Endpoint("10.0.0.1", 80),)

IDLED = ServicePort(WEB, 80, wakes_on_connect=True)
AWAKE = ServicePort(WEB, 80, ENDPOINTS)
AWAKE_AND_ANNOTATED = ServicePort(WEB, 80, ENDPOINTS, wakes_on_connect=True)
AWAKE_OUTSIDE = ServicePort(WEB, 80, external_endpoints=ENDPOINTS)
WITHOUT_ENDPOINTS = ServicePort(WEB, 80)
OTHER = ServicePort(ServicePortName("default", "other"), 80, ENDPOINTS)


def after(*steps: tuple[float, ServicePort | None]) -> Ownership:
    """Return what is owned after a service was this and that. None: it was deleted."""
    ownership = Ownership()
    for now, service_port in steps:
        ownership = ownership.after(Snapshot.of(*([service_port] if service_port else []), OTHER), now=now)
    return ownership


@pytest.mark.parametrize(
    "steps",
    [
        [(0, IDLED)],
        [(0, AWAKE), (9, IDLED)],
        [(0, WITHOUT_ENDPOINTS), (9, IDLED)],
        [(0, IDLED), (500, IDLED)],
        [(0, IDLED), (9, AWAKE), (20, IDLED)],
    ],
)
def test_what_is_idled_is_owned_for_as_long_as_it_is(steps: list[tuple[float, ServicePort | None]]) -> None:
    ownership = after(*steps)
    assert ownership == Ownership(idled=frozenset({WEB}))
    assert ownership.changes_at == math.inf
    assert ownership.served(Snapshot.of(IDLED, OTHER)) == Snapshot.of(IDLED)


@pytest.mark.parametrize(
    ("steps", "began_at"),
    [
        ([(0, IDLED), (9, AWAKE)], 9),
        ([(0, IDLED), (9, AWAKE_AND_ANNOTATED)], 9),
        ([(0, IDLED), (9, AWAKE_OUTSIDE)], 9),
        ([(0, IDLED), (9, AWAKE), (9 + WAKING_S - 1, AWAKE)], 9),
        ([(0, IDLED), (9, AWAKE), (20, WITHOUT_ENDPOINTS)], 9),
        ([(0, IDLED), (9, AWAKE), (20, IDLED), (30, AWAKE)], 30),
    ],
)
def test_what_was_idled_and_has_endpoints_is_waking_for_a_minute(
    steps: list[tuple[float, ServicePort | None]], began_at: float
) -> None:
    ownership = after(*steps)
    assert ownership == Ownership(waking={WEB: began_at + WAKING_S})
    assert ownership.changes_at == began_at + WAKING_S
    assert ownership.served(Snapshot.of(AWAKE, OTHER)) == Snapshot.of(AWAKE)


@pytest.mark.parametrize(
    "steps",
    [
        [(0, AWAKE)],
        [(0, WITHOUT_ENDPOINTS)],
        [(0, AWAKE_AND_ANNOTATED)],
        [(0, IDLED), (9, WITHOUT_ENDPOINTS)],
        [(0, IDLED), (9, None)],
        [(0, IDLED), (9, AWAKE), (20, None), (21, AWAKE)],
        [(0, IDLED), (9, AWAKE), (9 + WAKING_S, AWAKE)],
    ],
)
def test_all_else_is_the_other_proxys(steps: list[tuple[float, ServicePort | None]]) -> None:
    ownership = after(*steps)
    assert ownership == Ownership()
    assert ownership.changes_at == math.inf
    assert ownership.served(Snapshot.of(AWAKE, OTHER)) == Snapshot()
