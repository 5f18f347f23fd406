from __future__ import annotations

from userspace_proxy import Endpoint, L4Protocol, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import Plan, diff

A, B = Endpoint("10.0.0.1", 80), Endpoint("10.0.0.2", 80)


def address(port: int, host: str = "127.0.0.1") -> ListenAddress:
    return ListenAddress(host, port)


def service(
    name: str, *listen: ListenAddress, endpoints: tuple[Endpoint, ...] = (), protocol: L4Protocol = L4Protocol.TCP
) -> ServicePort:
    return ServicePort(ServicePortName("default", name, "", protocol), 80, endpoints, listen=listen)


def test_nothing_changed_is_an_empty_plan() -> None:
    snapshot = Snapshot.of(service("a", address(1)))
    assert not diff(snapshot, snapshot)
    assert not diff(snapshot, Snapshot.of(service("a", address(1))))  # equal, though not the same object


def test_a_new_service_is_updated_before_it_is_listened_on() -> None:
    new = service("a", address(1), address(2))
    plan = diff(Snapshot(), Snapshot.of(new))
    assert plan == Plan(update=(new,), open=((new.name, address(1)), (new.name, address(2))))
    assert plan


def test_a_service_that_goes_is_closed_and_removed() -> None:
    old = service("a", address(1))
    assert diff(Snapshot.of(old), Snapshot()) == Plan(close=((old.name, address(1)),), remove=(old.name,))


def test_new_endpoints_touch_no_listener() -> None:
    new = service("a", address(1), endpoints=(A, B))
    assert diff(Snapshot.of(service("a", address(1), endpoints=(A,))), Snapshot.of(new)) == Plan(update=(new,))


def test_only_addresses_that_differ_are_opened_and_closed() -> None:
    new = service("a", address(2), address(3))
    plan = diff(Snapshot.of(service("a", address(1), address(2))), Snapshot.of(new))
    assert plan == Plan(update=(new,), open=((new.name, address(3)),), close=((new.name, address(1)),))


def test_a_port_that_another_service_claims_is_released_first() -> None:
    old, new = service("a", address(1)), service("b", address(1))
    plan = diff(Snapshot.of(old), Snapshot.of(new))
    assert plan.release == ((old.name, address(1)),)
    assert plan.close == ()


def test_a_wildcard_claims_the_port_of_a_single_address() -> None:
    old, new = service("a", address(1)), service("a", address(1, "0.0.0.0"))
    assert diff(Snapshot.of(old), Snapshot.of(new)).release == ((old.name, address(1)),)


def test_the_other_protocol_and_free_ports_claim_nothing() -> None:
    old = [service("a", address(1)), service("b", address(0))]
    new = [service("c", address(1), protocol=L4Protocol.UDP), service("d", address(0))]
    plan = diff(Snapshot.of(*old), Snapshot.of(*new))
    assert plan.release == ()
    assert len(plan.close) == len(plan.open) == 2
