"""Proxy ports out of a range, and held ports, over real sockets of the loopback interface."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from userspace_proxy.core.errors import ListenFailed, PortsExhausted
from userspace_proxy.core.model import L4Protocol, ServicePortName
from userspace_proxy.core.portals import HeldPort
from userspace_proxy.dataplane.ports import HeldPorts, ProxyPortAllocator

A, B = ServicePortName("ns", "a"), ServicePortName("ns", "b")
BOTH = pytest.mark.parametrize("protocol", list(L4Protocol))


@pytest.fixture
def four_ports() -> range:
    """Four ports in a row that are free now."""
    for first in range(20000, 30000, 4):
        try:
            for port in range(first, first + 4):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    with socket.socket(socket.AF_INET, kind) as probe:
                        probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return range(first, first + 4)
    raise AssertionError("no four free ports in a row")


@BOTH
def test_a_taken_port_is_passed_over_and_a_released_one_is_free_again(four_ports: range, protocol: L4Protocol) -> None:
    allocator = ProxyPortAllocator(four_ports, random.Random(1))
    kind = socket.SOCK_STREAM if protocol is L4Protocol.TCP else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as stranger:
        stranger.bind(("127.0.0.1", four_ports[0] + 1))
        if protocol is L4Protocol.TCP:
            stranger.listen()
        taken = [allocator.take("127.0.0.1", protocol) for _ in range(3)]
        assert sorted(sock.getsockname()[1] - four_ports[0] for sock in taken) == [0, 2, 3]

        with pytest.raises(PortsExhausted, match="no remaining ports"):
            allocator.take("127.0.0.1", protocol)
        port = taken[1].getsockname()[1]
        taken[1].close()
        again = allocator.take("127.0.0.1", protocol)

        assert again.getsockname()[1] == port
        for sock in (*taken, again):
            sock.close()


def test_without_a_range_the_system_chooses() -> None:
    with ProxyPortAllocator(None, random.Random()).take("127.0.0.1", L4Protocol.UDP) as sock:
        assert sock.getsockname()[1] > 0


def test_another_failure_than_a_taken_port_is_not_searched_around() -> None:
    with pytest.raises(ListenFailed, match="192\\.0\\.2\\.1"):
        ProxyPortAllocator(range(40000, 40004), random.Random()).take("192.0.2.1", L4Protocol.TCP)


@pytest.fixture
def held() -> Iterator[HeldPorts]:
    ports = HeldPorts()
    yield ports
    ports.close()


def _take(sock: socket.socket, port: int) -> None:
    sock.bind(("127.0.0.1", port))
    if sock.type == socket.SOCK_STREAM:
        sock.listen()


@BOTH
def test_a_held_port_cannot_be_taken_by_another_program(
    held: HeldPorts, four_ports: range, protocol: L4Protocol
) -> None:
    port = HeldPort("0.0.0.0", four_ports[0], protocol)

    change = held.hold({A: [port]})

    assert list(change.claimed) == [port]
    assert held.owner(port) == A
    kind = socket.SOCK_STREAM if protocol is L4Protocol.TCP else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            _take(stranger, four_ports[0])


def test_what_is_held_already_is_left_alone(held: HeldPorts, four_ports: range) -> None:
    port = HeldPort("127.0.0.1", four_ports[0], L4Protocol.TCP)
    held.hold({A: [port]})

    change = held.hold({A: [port]})

    assert (change.claimed, change.released, change.refusals) == ({}, (), ())


def test_the_second_service_is_refused_with_both_names_and_gets_the_port_once_it_is_free(
    held: HeldPorts, four_ports: range
) -> None:
    port = HeldPort("0.0.0.0", four_ports[0], L4Protocol.TCP)
    single = HeldPort("127.0.0.1", four_ports[0], L4Protocol.TCP)
    held.hold({A: [port]})

    (refusal,) = held.hold({A: [port], B: [port]}).refusals
    assert (refusal.owner, refusal.wanted_by) == (A, B)
    assert "ns/a" in str(refusal)
    assert "ns/b" in str(refusal)
    assert [refused.owner for refused in held.hold({A: [port], B: [single]}).refusals] == [A]

    change = held.hold({B: [port]})

    assert held.owner(port) == B
    assert change.released == (port,)
    assert list(change.claimed) == [port]


def test_a_portal_that_the_services_own_node_port_covers_is_no_conflict(held: HeldPorts, four_ports: range) -> None:
    ports = [HeldPort(address, four_ports[0], L4Protocol.TCP) for address in ("0.0.0.0", "127.0.0.1")]

    change = held.hold({A: ports})

    assert list(change.claimed) == ports[:1]
    assert not change.refusals


def test_the_same_number_in_both_protocols_belongs_to_two_services(held: HeldPorts, four_ports: range) -> None:
    tcp, udp = (HeldPort("0.0.0.0", four_ports[0], protocol) for protocol in L4Protocol)

    assert not held.hold({A: [tcp], B: [udp]}).refusals


def test_a_port_of_a_foreign_program_is_claimed_once_it_is_free(held: HeldPorts, four_ports: range) -> None:
    port = HeldPort("0.0.0.0", four_ports[0], L4Protocol.TCP)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", four_ports[0]))
        stranger.listen()
        (refusal,) = held.hold({A: [port]}).refusals

    assert (refusal.owner, refusal.reason) == (None, "address already in use")
    assert "cannot be held" in str(refusal)
    assert list(held.hold({A: [port]}).claimed) == [port]


def test_an_ipv6_wildcard_leaves_the_ipv4_port_to_others(held: HeldPorts, four_ports: range) -> None:
    v4, v6 = (HeldPort(address, four_ports[0], L4Protocol.TCP) for address in ("0.0.0.0", "::"))

    assert not held.hold({A: [v6], B: [v4]}).refusals
