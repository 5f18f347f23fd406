"""Whatever happens to a service: rules never lead a client past endpoints, and nothing is owned for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.hybrid import WAKING_S, Ownership
from userspace_proxy.core.model import Endpoint, ServicePort, ServicePortName, Snapshot

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
        ownership = ownership.after(snapshot, now=now)
        assert (WEB in ownership.idled) is bool(service_port and service_port.is_idled)
        assert not ownership.idled & ownership.waking.keys()
        assert ownership.served(snapshot).service_ports.keys() == ownership.idled | ownership.waking.keys()
        assert now < ownership.changes_at
        assert all(until <= now + WAKING_S for until in ownership.waking.values())
    if service_port and not service_port.is_idled:
        assert ownership.after(Snapshot.of(service_port), now=now + WAKING_S) == Ownership()
