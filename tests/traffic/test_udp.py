"""UDP: datagrams whole and both ways, sessions that begin and end when they should."""

from __future__ import annotations

import socket
from collections import Counter

import pytest

from tests.traffic.conftest import RunningProxy, Stage, a_service
from tests.traffic.peers import AnsweringDatagrams, eventually, refusing
from userspace_proxy import Endpoint, L4Protocol, ListenAddress, ServicePortName

UDP = L4Protocol.UDP
DNS = ServicePortName("default", "web", "", UDP)


def answer_with(name: str, stage: Stage) -> AnsweringDatagrams:
    return stage.answering_datagrams(lambda data: name.encode())


def ask(stage: Stage, address: ListenAddress) -> str:
    """Send a datagram from a new socket and return the answer."""
    client = stage.datagrams(to=address)
    client.send(b"?")
    return client.receive().decode()


@pytest.mark.parametrize("size", [0, 1, 4097, 9000, 65507])
def test_a_datagram_comes_back_whole(proxy: RunningProxy, stage: Stage, size: int) -> None:
    """cases.md 35"""
    client = stage.datagrams(to=proxy.serve(stage.answering_datagrams(bytes).endpoint, protocol=UDP))
    payload = bytes(range(256)) * 256
    for _ in range(2):
        client.send(payload[:size])
        assert client.receive() == payload[:size]
    assert client.hears_nothing(during=0.02)


def test_boundaries_are_kept(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.datagrams()
    client = stage.datagrams(to=proxy.serve(backend.endpoint, protocol=UDP))
    sent = [b"a", b"", b"bb", b"", b"ccc"]
    with proxy.held():
        for datagram in sent:
            client.send(datagram)
    assert [backend.receive() for _ in sent] == sent


def test_each_client_has_a_session_and_sessions_take_turns(proxy: RunningProxy, stage: Stage) -> None:
    backends = {name: answer_with(name, stage).endpoint for name in "abc"}
    address = proxy.serve(*backends.values(), protocol=UDP)
    clients = [stage.datagrams(to=address) for _ in range(9)]
    answers = []
    for client in clients:
        client.send(b"?")
        answers.append(client.receive())
    assert Counter(answers) == {b"a": 3, b"b": 3, b"c": 3}
    assert proxy.counters().open_sessions == 9
    for client, answer in zip(clients, answers, strict=True):
        client.send(b"?")
        assert client.receive() == answer
    assert {proxy.counters_of(endpoint).sessions for endpoint in backends.values()} == {3}


@pytest.mark.parametrize(("idle_timeout_s", "is_answered"), [(0.25, False), (1.0, True)])
def test_a_reply_after_400_ms_comes_only_with_a_longer_time_out(
    stage: Stage, idle_timeout_s: float, is_answered: bool
) -> None:
    """cases.md 39"""
    proxy = stage.proxy(settings={"udp_idle_timeout_s": idle_timeout_s})
    backend = stage.answering_datagrams(bytes, delay_s=0.4)
    client = stage.datagrams(to=proxy.serve(backend.endpoint, protocol=UDP))
    client.send(b"?")
    assert client.hears_nothing(during=0.5) is not is_answered


@pytest.mark.parametrize("direction", ["to the backend", "to the client"])
def test_traffic_in_either_direction_renews_a_session(stage: Stage, direction: str) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 0.2})
    backend = stage.datagrams()
    client = stage.datagrams(to=proxy.serve(backend.endpoint, protocol=UDP))
    client.send(b"?")
    _, session = backend.receive_from()
    for _ in range(4):
        if direction == "to the backend":
            client.send(b"again")
            assert backend.receive_from() == (b"again", session)
        else:
            backend.answer(b"news", session)
            assert client.receive() == b"news"
        assert client.hears_nothing(during=0.08)
    assert proxy.counters_of(backend.endpoint).sessions == 1
    assert eventually(proxy.is_idle, within=1.0)


def test_a_refusal_ends_only_its_session_and_the_next_datagram_goes_elsewhere(
    stage: Stage,
) -> None:
    """cases.md 38"""
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 30.0})
    good = answer_with("good", stage)
    with refusing(kind=socket.SOCK_DGRAM) as bad:
        address = proxy.serve(bad, good.endpoint, protocol=UDP)
        clients = [stage.datagrams(to=address) for _ in range(20)]
        for client in clients:
            client.send(b"first")
        assert eventually(lambda: proxy.counters_of(bad).dial_failures == 10)
        assert eventually(lambda: len(good.received) == 10)  # those who met the bad endpoint lost this one
        for number in range(3):
            for client in clients:
                client.send(b"%d" % number)
        for client in clients:
            answers = [client.receive() for _ in range(3)]
            assert answers == [b"good"] * 3
        assert proxy.counters_of(bad).dial_failures == 10


def test_when_all_refuse_datagrams_are_dropped_and_service_resumes(proxy: RunningProxy, stage: Stage) -> None:
    with refusing(kind=socket.SOCK_DGRAM) as bad:
        client = stage.datagrams(to=proxy.serve(bad, protocol=UDP))
        for _ in range(10):
            client.send(b"?")
        assert client.hears_nothing(during=0.05)
        proxy.serve(answer_with("good", stage).endpoint, protocol=UDP)
        client.send(b"?")
        assert client.receive() == b"good"


def test_a_steady_sender_moves_when_its_endpoint_is_removed(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 42"""
    one, two = stage.answering_datagrams(bytes), stage.answering_datagrams(bytes)
    client = stage.datagrams(to=proxy.serve(one.endpoint, protocol=UDP))
    client.send(b"first")
    assert client.receive() == b"first"
    proxy.serve(two.endpoint, protocol=UDP)
    at_removal = len(one.received)
    for _ in range(3):
        client.send(b"next")
        assert client.receive() == b"next"
    assert two.received == [b"next"] * 3
    assert len(one.received) == at_removal


def test_sessions_of_endpoints_that_stay_are_left_alone(proxy: RunningProxy, stage: Stage) -> None:
    names = {name: answer_with(name, stage).endpoint for name in "ab"}
    address = proxy.serve(*names.values(), protocol=UDP)
    clients = [stage.datagrams(to=address) for _ in range(2)]
    for client in clients:
        client.send(b"?")
    before = [client.receive().decode() for client in clients]
    proxy.serve(names["a"], protocol=UDP)
    for client in clients:
        client.send(b"?")
        assert client.receive() == b"a"
    assert sorted(before) == ["a", "b"]
    assert proxy.counters_of(names["a"]).sessions == 2


def test_sessions_end_with_their_service(stage: Stage) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 60.0})
    backend = stage.answering_datagrams(bytes)
    client = stage.datagrams(to=proxy.serve(backend.endpoint, protocol=UDP))
    client.send(b"?")
    assert client.receive() == b"?"
    assert proxy.counters().open_sessions == 1
    proxy.apply()
    assert proxy.counters().open_sessions == 0
    with pytest.raises(ConnectionRefusedError):
        client.send(b"?"), client.receive()


def test_with_affinity_all_sessions_of_an_address_go_to_one_endpoint(proxy: RunningProxy, stage: Stage) -> None:
    endpoints = [answer_with(name, stage).endpoint for name in "ab"]
    address = proxy.serve(*endpoints, protocol=UDP, affinity_s=10800)
    assert len({ask(stage, address) for _ in range(10)}) == 1


def test_the_longest_idle_session_goes_when_there_are_too_many(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_sessions": 3, "udp_idle_timeout_s": 60.0})
    backend = stage.datagrams()
    address = proxy.serve(backend.endpoint, protocol=UDP)
    clients = [stage.datagrams(to=address) for _ in range(4)]
    sessions = []
    for client in clients[:3]:
        client.send(b"?")
        sessions.append(backend.receive_from()[1])
    clients[0].send(b"renewed")
    assert backend.receive_from() == (b"renewed", sessions[0])
    clients[3].send(b"one too many")
    assert backend.receive() == b"one too many"
    counters = proxy.counters()
    assert (counters.open_sessions, counters.evicted_sessions) == (3, 1)
    backend.answer(b"for one", sessions[0])
    assert clients[0].receive() == b"for one"
    backend.answer(b"for two", sessions[1])
    assert clients[1].hears_nothing(during=0.05)


@pytest.mark.parametrize(("wildcard", "asked"), [("0.0.0.0", ("127.0.0.2", "127.0.0.3")), ("::", ("::1",))])
def test_a_wildcard_listener_answers_from_the_address_that_was_asked(
    proxy: RunningProxy, stage: Stage, wildcard: str, asked: tuple[str, ...]
) -> None:
    backend = stage.answering_datagrams(bytes)
    port = proxy.serve(backend.endpoint, protocol=UDP, listen=(ListenAddress(wildcard, 0),)).port
    local = "::" if ":" in wildcard else "0.0.0.0"
    client = stage.datagrams(local)  # not connected, so it sees where the answer comes from
    for address in asked * 2:
        client.answer(address.encode(), (address, port))
        assert client.receive_from() == (address.encode(), (address, port))
    assert proxy.counters_of(backend.endpoint).sessions == len(asked)


def test_an_ipv6_client_reaches_an_ipv6_backend(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.answering_datagrams(bytes, "::1")
    client = stage.datagrams("::1", to=proxy.serve(backend.endpoint, protocol=UDP, listen=(ListenAddress("::1", 0),)))
    client.send(b"six")
    assert client.receive() == b"six"


def test_counters_of_datagrams_are_exact(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.answering_datagrams(lambda data: data * 2)
    client = stage.datagrams(to=proxy.serve(backend.endpoint, protocol=UDP))
    for _ in range(10):
        client.send(b"x" * 100)
        assert len(client.receive()) == 200
    counters = proxy.counters_of(backend.endpoint)
    assert (counters.sessions, counters.open_sessions) == (1, 1)
    assert (counters.bytes_to_endpoint, counters.bytes_to_client) == (1000, 2000)
    assert eventually(lambda: proxy.counters_of(backend.endpoint).open_sessions == 0, within=1.0)


def test_a_service_without_endpoints_drops_and_counts(proxy: RunningProxy, stage: Stage) -> None:
    address = proxy.serve(protocol=UDP)
    client = stage.datagrams(to=address)
    for _ in range(3):
        client.send(b"?")
    assert eventually(lambda: proxy.counters().dropped_datagrams == 3)
    assert proxy.counters().open_sessions == 0
    proxy.serve(answer_with("a", stage).endpoint, protocol=UDP)
    client.send(b"?")
    assert client.receive() == b"a"


def test_an_endpoint_that_cannot_be_connected_to_is_left_when_another_appears(
    proxy: RunningProxy, stage: Stage
) -> None:
    """A socket that could not be connected is of no use for the client's next datagram."""
    broadcast = Endpoint("255.255.255.255", 9)
    client = stage.datagrams(to=proxy.serve(broadcast, protocol=UDP))
    for _ in range(3):
        client.send(b"?")
    assert eventually(lambda: proxy.counters().dropped_datagrams == 3)
    assert proxy.counters_of(broadcast).sessions == 0
    good = answer_with("good", stage)
    proxy.serve(broadcast, good.endpoint, protocol=UDP)
    for _ in range(3):
        client.send(b"?")
        assert client.receive() == b"good"


def test_sessions_without_an_endpoint_take_no_place_from_others(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_sessions": 2, "udp_idle_timeout_s": 60.0})
    good = a_service(answer_with("a", stage).endpoint, protocol=UDP)
    empty = a_service(name="empty", protocol=UDP)
    proxy.apply(good, empty)
    client = stage.datagrams(to=proxy.addresses(good.name)[0])
    client.send(b"?")
    assert client.receive() == b"a"
    for _ in range(5):
        stage.datagrams(to=proxy.addresses(empty.name)[0]).send(b"?")
    assert eventually(lambda: proxy.counters().dropped_datagrams == 5)
    assert (proxy.counters().open_sessions, proxy.counters().evicted_sessions) == (1, 0)


def test_every_datagram_of_a_hundred_clients_comes_back(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.answering_datagrams(bytes)
    address = proxy.serve(backend.endpoint, protocol=UDP)
    clients = [stage.datagrams(to=address) for _ in range(100)]
    for number in range(20):
        for client in clients:
            client.send(b"%d" % number)
        for client in clients:
            assert client.receive() == b"%d" % number
    assert proxy.counters_of(backend.endpoint).sessions >= 100
    assert proxy.counters().dropped_datagrams == 0
