"""Which services are owned in hybrid mode, and how long."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from userspace_proxy.core.hybrid import WAKING_S, Ownership, State
from userspace_proxy.core.model import Endpoint, ServicePort, ServicePortName, Snapshot

HOLD_S = 120.0
WEB = ServicePortName("default", "web")
ENDPOINTS = (Endpoint("10.0.0.1", 80),)

IDLED = ServicePort(WEB, 80, wakes_on_connect=True)
WOKEN = ServicePort(WEB, 80, ENDPOINTS)
LEFT_BY_THE_CONTROLLER = ServicePort(WEB, 80)
OTHER = ServicePort(ServicePortName("default", "other"), 80, ENDPOINTS)


def owned(ownership: Ownership) -> State | None:
    return ownership.owned[WEB].state if WEB in ownership.owned else None


def after(steps: Iterable[tuple[float, ServicePort]]) -> Ownership:
    ownership = Ownership()
    for now, service_port in steps:
        ownership = ownership.after(Snapshot.of(service_port, OTHER), now=now, hold_timeout_s=HOLD_S)
    return ownership


@pytest.mark.parametrize(
    ("steps", "state", "changes_at"),
    [
        ([(0, WOKEN)], None, math.inf),
        ([(0, LEFT_BY_THE_CONTROLLER)], None, math.inf),
        ([(0, IDLED)], State.IDLED, math.inf),
        ([(0, WOKEN), (9, IDLED)], State.IDLED, math.inf),
        ([(0, IDLED), (500, IDLED)], State.IDLED, math.inf),
        ([(0, IDLED), (9, WOKEN)], State.WAKING, 9 + WAKING_S),
        ([(0, IDLED), (9, ServicePort(WEB, 80, ENDPOINTS, wakes_on_connect=True))], State.WAKING, 9 + WAKING_S),
        ([(0, IDLED), (9, ServicePort(WEB, 80, external_endpoints=ENDPOINTS))], State.WAKING, 9 + WAKING_S),
        ([(0, IDLED), (9, WOKEN), (9 + WAKING_S - 1, WOKEN)], State.WAKING, 9 + WAKING_S),
        ([(0, IDLED), (9, WOKEN), (9 + WAKING_S, WOKEN)], None, math.inf),
        ([(0, IDLED), (9, WOKEN), (20, LEFT_BY_THE_CONTROLLER)], State.WAKING, 9 + WAKING_S),
        ([(0, IDLED), (9, WOKEN), (20, IDLED)], State.IDLED, math.inf),
        ([(0, IDLED), (9, WOKEN), (20, IDLED), (30, WOKEN)], State.WAKING, 30 + WAKING_S),
        ([(0, IDLED), (9, OTHER)], None, math.inf),
    ],
)
def test_idled_then_waking_for_a_minute_then_the_other_proxys(
    steps: list[tuple[float, ServicePort]], state: State | None, changes_at: float
) -> None:
    *before, (now, service_port) = steps
    if service_port is OTHER:  # the service was deleted
        ownership = after(before).after(Snapshot.of(OTHER), now=now, hold_timeout_s=HOLD_S)
    else:
        ownership = after(steps)
    assert owned(ownership) is state
    assert ownership.changes_at == changes_at


@pytest.mark.parametrize(
    ("now", "service_port", "state", "changes_at"),
    [
        (9, LEFT_BY_THE_CONTROLLER, State.IDLED, 9 + HOLD_S),
        (9 + HOLD_S - 1, LEFT_BY_THE_CONTROLLER, State.IDLED, 9 + HOLD_S),
        (9 + HOLD_S, LEFT_BY_THE_CONTROLLER, None, math.inf),
        (50, WOKEN, State.WAKING, 50 + WAKING_S),
        (50, IDLED, State.IDLED, math.inf),
    ],
)
def test_an_annotation_that_goes_before_the_pods_are_there_leaves_its_clients_the_hold_timeout(
    now: float, service_port: ServicePort, state: State | None, changes_at: float
) -> None:
    ownership = after([(0, IDLED), (9, LEFT_BY_THE_CONTROLLER), (now, service_port)])
    assert owned(ownership) is state
    assert ownership.changes_at == changes_at


def test_the_data_path_serves_what_is_owned_and_goes_on_holding_where_the_annotation_is_gone() -> None:
    for service_port, served in ((IDLED, IDLED), (LEFT_BY_THE_CONTROLLER, IDLED), (WOKEN, WOKEN)):
        snapshot = Snapshot.of(service_port, OTHER)
        ownership = after([(0, IDLED)]).after(snapshot, now=1, hold_timeout_s=HOLD_S)
        assert ownership.served(snapshot) == Snapshot.of(served)


def test_rules_are_for_what_is_idled() -> None:
    idled, waking = after([(0, IDLED)]), after([(0, IDLED), (1, WOKEN)])
    assert idled.those(State.IDLED, [OTHER, IDLED]) == (IDLED,)
    assert idled.those(State.WAKING, [OTHER, IDLED]) == ()
    assert waking.those(State.IDLED, [OTHER, WOKEN]) == ()
    assert waking.those(State.WAKING, [OTHER, WOKEN]) == (WOKEN,)
