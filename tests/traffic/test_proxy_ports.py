"""Ports of the node: proxy ports out of a range, and held ports beside them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.traffic.conftest import RunningProxy, Stage, a_service, ask
from tests.traffic.peers import eventually
from userspace_proxy import Endpoint, L4Protocol, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.core.model import Scope

PROXY_PORT = ListenAddress("127.0.0.1", 0)


@pytest.fixture
def four_ports() -> Iterator[range]:
    """Four ports in a row, the second of which a stranger has."""
    for first in range(21_000, 31_000, 4):
        try:
            for port in (first, first + 2, first + 3):
                socket.create_server(("127.0.0.1", port)).close()
            with socket.create_server(("127.0.0.1", first + 1)):
                yield range(first, first + 4)
                return
        except OSError:
            continue


def port_of(proxy: RunningProxy, service_port: ServicePort) -> int:
    (address,) = proxy.addresses(service_port.name)
    return address.port


def test_ports_of_the_range_go_round_and_the_last_service_waits_for_one(stage: Stage, four_ports: range) -> None:
    """Three services get ports, the fourth none, until one of the three goes."""
    proxy = stage.proxy(settings={"proxy_ports": four_ports})
    backend = stage.named_backend("a").endpoint
    services = [a_service(backend, name=f"s{number}", listen=(PROXY_PORT,)) for number in range(4)]
    failures = proxy.apply(*services)
    ((failed, reasons),) = failures.items()
    assert "no remaining ports" in str(reasons[0])
    served = [each for each in services if each.name != failed]
    free = {four_ports[0], four_ports[2], four_ports[3]}
    ports = {each.name: port_of(proxy, each) for each in served}
    assert set(ports.values()) == free

    proxy.apply(*[each for each in services if each is not served[0]])
    last = next(each for each in services if each.name == failed)
    assert eventually(lambda: proxy.addresses(last.name), within=3.0)
    assert port_of(proxy, last) == ports[served[0].name]
    assert [port_of(proxy, each) for each in served[1:]] == [ports[each.name] for each in served[1:]]


def test_a_proxy_port_stays_when_its_service_changes(stage: Stage, four_ports: range) -> None:
    proxy = stage.proxy(settings={"proxy_ports": four_ports})
    a, b = stage.named_backend("a").endpoint, stage.named_backend("b").endpoint
    before = proxy.serve(a)
    assert proxy.serve(a, b, affinity_s=5.0) == before


def test_a_held_port_is_served_like_the_proxy_port(proxy: RunningProxy, stage: Stage, four_ports: range) -> None:
    held = ListenAddress("127.0.0.1", four_ports[0], is_held=True)
    backends = [stage.named_backend(name) for name in "ab"]
    service = a_service(*(backend.endpoint for backend in backends), listen=(PROXY_PORT, held))
    assert proxy.apply(service) == {}
    addresses = [(each.address, each.port) for each in proxy.addresses(service.name)]
    assert {ask(address) for address in addresses} == {"a", "b"}  # one turn for both


def test_a_held_port_of_a_stranger_leaves_the_rest_and_is_claimed_later(
    proxy: RunningProxy, stage: Stage, four_ports: range
) -> None:
    with socket.create_server(("127.0.0.1", four_ports[2])) as stranger:
        held = ListenAddress("127.0.0.1", four_ports[2], is_held=True)
        service = a_service(stage.named_backend("a").endpoint, listen=(PROXY_PORT, held))
        ((failure,),) = proxy.apply(service).values()
        assert str(failure) == f"cannot listen on {held}: address already in use"
        (address,) = proxy.addresses(service.name)
        assert ask((address.address, address.port)) == "a"
        stranger.close()
    assert eventually(lambda: len(proxy.addresses(service.name)) == 2, within=3.0)
    assert ask((held.address, held.port)) == "a"


def test_a_held_port_belongs_to_who_came_first_and_the_error_names_both(
    proxy: RunningProxy, stage: Stage, four_ports: range
) -> None:
    backend = stage.named_backend("a").endpoint
    held = ListenAddress("127.0.0.1", four_ports[0], is_held=True)
    first = a_service(backend, name="first", listen=(PROXY_PORT, held))
    second = a_service(backend, name="second", listen=(PROXY_PORT, held))
    assert proxy.apply(first) == {}
    ((name, (failure,)),) = proxy.apply(second, first).items()
    assert name == second.name
    assert failure.reason == "in use by default/first"
    assert proxy.apply(second) == {}


def test_traffic_from_outside_gets_endpoints_of_its_own(proxy: RunningProxy, stage: Stage) -> None:
    here, there = stage.named_backend("here").endpoint, stage.named_backend("there").endpoint
    outside = ListenAddress("127.0.0.1", 0, Scope.EXTERNAL)
    name = ServicePortName("default", "web", "", L4Protocol.TCP)

    def serve(external: tuple[Endpoint, ...] | None) -> list[tuple[str, int]]:
        service = ServicePort(name, 80, (here, there), external, listen=(PROXY_PORT, outside))
        assert proxy.apply(service) == {}
        return [(each.address, each.port) for each in proxy.addresses(name)]

    inside_address, outside_address = serve((here,))
    assert {ask(inside_address) for _ in range(2)} == {"here", "there"}
    assert {ask(outside_address) for _ in range(4)} == {"here"}
    assert serve(()) == [inside_address, outside_address]
    assert ask(outside_address) == ""
    serve(None)
    assert {ask(outside_address) for _ in range(2)} == {"here", "there"}
