"""Waking: clients of idled service ports are held, pods are asked for once, and clients go on when there are some."""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.traffic.conftest import RunningProxy, Stage, a_service, ask
from tests.traffic.peers import PATIENCE_S, Datagrams, Peer, eventually, refusing
from userspace_proxy import Endpoint, L4Protocol, ListenAddress, ServicePortName, WakingCounters
from userspace_proxy.core.model import Scope
from userspace_proxy.dataplane.waiting import HeldConnection

TCP, UDP = L4Protocol.TCP, L4Protocol.UDP
LONG_S = 60.0
SHORT_S = 0.3


class Sleeper:
    """A proxy with one service port whose clients wake it, and what it has said about needing pods."""

    def __init__(
        self,
        stage: Stage,
        *,
        protocol: L4Protocol = TCP,
        listen: tuple[ListenAddress, ...] = (ListenAddress("127.0.0.1", 0),),
        affinity_s: float | None = None,
        proxy_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.asked_for: list[ServicePortName] = []
        settings = {"hold_timeout_s": LONG_S, **settings}
        options = {"needs_pods": self.asked_for.append, **(proxy_options or {})}
        self.proxy: RunningProxy = stage.proxy(settings=settings, **options)
        self._service = a_service(protocol=protocol, listen=listen, affinity_s=affinity_s, wakes=True)
        self.name = self._service.name
        self.address = self.have()

    def have(self, *endpoints: Endpoint, **changed: Any) -> ListenAddress:
        """Let the service port have these endpoints, and return where it listens first."""
        assert self.proxy.apply(replace(self._service, endpoints=endpoints, **changed)) == {}
        return self.proxy.addresses(self.name)[0]

    def waking(self) -> WakingCounters:
        return self.proxy.counters().waking

    def holds(self, count: int) -> bool:
        """Tell whether so many clients are held, at once or soon."""
        return eventually(lambda: self.waking().held_connections + self.waking().held_udp_clients == count)

    def held_clients(self, stage: Stage, count: int) -> list[Peer]:
        """Connect one client after the other, each of which is held."""
        clients = []
        before = self.waking().held_connections
        for number in range(count):
            clients.append(stage.connect(self.address))
            assert self.holds(before + number + 1)
        return clients


@pytest.fixture
def sleeper(stage: Stage) -> Sleeper:
    return Sleeper(stage)


def has_ended(client: Peer) -> bool:
    """Tell whether the connection was closed, with a reset or without, before anything came."""
    try:
        return client.sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_is_held_and_served_with_what_it_sent_early(sleeper: Sleeper, stage: Stage) -> None:
    """cases.md 83"""
    early = bytes(range(256)) * 1024
    client = stage.connect(sleeper.address)
    client.send(b"first ")
    assert sleeper.holds(1)
    client.send(early)
    assert client.hears_nothing(during=0.05)
    assert sleeper.asked_for == [sleeper.name]
    backend = stage.backend()
    sleeper.have(backend.endpoint)
    server = backend.accept()
    assert server.receive(6 + len(early)) == b"first " + early
    server.send(b"answer")
    assert client.receive(6) == b"answer"
    counted = sleeper.waking()
    assert (counted.held_connections, counted.wake_ups, counted.expired, counted.displaced) == (0, 1, 0, 0)
    assert sum(counted.wake_times.counts) == 1
    assert counted.wake_times.total_s > 0


def test_a_half_close_behind_bytes_is_no_farewell(sleeper: Sleeper, stage: Stage) -> None:
    client = stage.connect(sleeper.address)
    client.send(b"all of it")
    client.half_close()
    assert sleeper.holds(1)
    assert client.hears_nothing(during=0.05)
    sleeper.have(stage.serving_backend().endpoint)
    assert client.receive_all() == b"all of it"


@pytest.mark.parametrize("farewell", ["a reset", "a reset behind bytes", "an end without a byte"])
def test_a_client_that_leaves_is_forgotten(sleeper: Sleeper, stage: Stage, farewell: str) -> None:
    client = stage.connect(sleeper.address)
    assert sleeper.holds(1)
    if farewell == "a reset behind bytes":
        client.send(b"never mind")
        assert sleeper.holds(1)
    if farewell == "an end without a byte":
        client.close()
    else:
        client.reset()
    assert sleeper.holds(0)
    backend = stage.named_backend("a")
    sleeper.have(backend.endpoint)
    assert ask(sleeper.address) == "a"
    assert backend.connections == 1
    assert sleeper.waking().expired == 0


def test_clients_go_out_in_order_of_arrival(sleeper: Sleeper, stage: Stage) -> None:
    clients = sleeper.held_clients(stage, 8)
    for number, client in enumerate(clients):
        client.send(b"%d" % number)
    backend = stage.backend()
    sleeper.have(backend.endpoint)
    assert [backend.accept().receive(1) for _ in clients] == [b"%d" % number for number in range(8)]
    assert sleeper.asked_for == [sleeper.name]


def test_the_choice_of_endpoints_is_the_usual_one(sleeper: Sleeper, stage: Stage) -> None:
    clients = sleeper.held_clients(stage, 9)
    sleeper.have(*(stage.named_backend(name).endpoint for name in "abc"))
    assert Counter(client.receive_all() for client in clients) == {b"a": 3, b"b": 3, b"c": 3}


def test_affinity_counts_for_those_who_were_held(stage: Stage) -> None:
    sleeper = Sleeper(stage, affinity_s=10800)
    clients = sleeper.held_clients(stage, 6)
    sleeper.have(*(stage.named_backend(name).endpoint for name in "abc"))
    answers = {client.receive_all() for client in clients}
    assert len(answers) == 1
    assert {ask(sleeper.address).encode()} == answers


@pytest.mark.parametrize("count", [3, 17])
def test_at_most_sixteen_are_held_and_the_oldest_goes_first(sleeper: Sleeper, stage: Stage, count: int) -> None:
    clients = sleeper.held_clients(stage, min(count, 16))
    clients += [stage.connect(sleeper.address) for _ in range(count - 16)]
    displaced = clients[: max(0, count - 16)]
    assert all(has_ended(client) for client in displaced)
    assert sleeper.holds(min(count, 16))
    assert sleeper.waking().displaced == len(displaced)
    sleeper.have(stage.named_backend("a").endpoint)
    assert {client.receive_all() for client in clients[len(displaced) :]} == {b"a"}
    assert sleeper.asked_for == [sleeper.name]


def test_of_two_hundred_at_once_the_last_sixteen_are_served(sleeper: Sleeper, stage: Stage) -> None:
    with sleeper.proxy.held():
        clients = [stage.connect(sleeper.address) for _ in range(200)]
    assert eventually(lambda: sleeper.waking().displaced == 184)
    assert sleeper.holds(16)
    assert all(has_ended(client) for client in clients[:184])
    sleeper.have(stage.named_backend("a").endpoint)
    assert {client.receive_all() for client in clients[184:]} == {b"a"}
    assert sleeper.asked_for == [sleeper.name]


def test_all_addresses_of_a_service_port_share_a_wake_up_and_its_limit(stage: Stage) -> None:
    both = (ListenAddress("127.0.0.1", 0), ListenAddress("127.0.0.2", 0))
    sleeper = Sleeper(stage, listen=both, max_held=2)
    one, other = sleeper.proxy.addresses(sleeper.name)
    clients = []
    for number, address in enumerate((one, other)):
        clients.append(stage.connect(address))
        assert sleeper.holds(number + 1)
    clients.append(stage.connect(one))
    assert has_ended(clients[0])
    assert sleeper.asked_for == [sleeper.name]
    sleeper.have(stage.named_backend("a").endpoint)
    assert {client.receive_all() for client in clients[1:]} == {b"a"}


def test_service_ports_are_woken_each_for_itself(stage: Stage) -> None:
    asked_for: list[ServicePortName] = []
    proxy = stage.proxy(needs_pods=asked_for.append)
    services = [a_service(name=name, wakes=True) for name in ("one", "two")]
    proxy.apply(*services)
    clients = [stage.connect(proxy.addresses(each.name)[0]) for each in services]
    assert eventually(lambda: proxy.counters().waking.held_connections == 2)
    assert Counter(asked_for) == {each.name: 1 for each in services}
    proxy.apply(replace(services[0], endpoints=(stage.named_backend("a").endpoint,)), services[1])
    assert clients[0].receive_all() == b"a"
    assert clients[1].hears_nothing(during=0.05)


def test_when_nobody_comes_all_are_closed_and_the_next_client_asks_again(stage: Stage) -> None:
    sleeper = Sleeper(stage, hold_timeout_s=SHORT_S)
    with sleeper.proxy.held():  # so that they come at the same time
        clients = [stage.connect(sleeper.address) for _ in range(3)]
        clients[0].send(b"early")
    assert all(has_ended(client) for client in clients)
    assert eventually(lambda: sleeper.waking().expired == 3)
    assert sleeper.asked_for == [sleeper.name]
    late = stage.connect(sleeper.address)
    assert eventually(lambda: sleeper.asked_for == [sleeper.name] * 2)
    sleeper.have(stage.named_backend("a").endpoint)
    assert late.receive_all() in (b"a", b"")  # on a slow machine its own time may be up, too
    assert sleeper.waking().wake_ups == 2


def test_a_service_that_falls_asleep_again_is_woken_again(sleeper: Sleeper, stage: Stage) -> None:
    backend = stage.named_backend("a")
    for number in (1, 2):
        sleeper.have()
        client = stage.connect(sleeper.address)
        assert sleeper.holds(1)
        assert sleeper.asked_for == [sleeper.name] * number
        sleeper.have(backend.endpoint)
        assert client.receive_all() == b"a"
        assert ask(sleeper.address) == "a"
    assert sum(sleeper.waking().wake_times.counts) == 2


def test_other_changes_of_an_idled_service_let_its_clients_wait(sleeper: Sleeper, stage: Stage) -> None:
    (client,) = sleeper.held_clients(stage, 1)
    sleeper.have(session_affinity_s=10800.0)
    assert client.hears_nothing(during=0.05)
    sleeper.have(stage.named_backend("a").endpoint)
    assert client.receive_all() == b"a"
    assert sleeper.asked_for == [sleeper.name]


def test_without_the_annotation_clients_are_closed_as_ever(sleeper: Sleeper, stage: Stage) -> None:
    (client,) = sleeper.held_clients(stage, 1)
    sleeper.have(wakes_on_connect=False)
    assert has_ended(client)
    assert ask(sleeper.address) == ""
    assert sum(sleeper.waking().wake_times.counts) == 0


def test_a_removed_service_sends_its_clients_away(sleeper: Sleeper, stage: Stage) -> None:
    clients = sleeper.held_clients(stage, 2)
    sleeper.proxy.apply()
    assert all(has_ended(client) for client in clients)
    assert sleeper.holds(0)


def test_unidling_can_be_off(stage: Stage) -> None:
    sleeper = Sleeper(stage, unidling=False)
    assert ask(sleeper.address) == ""
    assert sleeper.asked_for == []


def test_stopping_sends_all_away_at_once_while_others_may_end(stage: Stage) -> None:
    proxy = stage.proxy(drain_timeout_s=PATIENCE_S)
    backend = stage.backend()
    awake, idled = a_service(backend.endpoint, name="awake"), a_service(name="idled", wakes=True)
    proxy.apply(awake, idled)
    served, held = (stage.connect(proxy.addresses(each.name)[0]) for each in (awake, idled))
    server = backend.accept()
    assert eventually(lambda: proxy.counters().waking.held_connections == 1)
    proxy.loop.call_soon_threadsafe(proxy._leave.set)
    assert has_ended(held)
    server.send(b"still")
    assert served.receive(5) == b"still"
    served.close()


@pytest.mark.in_this_process("looks into the data path")
def test_bytes_that_wait_wake_nobody(sleeper: Sleeper, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    on_ready = HeldConnection.on_ready

    def count(held: HeldConnection, events: int) -> None:
        told.append(events)
        on_ready(held, events)

    monkeypatch.setattr(HeldConnection, "on_ready", count)
    (client,) = sleeper.held_clients(stage, 1)
    client.send(b"early")
    assert eventually(lambda: bool(told))
    assert client.hears_nothing(during=0.1)
    assert len(told) <= 3


@pytest.mark.in_this_process("looks into the data path")
def test_those_who_have_waited_longest_go_first_when_descriptors_run_out(stage: Stage) -> None:
    sleeper = Sleeper(stage)
    clients = sleeper.held_clients(stage, 4)
    shortage = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    sleeper.proxy.call(lambda: sleeper.proxy.plane._engine.gate.close(shortage))
    assert all(has_ended(client) for client in clients[:2])
    assert sleeper.waking().displaced == 2
    sleeper.have(stage.named_backend("a").endpoint)
    assert {client.receive_all() for client in clients[2:]} == {b"a"}


def test_a_fault_of_whoever_is_told_ends_no_wait(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: ServicePortName) -> None:
        raise LookupError("nobody is there")

    sleeper = Sleeper(stage, proxy_options={"needs_pods": fail})
    (client,) = sleeper.held_clients(stage, 1)
    sleeper.have(stage.named_backend("a").endpoint)
    assert client.receive_all() == b"a"
    assert "nobody is there" in caplog.text
    caplog.clear()


def test_an_endpoint_that_appears_before_it_listens_is_tried_again(sleeper: Sleeper, stage: Stage) -> None:
    clients = sleeper.held_clients(stage, 3)
    with refusing() as soon:
        sleeper.have(soon)
        assert eventually(lambda: sleeper.proxy.counters_of(soon).dial_failures > 0)
        clients.append(stage.connect(sleeper.address))
        assert all(client.hears_nothing(during=0.05) for client in clients)
    stage.named_backend("a", port=soon.port)
    assert {client.receive_all() for client in clients} == {b"a"}
    assert sleeper.asked_for == [sleeper.name]


def test_a_wake_up_is_one_also_if_the_annotation_goes_when_endpoints_come(sleeper: Sleeper, stage: Stage) -> None:
    (client,) = sleeper.held_clients(stage, 1)
    with refusing() as soon:
        sleeper.have(soon, wakes_on_connect=False)
        assert client.hears_nothing(during=0.05)
    stage.named_backend("a", port=soon.port)
    assert client.receive_all() == b"a"
    assert sum(sleeper.waking().wake_times.counts) == 1


def test_an_endpoint_that_never_listens_is_given_up(stage: Stage) -> None:
    sleeper = Sleeper(stage, hold_timeout_s=SHORT_S)
    client = stage.connect(sleeper.address)
    with refusing() as never:
        sleeper.have(never)
        assert has_ended(client)
        assert ask(sleeper.address) == ""


def test_a_client_whose_endpoints_go_while_it_is_dialled_is_held(sleeper: Sleeper, stage: Stage) -> None:
    client = stage.connect(sleeper.address)
    assert sleeper.holds(1)
    with refusing() as soon:
        sleeper.have(soon)
        assert eventually(lambda: sleeper.proxy.counters_of(soon).dial_failures > 0)
        sleeper.have()
    assert eventually(lambda: sleeper.asked_for == [sleeper.name] * 2)
    assert sleeper.holds(1)
    sleeper.have(stage.named_backend("a").endpoint)
    assert client.receive_all() == b"a"


def test_endpoints_of_the_other_family_alone_are_no_idling(stage: Stage) -> None:
    sleeper = Sleeper(stage, cross_family=False)
    sleeper.have(stage.named_backend("six", "::1").endpoint)
    assert ask(sleeper.address) == ""
    assert sleeper.asked_for == []


BOTH_FAMILIES = (ListenAddress("127.0.0.1", 0), ListenAddress("::1", 0))


def test_held_clients_wait_for_endpoints_of_their_own_family(stage: Stage) -> None:
    """Each family has slices of its own, which come one after the other."""
    sleeper = Sleeper(stage, listen=BOTH_FAMILIES, cross_family=False)
    client_4, client_6 = (stage.connect(address) for address in sleeper.proxy.addresses(sleeper.name))
    assert sleeper.holds(2)
    backend_4, backend_6 = stage.named_backend("four"), stage.named_backend("six", "::1")
    sleeper.have(backend_4.endpoint)
    assert client_4.receive_all() == b"four"
    assert client_6.hears_nothing(during=0.3)  # longer than until it tries again
    sleeper.have(backend_4.endpoint, backend_6.endpoint)
    assert client_6.receive_all() == b"six"
    assert sleeper.asked_for == [sleeper.name]


def test_a_family_that_gets_no_endpoints_is_given_up(stage: Stage) -> None:
    sleeper = Sleeper(stage, cross_family=False, hold_timeout_s=SHORT_S)
    client = stage.connect(sleeper.address)
    sleeper.have(stage.named_backend("six", "::1").endpoint)
    assert has_ended(client)
    assert ask(sleeper.address) == ""


def test_clients_from_outside_are_closed_when_no_endpoint_is_for_them(stage: Stage) -> None:
    """As with externalTrafficPolicy Local, where pods come up on other nodes."""
    outside = ListenAddress("127.0.0.1", 0, Scope.EXTERNAL)
    sleeper = Sleeper(stage, listen=(ListenAddress("127.0.0.1", 0), outside), cross_family=False)
    inside_client, outside_client = (stage.connect(address) for address in sleeper.proxy.addresses(sleeper.name))
    assert sleeper.holds(2)
    sleeper.have(stage.named_backend("a").endpoint, external_endpoints=())
    assert inside_client.receive_all() == b"a"
    assert has_ended(outside_client)


def test_a_changed_limit_and_time_out_count_at_once(sleeper: Sleeper, stage: Stage, variant: Any) -> None:
    clients = sleeper.held_clients(stage, 3)
    settings = variant.settings(max_held=2, hold_timeout_s=LONG_S)
    sleeper.proxy.reconfigure(settings)
    clients.append(stage.connect(sleeper.address))
    assert all(has_ended(client) for client in clients[:2])
    sleeper.proxy.reconfigure(variant.settings(hold_timeout_s=SHORT_S))
    assert all(has_ended(client) for client in clients[2:])
    assert eventually(lambda: sleeper.waking().expired == 2)


def kept_clients(sleeper: Sleeper, stage: Stage, count: int) -> list[Datagrams]:
    """Return clients that have sent their number, in this order."""
    clients = []
    for number in range(count):
        clients.append(stage.datagrams(to=sleeper.address))
        clients[-1].send(b"%d" % number)
        assert sleeper.holds(number + 1)
    return clients


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_datagrams_are_kept_and_passed_on_in_order_and_answered(stage: Stage, listen: str) -> None:
    sleeper = Sleeper(stage, protocol=UDP, listen=(ListenAddress(listen, 0),), udp_idle_timeout_s=30.0)
    client = stage.datagrams(to=("127.0.0.2" if listen == "0.0.0.0" else listen, sleeper.address.port))
    sent = [b"one", b"", b"three", b"four"]
    for data in sent:
        client.send(data)
    assert sleeper.holds(1)
    assert sleeper.proxy.counters().open_sessions == 0
    backend = stage.datagrams()
    sleeper.have(backend.endpoint)
    received = [backend.receive_from() for _ in sent]
    assert [data for data, _ in received] == sent
    assert len({session for _, session in received}) == 1
    backend.answer(b"answer", received[0][1])
    assert client.receive() == b"answer"
    client.send(b"five")
    assert backend.receive() == b"five"
    assert sleeper.asked_for == [sleeper.name]
    assert sleeper.proxy.counters().dropped_datagrams == 0


def test_kept_datagrams_wait_for_endpoints_of_their_own_family(stage: Stage) -> None:
    sleeper = Sleeper(stage, protocol=UDP, listen=BOTH_FAMILIES, cross_family=False)
    client = stage.datagrams("::1", to=sleeper.proxy.addresses(sleeper.name)[1])
    client.send(b"one")
    client.send(b"two")
    assert sleeper.holds(1)
    backend_4, backend_6 = stage.datagrams(), stage.datagrams("::1")
    sleeper.have(backend_4.endpoint)
    assert sleeper.holds(1)
    sleeper.have(backend_4.endpoint, backend_6.endpoint)
    assert [backend_6.receive(), backend_6.receive()] == [b"one", b"two"]
    assert sleeper.proxy.counters().dropped_datagrams == 0


def test_of_many_datagrams_the_last_ones_are_kept(stage: Stage) -> None:
    sleeper = Sleeper(stage, protocol=UDP)
    many, large = stage.datagrams(to=sleeper.address), stage.datagrams(to=sleeper.address)
    for number in range(20):
        many.send(b"%d" % number)
    for number in range(3):
        large.send(b"%d" % number * 30_000)
    assert eventually(lambda: sleeper.proxy.counters().dropped_datagrams == 5)
    backend = stage.datagrams()
    sleeper.have(backend.endpoint)
    received = [backend.receive() for _ in range(18)]
    assert received[:16] == [b"%d" % number for number in range(4, 20)]
    assert [data[:1] for data in received[16:]] == [b"1", b"2"]


def test_the_oldest_of_too_many_udp_clients_goes_first(stage: Stage) -> None:
    sleeper = Sleeper(stage, protocol=UDP, max_held=2)
    kept_clients(sleeper, stage, 2)
    stage.datagrams(to=sleeper.address).send(b"2")
    assert eventually(lambda: sleeper.waking().displaced == 1)
    backend = stage.datagrams()
    sleeper.have(backend.endpoint)
    assert [backend.receive(), backend.receive()] == [b"1", b"2"]
    assert sleeper.proxy.counters().dropped_datagrams == 1


def test_datagrams_are_dropped_in_the_end_and_the_next_one_asks_again(stage: Stage) -> None:
    sleeper = Sleeper(stage, protocol=UDP, hold_timeout_s=SHORT_S)
    (client,) = kept_clients(sleeper, stage, 1)
    assert eventually(lambda: sleeper.waking().expired == 1)
    assert sleeper.proxy.counters().dropped_datagrams == 1
    assert sleeper.asked_for == [sleeper.name]
    client.send(b"again")
    assert eventually(lambda: sleeper.asked_for == [sleeper.name] * 2)


def test_a_client_that_still_waits_begins_the_next_wake_up_when_it_sends_again(stage: Stage) -> None:
    sleeper = Sleeper(stage, protocol=UDP, hold_timeout_s=SHORT_S)
    kept_clients(sleeper, stage, 1)
    client = stage.datagrams(to=sleeper.address)

    def has_asked_again() -> bool:
        client.send(b"?")
        return len(sleeper.asked_for) >= 2

    assert eventually(has_asked_again)


@pytest.mark.parametrize("end", ["the service is removed", "it moves elsewhere", "the annotation goes"])
def test_kept_datagrams_go_with_what_they_waited_for(stage: Stage, end: str) -> None:
    sleeper = Sleeper(stage, protocol=UDP)
    kept_clients(sleeper, stage, 2)
    match end:
        case "the service is removed":
            sleeper.proxy.apply()
        case "it moves elsewhere":
            sleeper.have(listen=(ListenAddress("127.0.0.2", 0),))
        case _:
            sleeper.have(wakes_on_connect=False)
    assert sleeper.holds(0)
    assert sleeper.proxy.counters().dropped_datagrams == 2


def test_clients_of_an_idled_service_take_no_session_from_others(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_sessions": 1, "udp_idle_timeout_s": 30.0})
    backend = stage.answering_datagrams(bytes.upper)
    awake = a_service(backend.endpoint, name="awake", protocol=UDP)
    idled = a_service(name="idled", protocol=UDP, wakes=True)
    proxy.apply(awake, idled)
    served, kept = (stage.datagrams(to=proxy.addresses(each.name)[0]) for each in (awake, idled))
    served.send(b"a")
    assert served.receive() == b"A"
    kept.send(b"b")
    assert eventually(lambda: proxy.counters().waking.held_udp_clients == 1)
    assert (proxy.counters().open_sessions, proxy.counters().evicted_sessions) == (1, 0)


def test_sessions_of_a_service_that_falls_asleep_wait_too(stage: Stage) -> None:
    sleeper = Sleeper(stage, protocol=UDP, udp_idle_timeout_s=30.0)
    backend = stage.datagrams()
    sleeper.have(backend.endpoint)
    client = stage.datagrams(to=sleeper.address)
    client.send(b"awake")
    assert backend.receive() == b"awake"
    sleeper.have()
    client.send(b"asleep")
    assert sleeper.holds(1)
    sleeper.have(backend.endpoint)
    assert backend.receive() == b"asleep"
