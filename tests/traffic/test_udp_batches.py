"""Many datagrams at once, with recvmmsg and sendmmsg and without: what arrives, and in which order, is the same."""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.traffic.conftest import RunningProxy, Stage, Variant
from tests.traffic.peers import Datagrams, eventually
from userspace_proxy import Endpoint, L4Protocol, ListenAddress
from userspace_proxy.dataplane import batches
from userspace_proxy.dataplane.mmsg import BATCH, ReceiveBatch, SendBatch

UDP = L4Protocol.UDP
LARGEST_OVER_IPV4, LARGEST_OVER_IPV6 = 65507, 65527


@dataclass
class Calls:
    """How many datagrams each call of recvmmsg had, and each flush of replies."""

    received: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def had_many(self, numbers: list[int], variant: Variant) -> bool:
        """Tell whether one had more than a few, as it must be, or there was none, if that must be.

        The calls of another process cannot be counted: of these, only what arrives is known.
        """
        if variant.is_child or variant.workers > 1:
            return True
        return not numbers if variant.mmsg == "never" else max(numbers) > 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen = Calls()
    receive, send = ReceiveBatch.receive, SendBatch.send

    def counted_receive(self: ReceiveBatch, fd: int) -> list[tuple[bytes, bytes]]:
        received = receive(self, fd)
        seen.received.append(len(received))
        return received

    def counted_send(self: SendBatch, fd: int) -> int:
        seen.sent.append(self.count)
        return send(self, fd)

    monkeypatch.setattr(ReceiveBatch, "receive", counted_receive)
    monkeypatch.setattr(SendBatch, "send", counted_send)
    return seen


def sessions_of(
    proxy: RunningProxy, backend: Datagrams, address: ListenAddress, clients: list[Datagrams]
) -> list[tuple[str, int]]:
    """Let all clients ask in one batch, and return the addresses of their sessions, in order."""
    with proxy.held():
        for number, client in enumerate(clients):
            client.answer(b"%d" % number, (address.address, address.port))
    found = dict(backend.receive_from() for _ in clients)
    return [found[b"%d" % number] for number in range(len(clients))]


def test_datagrams_that_wait_arrive_in_order_and_replies_too(
    proxy: RunningProxy, stage: Stage, variant: Variant, calls: Calls
) -> None:
    backend = stage.datagrams()
    address = proxy.serve(backend.endpoint, protocol=UDP)
    clients = [stage.datagrams() for _ in range(BATCH + 30)]
    sessions = sessions_of(proxy, backend, address, clients)
    assert len(set(sessions)) == len(clients)
    with proxy.held():
        for number in range(3):
            for session in sessions:
                backend.answer(b"%d for %d" % (number, session[1]), session)
    for client, session in zip(clients, sessions, strict=True):
        assert [client.receive_from() for _ in range(3)] == [
            (b"%d for %d" % (number, session[1]), (address.address, address.port)) for number in range(3)
        ]
    assert calls.had_many(calls.received, variant)
    assert calls.had_many(calls.sent, variant)
    counted = proxy.counters_of(backend.endpoint)
    assert counted.sessions == len(clients)
    assert counted.bytes_to_endpoint == sum(len(str(number)) for number in range(len(clients)))
    assert counted.bytes_to_client == 3 * sum(len(b"0 for %d" % session[1]) for session in sessions)
    assert proxy.counters().dropped_datagrams == 0


def test_many_datagrams_of_one_client_stay_whole_and_in_order(
    proxy: RunningProxy, stage: Stage, variant: Variant, calls: Calls
) -> None:
    """cases.md 35"""
    client = stage.datagrams(to=proxy.serve(stage.answering_datagrams(bytes).endpoint, protocol=UDP))
    sizes = [0, 1, 9000, 0, LARGEST_OVER_IPV4, 4097, 1472, 0, 2, 1]
    sent = [os.urandom(size) for size in sizes]
    with proxy.held():
        for datagram in sent:
            client.send(datagram)
    assert [client.receive() for _ in sent] == sent
    assert client.hears_nothing(during=0.02)
    assert calls.had_many(calls.received, variant)


def test_a_reply_that_cannot_be_sent_is_counted_and_its_neighbours_arrive(
    proxy: RunningProxy, stage: Stage, variant: Variant, calls: Calls
) -> None:
    """IPv6 has room for more bytes than IPv4."""
    backend = stage.datagrams("::1")
    address = proxy.serve(backend.endpoint, protocol=UDP)
    clients = [stage.datagrams() for _ in range(6)]
    sessions = sessions_of(proxy, backend, address, clients)
    replies = [b"a", b"b" * LARGEST_OVER_IPV6, b"c", b"d" * LARGEST_OVER_IPV6, b"e" * LARGEST_OVER_IPV4, b"f"]
    with proxy.held():
        for reply, session in zip(replies, sessions, strict=True):
            backend.answer(reply, session)
    for reply, client in zip(replies, clients, strict=True):
        if len(reply) == LARGEST_OVER_IPV6:
            assert client.hears_nothing(during=0.02)
        else:
            assert client.receive() == reply
    assert proxy.counters().dropped_datagrams == 2
    assert calls.had_many(calls.sent, variant)


@pytest.mark.parametrize(("wildcard", "asked"), [("0.0.0.0", ("127.0.0.2", "127.0.0.3")), ("::", ("::1",))])
def test_replies_to_many_leave_from_the_address_that_each_asked(
    proxy: RunningProxy, stage: Stage, variant: Variant, calls: Calls, wildcard: str, asked: tuple[str, ...]
) -> None:
    backend = stage.answering_datagrams(bytes)
    port = proxy.serve(backend.endpoint, protocol=UDP, listen=(ListenAddress(wildcard, 0),)).port
    clients = [stage.datagrams("::" if ":" in wildcard else "0.0.0.0") for _ in range(5)]
    for _ in range(2):  # the second time the sessions are known
        with proxy.held():
            for client in clients:
                for address in asked * 2:
                    client.answer(address.encode(), (address, port))
        for client in clients:
            answers = Counter(client.receive_from() for _ in asked * 2)
            assert answers == {(address.encode(), (address, port)): 2 for address in asked}
    assert proxy.counters_of(backend.endpoint).sessions == len(asked) * len(clients)
    assert calls.had_many(calls.received, variant)


def test_without_endpoints_each_of_many_datagrams_is_counted(proxy: RunningProxy, stage: Stage) -> None:
    client = stage.datagrams(to=proxy.serve(protocol=UDP))
    with proxy.held():
        for _ in range(50):
            client.send(b"?")
    assert eventually(lambda: proxy.counters().dropped_datagrams == 50)
    assert proxy.counters().open_sessions == 0


def test_nothing_is_kept_of_sessions_that_ended_and_their_clients_come_back(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_sessions": 8, "udp_idle_timeout_s": 0.1})
    backend = stage.datagrams()
    address = proxy.serve(backend.endpoint, protocol=UDP)
    clients = [stage.datagrams() for _ in range(10)]
    for _ in range(2):
        sessions_of(proxy, backend, address, clients)
        assert eventually(proxy.is_idle)
    assert proxy.counters_of(backend.endpoint).sessions == 20
    assert proxy.counters().evicted_sessions == 4
    assert getattr(proxy.listener(), "session_by_envelope", {}) == {}


def test_it_goes_back_to_single_calls_when_the_load_falls(
    proxy: RunningProxy, stage: Stage, variant: Variant, calls: Calls
) -> None:
    backend = stage.answering_datagrams(bytes)
    client = stage.datagrams(to=proxy.serve(backend.endpoint, protocol=UDP))
    for _ in range(2):
        with proxy.held():
            for _ in range(30):
                client.send(b"many")
        for _ in range(30):
            assert client.receive() == b"many"
        for _ in range(5):
            client.send(b"one")
            assert client.receive() == b"one"
        assert calls.had_many(calls.received, variant)
        calls.received.clear()
        calls.sent.clear()
        for _ in range(5):
            client.send(b"one")
            assert client.receive() == b"one"
        assert bool(calls.received) == bool(calls.sent) == (variant.mmsg == "always")


@pytest.mark.in_this_process("another process cannot be made to lack them", without_workers=True)
def test_where_the_system_lacks_the_calls_datagrams_go_one_by_one(
    stage: Stage,
    variant: Variant,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lacking() -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(batches, "ReceiveBatch", lacking)
    proxy = stage.proxy()
    client = stage.datagrams(to=proxy.serve(stage.answering_datagrams(bytes).endpoint, protocol=UDP))
    for _ in range(2):
        with proxy.held():
            for number in range(20):
                client.send(b"%d" % number)
        assert [client.receive() for _ in range(20)] == [b"%d" % number for number in range(20)]
    assert not calls.received
    told = [record.getMessage() for record in caplog.records if "recvmmsg" in record.getMessage()]
    assert len(told) == (0 if variant.mmsg == "never" else 1)


def test_endpoints_that_refuse_some_of_many_datagrams_lose_no_others(
    proxy: RunningProxy, stage: Stage, variant: Variant, calls: Calls
) -> None:
    """The broadcast address cannot be connected to, so its datagrams go to the next endpoint at once."""
    good = stage.answering_datagrams(bytes)
    address = proxy.serve(Endpoint("255.255.255.255", 9), good.endpoint, protocol=UDP)
    clients = [stage.datagrams(to=address) for _ in range(20)]
    with proxy.held():
        for number, client in enumerate(clients):
            client.send(b"%d" % number)
    assert [client.receive() for client in clients] == [b"%d" % number for number in range(20)]
    assert proxy.counters().dropped_datagrams == 0
    assert calls.had_many(calls.received, variant)
