"""TCP: which endpoint a client reaches, and what happens when one cannot be reached."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.traffic.conftest import RunningProxy, Stage, a_service, ask
from tests.traffic.peers import Peer, black_hole, eventually, refusing
from userspace_proxy import Endpoint, ListenAddress, NoEndpoints, RoundRobin, ServicePortName


def test_clients_are_spread_exactly(proxy: RunningProxy, stage: Stage) -> None:
    backends = [stage.named_backend(name) for name in "abcd"]
    address = proxy.serve(*(backend.endpoint for backend in backends))
    assert Counter(ask(address) for _ in range(40)) == dict.fromkeys("abcd", 10)
    assert {proxy.counters_of(backend.endpoint).connections for backend in backends} == {10}


def test_a_service_without_endpoints_closes_at_once_and_works_once_it_has_one(
    proxy: RunningProxy, stage: Stage
) -> None:
    """cases.md 9"""
    address = proxy.serve()
    began = time.monotonic()
    assert ask(address) == ""
    assert time.monotonic() - began < 1.0
    backend = stage.named_backend("a")
    began = time.monotonic()
    assert proxy.serve(backend.endpoint) == address
    assert ask(address) == "a"
    assert time.monotonic() - began < 1.0


def test_endpoints_that_are_not_in_the_snapshot_get_nothing(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 33"""
    ready, not_ready = stage.named_backend("ready"), stage.named_backend("not ready")
    address = proxy.serve(ready.endpoint)
    assert Counter(ask(address) for _ in range(100)) == {"ready": 100}
    assert not_ready.connections == 0


def test_an_endpoint_that_refuses_is_skipped_without_moving_the_turn(proxy: RunningProxy, stage: Stage) -> None:
    good = [stage.named_backend(name) for name in "abc"]
    with refusing() as bad:
        address = proxy.serve(bad, *(backend.endpoint for backend in good))
        answers = Counter(ask(address) for _ in range(40))
        # Each endpoint had the first pick ten times; the one after the bad one has its ten besides.
        assert sorted(answers.values()) == [10, 10, 20]
        assert proxy.counters_of(bad).dial_failures == 10
        assert proxy.counters_of(bad).connections == 0


def test_when_all_refuse_the_client_is_closed_after_four_attempts(proxy: RunningProxy, stage: Stage) -> None:
    with refusing() as one, refusing() as two:
        address = proxy.serve(one, two)
        began = time.monotonic()
        assert ask(address) == ""
        assert time.monotonic() - began < 1.0
        assert proxy.counters_of(one).dial_failures == proxy.counters_of(two).dial_failures == 2
    assert not proxy.counters().open_connections


def test_a_dial_failure_is_told_and_a_fault_in_being_told_harms_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    told = []

    def on_dial_failure(name: ServicePortName, endpoint: Endpoint) -> None:
        told.append((name, endpoint))
        raise RuntimeError("a fault of the user's")

    proxy = stage.proxy(on_dial_failure=on_dial_failure)
    good = stage.named_backend("good")
    with refusing() as bad:
        address = proxy.serve(bad, good.endpoint)
        assert [ask(address) for _ in range(4)] == ["good"] * 4
        assert told == [(ServicePortName("default", "web"), bad)] * 2
    assert "a fault of the user's" in caplog.text
    caplog.clear()


def test_an_unreachable_endpoint_delays_only_its_own_clients_by_250_ms(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 7"""
    good = stage.named_backend("good")
    with black_hole() as dark:
        address = proxy.serve(dark, good.endpoint)

        def timed_ask(_: int) -> tuple[str, float]:
            began = time.monotonic()
            return ask(address), time.monotonic() - began

        with ThreadPoolExecutor(20) as clients:
            answers = list(clients.map(timed_ask, range(20)))
        assert [name for name, _ in answers] == ["good"] * 20
        assert max(took for _, took in answers) < 1.0
        assert sum(took >= 0.24 for _, took in answers) == proxy.counters_of(dark).dial_failures == 10


def test_a_silent_endpoint_alone_is_tried_with_the_limits_of_the_ladder(stage: Stage) -> None:
    proxy = stage.proxy(settings={"dial_ladder_s": (0.05, 0.1, 0.2, 0.1)})
    with black_hole() as dark:
        address = proxy.serve(dark)
        began = time.monotonic()
        assert ask(address) == ""
        assert 0.4 < time.monotonic() - began < 1.0
        assert proxy.counters_of(dark).dial_failures == 4


def test_bytes_sent_during_the_dial_arrive(proxy: RunningProxy, stage: Stage) -> None:
    echo = stage.serving_backend()
    with black_hole() as dark:
        address = proxy.serve(dark, echo.endpoint)
        for _ in range(2):
            client = stage.connect(address)
            client.send(b"early")
            client.half_close()
            assert client.receive_all() == b"early"


def test_a_client_that_goes_during_the_dial_leaves_nothing(proxy: RunningProxy, stage: Stage) -> None:
    with black_hole() as dark:
        address = proxy.serve(dark)
        with Peer.connect(address) as client:
            client.send(b"x")
        Peer.connect(address).reset()
        assert eventually(lambda: proxy.counters_of(dark).dial_failures >= 2)
    # The proxy stops in mid-dial; the stage checks that nothing is left.


def test_clients_of_one_address_stay_with_one_endpoint_also_after_scaling_to_zero_and_back(
    proxy: RunningProxy, stage: Stage
) -> None:
    """cases.md 16"""
    backends = [stage.named_backend(name).endpoint for name in "ab"]
    proxy.serve(affinity_s=10800)
    address = proxy.serve(*backends, affinity_s=10800)
    assert len({ask(address) for _ in range(100)}) == 1
    proxy.serve(affinity_s=10800)
    assert ask(address) == ""
    proxy.serve(*backends, affinity_s=10800)
    assert len({ask(address) for _ in range(100)}) == 1


def test_a_shorter_affinity_time_out_counts_at_once_and_touches_no_connection(
    proxy: RunningProxy, stage: Stage
) -> None:
    """cases.md 20"""
    backends = [stage.named_backend(name).endpoint for name in "ab"]
    address = proxy.serve(*backends, affinity_s=10800)
    listener = proxy.listener()
    established = stage.connect(address)
    first = established.receive(1).decode()
    assert {ask(address) for _ in range(3)} == {first}
    pinned_at = time.monotonic()
    assert proxy.serve(*backends, affinity_s=0.3) == address
    assert eventually(lambda: time.monotonic() - pinned_at > 0.3)
    assert ask(address) != first
    assert proxy.listener() is listener
    assert established.hears_nothing(during=1.0) is False  # its end, which the backend had sent
    assert proxy.serve(*backends) == address
    assert {ask(address), ask(address)} == {"a", "b"}
    assert proxy.serve(*backends, affinity_s=10800) == address
    assert len({ask(address) for _ in range(4)}) == 1


def test_only_clients_of_a_removed_endpoint_move(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 22"""
    backends = {name: stage.named_backend(name).endpoint for name in "ABC"}
    address = proxy.serve(*backends.values(), affinity_s=10800)
    clients = [f"127.0.0.{last}" for last in range(1, 10)]
    before = {client: ask(address, source=client) for client in clients}
    assert Counter(before.values()) == {"A": 3, "B": 3, "C": 3}
    proxy.serve(backends["A"], backends["C"], affinity_s=10800)
    after = {client: ask(address, source=client) for client in clients}
    assert after == {client: ask(address, source=client) for client in clients}
    for client in clients:
        assert after[client] == before[client] if before[client] != "B" else after[client] in "AC"


def test_a_failed_dial_moves_the_affinity(proxy: RunningProxy, stage: Stage) -> None:
    names = {name: stage.named_backend(name) for name in "abc"}
    address = proxy.serve(*(backend.endpoint for backend in names.values()), affinity_s=10800)
    pinned = ask(address)
    names[pinned].close()
    moved = ask(address)
    assert moved != pinned
    assert {ask(address) for _ in range(5)} == {moved}


def test_established_connections_survive_the_removal_of_endpoint_and_service(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    proxy.serve()
    proxy.apply()
    client.send(b"still")
    assert backend.receive(5) == b"still"
    backend.send(b"here")
    assert client.receive(4) == b"here"
    assert proxy.counters().open_connections == 1
    client.close()
    assert backend.receive_all() == b""


def test_the_filter_drops_endpoints_and_what_it_raises_changes_nothing(stage: Stage) -> None:
    allowed, forbidden = stage.named_backend("allowed"), stage.named_backend("forbidden")
    is_broken = False

    def may_use(name: ServicePortName, endpoint: Endpoint) -> bool:
        if is_broken:
            raise LookupError("no policy")
        return endpoint == allowed.endpoint

    proxy = stage.proxy(endpoint_filter=may_use)
    address = proxy.serve(forbidden.endpoint, allowed.endpoint)
    assert {ask(address) for _ in range(4)} == {"allowed"}
    is_broken = True
    with pytest.raises(LookupError):
        proxy.serve(forbidden.endpoint)
    assert ask(address) == "allowed"
    assert forbidden.connections == 0


class Last:
    """Always the last endpoint of those it was given."""

    def update(self, endpoints: Sequence[Endpoint], session_affinity_s: float | None) -> None:
        self.endpoints = sorted(endpoints)

    def pick(self, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Endpoint:
        if not self.endpoints:
            raise NoEndpoints
        return self.endpoints[-1]


class Faulty(Last):
    """Raises on demand."""

    faults: frozenset[str] = frozenset()

    def update(self, endpoints: Sequence[Endpoint], session_affinity_s: float | None) -> None:
        if "update" in self.faults:
            raise ZeroDivisionError("a fault in update")
        super().update(endpoints, session_affinity_s)

    def pick(self, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Endpoint:
        if "pick" in self.faults:
            raise ZeroDivisionError("a fault in pick")
        if "stranger" in self.faults:
            return Endpoint("192.0.2.1", 1)
        return super().pick(client, now=now, tried=tried)


@pytest.mark.in_this_process("a balancer of one's own cannot be passed to another process")
def test_a_balancer_of_ones_own_chooses(stage: Stage) -> None:
    proxy = stage.proxy(balancer=Last)
    backends = {stage.named_backend(name).endpoint: name for name in "abc"}
    address = proxy.serve(*backends)
    assert {ask(address) for _ in range(5)} == {backends[max(backends)]}


@pytest.mark.in_this_process("a balancer of one's own cannot be passed to another process")
@pytest.mark.parametrize("fault", ["pick", "stranger"])
def test_a_fault_of_the_balancer_closes_the_client_and_nothing_else(
    stage: Stage, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    balancer = Faulty()
    proxy = stage.proxy(balancer=lambda: balancer)
    address = proxy.serve(stage.named_backend("a").endpoint)
    balancer.faults = frozenset({fault})
    with proxy.held():  # all of them in one batch: none may be forgotten
        clients = [stage.connect(address) for _ in range(5)]
    assert [client.receive_all() for client in clients] == [b""] * 5
    balancer.faults = frozenset()
    assert ask(address) == "a"
    assert fault != "pick" or "a fault in pick" in caplog.text
    caplog.clear()


@pytest.mark.in_this_process("a balancer of one's own cannot be passed to another process")
def test_a_balancer_that_cannot_take_an_update_leaves_the_other_services_alone(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    balancers: list[Faulty] = []

    def make_balancer() -> Faulty:
        balancers.append(Faulty())
        return balancers[-1]

    proxy = stage.proxy(balancer=make_balancer)
    one, two = stage.named_backend("one").endpoint, stage.named_backend("two").endpoint
    proxy.apply(a_service(one, name="first"), a_service(one, name="second"))
    addresses = [proxy.addresses(ServicePortName("default", name))[0] for name in ("first", "second")]
    balancers[0].faults = frozenset({"update"})
    proxy.apply(a_service(two, name="first"), a_service(two, name="second"))
    assert [ask(address) for address in addresses] == ["", "two"]
    assert "a fault in update" in caplog.text
    caplog.clear()
    proxy.apply(a_service(one, name="first"), a_service(one, name="second"))
    assert [ask(address) for address in addresses] == ["one", "one"]


def test_two_hundred_shuffles_start_at_each_endpoint_about_as_often() -> None:
    """cases.md 25"""
    endpoints = [Endpoint("10.0.0.1", port) for port in range(1, 5)]
    first: Counter[Endpoint] = Counter()
    for _ in range(200):
        balancer = RoundRobin()
        balancer.update(endpoints, None)
        picks = [balancer.pick("127.0.0.1", now=0.0) for _ in range(8)]
        assert set(picks[:4]) == set(picks[4:]) == set(endpoints)
        first[picks[0]] += 1
    assert all(30 <= first[endpoint] <= 70 for endpoint in endpoints)


def test_an_ipv6_client_reaches_ipv6_endpoints_and_an_ipv4_client_ipv4_ones(proxy: RunningProxy, stage: Stage) -> None:
    four, six = stage.named_backend("four"), stage.named_backend("six", "::1")
    both = (ListenAddress("127.0.0.1", 0), ListenAddress("::1", 0))
    service = a_service(four.endpoint, six.endpoint, listen=both)
    assert proxy.apply(service) == {}
    v4, v6 = proxy.addresses(service.name)
    assert {ask(v4) for _ in range(4)} == {"four"}
    assert {ask(v6) for _ in range(4)} == {"six"}
    proxy.apply(a_service(four.endpoint, listen=both))
    assert {ask(v4), ask(v6)} == {"four"}


def test_clients_of_one_family_are_closed_where_crossing_is_off(stage: Stage) -> None:
    proxy = stage.proxy(settings={"cross_family": False})
    address = proxy.serve(stage.named_backend("four").endpoint, listen=(ListenAddress("::1", 0),))
    assert ask(address) == ""


def test_one_warning_tells_of_many_connections_that_could_not_be_served(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    address = proxy.serve()
    for _ in range(20):
        assert ask(address) == ""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "default/web (TCP)" in warnings[0].getMessage()


def test_the_other_family_is_tried_when_none_of_its_own_answers(proxy: RunningProxy, stage: Stage) -> None:
    """A name such as localhost stands for addresses of both families, and a server may listen on just one."""
    closed = stage.backend()
    nobody = closed.endpoint
    closed.close()
    there = stage.named_backend("there", "::1").endpoint
    address = proxy.serve(nobody, there)
    assert [ask(address) for _ in range(3)] == ["there"] * 3
