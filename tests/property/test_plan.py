"""Any running and any desired snapshot: the plan between them, carried out step by step on a model of a host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy import Endpoint, L4Protocol, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import Listening, Plan, diff

WILDCARDS = {"0.0.0.0", "::"}
NAMES = [ServicePortName("default", name, "", protocol) for name in "abc" for protocol in L4Protocol]
ADDRESSES = [
    ListenAddress(address, port)
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::")
    for port in (0, 53, 80)
]
ENDPOINTS = [Endpoint("10.0.0.1", port) for port in (1, 2, 3)]


def exclude_each_other(one: Listening, other: Listening) -> bool:
    (name, address), (other_name, other_address) = one, other
    if name.protocol is not other_name.protocol or address.port != other_address.port or not address.port:
        return False
    both = {address.address, other_address.address}
    return address.family is other_address.family and (len(both) == 1 or bool(both & WILDCARDS))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Snapshots that a host could run: no two of their listeners exclude each other."""
    taken: list[Listening] = []
    service_ports = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        listen = []
        for address in draw(st.lists(st.sampled_from(ADDRESSES), unique=True, max_size=4)):
            if not any(exclude_each_other((name, address), other) for other in taken):
                taken.append((name, address))
                listen.append(address)
        endpoints = tuple(draw(st.lists(st.sampled_from(ENDPOINTS), unique=True)))
        affinity_s = draw(st.sampled_from([None, 10.0]))
        service_ports.append(ServicePort(name, 80, endpoints, session_affinity_s=affinity_s, listen=tuple(listen)))
    return Snapshot.of(*service_ports)


class Host:
    """Runs what a snapshot says, and refuses a listener that another one excludes."""

    def __init__(self, running: Snapshot) -> None:
        self.service_ports = dict(running.service_ports)
        self.listeners = {(name, address) for name, port in self.service_ports.items() for address in port.listen}
        self.touched: set[ServicePortName] = set()
        self.closed: set[Listening] = set()

    def carry_out(self, plan: Plan) -> None:
        for listening in plan.release:
            self.close(listening)
        for service_port in plan.update:
            self.touched.add(service_port.name)
            self.service_ports[service_port.name] = service_port
        for listening in plan.open:
            assert listening[0] in self.service_ports
            assert not any(exclude_each_other(listening, other) for other in self.listeners)
            assert listening not in self.listeners
            self.listeners.add(listening)
        for listening in plan.close:
            self.close(listening)
        for name in plan.remove:
            del self.service_ports[name]

    def close(self, listening: Listening) -> None:
        self.listeners.remove(listening)
        self.closed.add(listening)


@given(snapshots(), snapshots())
def test_any_plan_reaches_the_desired_snapshot_and_touches_only_what_differs(
    running: Snapshot, desired: Snapshot
) -> None:
    host = Host(running)
    plan = diff(running, desired)
    host.carry_out(plan)
    after = Host(desired)
    assert host.service_ports == after.service_ports
    assert host.listeners == after.listeners
    assert not host.closed & after.listeners
    same = {name for name, port in running.service_ports.items() if desired.service_ports.get(name) == port}
    assert not same & host.touched
    assert bool(plan) == (running != desired)
