"""Whatever happens to a service: rules never lead a client past endpoints, and nothing is owned for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.hybrid import WAKING_S, Ownership, State
from userspace_proxy.core.model import Endpoint, ServicePort, ServicePortName, Snapshot

HOLD_S = 120.0
WEB = ServicePortName("default", "web")

SERVICE_PORTS = st.builds(
    ServicePort,
    name=st.just(WEB),
    port=st.just(80),
    endpoints=st.sampled_from([(), (Endpoint("10.0.0.1", 80),)]),
    external_endpoints=st.sampled_from([None, (), (Endpoint("10.0.0.2", 80),)]),
    wakes_on_connect=st.booleans(),
)
STEPS = st.lists(st.tuples(st.floats(0, 200), st.none() | SERVICE_PORTS), max_size=20)


@given(STEPS)
def test_ownership_follows_from_what_is_there_now_and_ends(steps: list[tuple[float, ServicePort | None]]) -> None:
    ownership, now, service_port = Ownership(), 0.0, None
    for pause_s, service_port in steps:
        now += pause_s
        snapshot = Snapshot.of(*([service_port] if service_port else []))
        ownership = ownership.after(snapshot, now=now, hold_timeout_s=HOLD_S)
        present = snapshot.service_ports.values()
        for idled in ownership.those(State.IDLED, present):
            assert not idled.endpoints
            assert not idled.external_endpoints
            assert ownership.served(snapshot).service_ports[WEB].is_idled
        if service_port is None or service_port.is_idled:
            assert ownership.those(State.WAKING, present) == ()
        assert bool(ownership.owned) or not (service_port and service_port.is_idled)
        assert ownership.changes_at > now
    if service_port and not service_port.is_idled:
        later = now + max(HOLD_S, WAKING_S)
        assert not ownership.after(Snapshot.of(service_port), now=later, hold_timeout_s=HOLD_S).owned
