"""Workers: turns and affinity over all of them, and what is lost, and what is not, when one of them ends or hangs."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import pytest

from tests.traffic.conftest import WORKER_VARIANTS, RunningProxy, Stage, Variant, a_service, ask, process_state, stopped
from tests.traffic.peers import Peer, eventually, refusing
from userspace_proxy import Endpoint, L4Protocol, NoEndpoints
from userspace_proxy.dataplane import worker_keeper, workers

UDP = L4Protocol.UDP


@pytest.fixture(params=WORKER_VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_keeper, "HEARTBEAT_S", 0.02)


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def relayed_pairs(proxy: RunningProxy, stage: Stage, count: int) -> list[tuple[Peer, Peer]]:
    """So many clients, and the backend's ends of their connections, which are relayed."""
    backend = stage.backend()
    address = proxy.serve(backend.endpoint)
    pairs = []
    for _ in range(count):
        client = stage.connect(address)
        pairs.append((client, backend.accept()))
    assert eventually(lambda: proxy.counters().open_connections == count)
    return pairs


def open_by_worker(proxy: RunningProxy) -> list[int]:
    return [worker.open_connections for worker in proxy.counters().workers]


def warnings_about(worker: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message for message in messages if message.startswith(worker)]


def restarts(proxy: RunningProxy) -> int:
    return sum(worker.restarts for worker in proxy.counters().workers)


def test_turns_are_exact_over_all_workers_and_each_has_as_many_connections(proxy: RunningProxy, stage: Stage) -> None:
    backends = {name: stage.serving_backend() for name in "abc"}
    address = proxy.serve(*(backend.endpoint for backend in backends.values()))
    clients = [stage.connect(address) for _ in range(30)]
    for client in clients:
        client.send(b"hello")
        assert client.receive(5) == b"hello"
    assert {proxy.counters_of(backend.endpoint).open_connections for backend in backends.values()} == {10}
    assert open_by_worker(proxy) == [15, 15]


def test_affinity_holds_over_all_workers_and_moves_for_all_when_a_dial_fails(proxy: RunningProxy, stage: Stage) -> None:
    backends = {name: stage.named_backend(name) for name in "abc"}
    address = proxy.serve(*(backend.endpoint for backend in backends.values()), affinity_s=10800)
    pinned = ask(address)
    assert {ask(address) for _ in range(10)} == {pinned}
    backends[pinned].close()
    moved = ask(address)
    assert moved != pinned
    assert {ask(address) for _ in range(10)} == {moved}


def test_a_worker_that_dies_takes_only_its_own_connections_with_it_and_is_replaced(
    proxy: RunningProxy, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = relayed_pairs(proxy, stage, 10)
    for client, server in pairs:
        client.send(b"12345")
        assert server.receive(5) == b"12345"
    before = proxy.counters()
    victim, survivor = proxy.worker_processes()
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: restarts(proxy) == 1)
    after = proxy.counters()
    assert after.open_connections == after.total.open_connections == 5
    assert after.limits.admitted_connections == 5
    assert after.total.connections == before.total.connections == 10
    assert after.total.bytes_to_endpoint == 50
    alive = [(client, server) for client, server in pairs if client.hears_nothing(during=0.01) is not False]
    assert len(alive) == 5
    for client, server in alive:
        server.send(b"still here")
        assert client.receive(10) == b"still here"
    assert f"worker-0 (process {victim}) was ended by signal 9, and its 5 connections with it" in caplog.text
    assert eventually(lambda: all(link.is_ready for link in proxy.plane._workers._links))  # type: ignore[union-attr]
    assert survivor in proxy.worker_processes()
    assert victim not in proxy.worker_processes()
    address = proxy.serve(stage.named_backend("a").endpoint)
    assert {ask(address) for _ in range(10)} == {"a"}
    caplog.clear()


@pytest.mark.usefixtures("quick_heartbeat")
def test_a_stuck_worker_gets_no_more_connections_and_goes_on_when_it_answers_again(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = stage.proxy()
    ((client, server), *_) = relayed_pairs(proxy, stage, 2)
    address = proxy.serve(stage.named_backend("a").endpoint)
    monkeypatch.setattr(worker_keeper, "STUCK_AFTER_S", 0.5)
    with stopped(proxy.worker_processes()[0]):
        assert eventually(lambda: warnings_about("worker-0", caplog))
        assert {ask(address) for _ in range(10)} == {"a"}
        assert proxy.counters().open_connections >= 2
    assert eventually(lambda: "worker-0 answers again" in caplog.text)
    (warning,) = warnings_about("worker-0", caplog)[:-1]
    assert "gets no more connections until it does" in warning
    client.send(b"hello")
    assert server.receive(5) == b"hello"
    assert restarts(proxy) == 0


@pytest.mark.usefixtures("quick_heartbeat")
def test_a_worker_that_stays_stuck_is_replaced(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = stage.proxy()
    pairs = relayed_pairs(proxy, stage, 4)
    victim = proxy.worker_processes()[0]
    with monkeypatch.context() as patched:
        patched.setattr(worker_keeper, "STUCK_AFTER_S", 0.5)
        patched.setattr(worker_keeper, "REPLACED_AFTER_S", 1.5)
        os.kill(victim, signal.SIGSTOP)
        assert eventually(lambda: "is ended" in caplog.text)
    assert restarts(proxy) == 1
    assert is_gone(victim)
    assert "it is ended, and its 2 connections with it" in caplog.text
    assert proxy.counters().open_connections == 2
    ended = [client for client, _ in pairs if not client.hears_nothing(during=0.01)]
    assert len(ended) == 2


def test_a_proxy_that_stood_still_itself_blames_no_worker(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_keeper, "STUCK_AFTER_S", 1.0)
    proxy = stage.proxy()
    proxy.serve(stage.named_backend("a").endpoint)
    with proxy.held():
        assert not eventually(lambda: False, within=1.5)
    proxy.counters()
    assert "has not answered" not in caplog.text


def test_a_udp_service_port_goes_on_when_its_worker_dies(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 60.0})
    backends = [stage.answering_datagrams(bytes) for _ in range(2)]
    address = proxy.serve(*(backend.endpoint for backend in backends), protocol=UDP)
    clients = [stage.datagrams(to=address) for _ in range(4)]
    for client in clients:
        client.send(b"before")
        assert client.receive() == b"before"
    before = proxy.counters()
    assert (before.open_sessions, before.total.open_sessions) == (4, 4)
    serving = [worker.open_sessions for worker in before.workers].index(4)
    os.kill(proxy.worker_processes()[serving], signal.SIGKILL)
    assert eventually(lambda: restarts(proxy) == 1)
    after = proxy.counters()
    assert (after.open_sessions, after.total.open_sessions, after.total.sessions) == (0, 0, 4)
    for client in clients:
        client.send(b"after")
        assert client.receive() == b"after"
    assert proxy.counters().total.sessions == 8
    proxy.apply()
    assert proxy.counters().open_sessions == 0
    caplog.clear()


def test_udp_service_ports_are_spread_over_the_workers(stage: Stage) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 60.0})
    backend = stage.answering_datagrams(bytes)
    services = [a_service(backend.endpoint, name=f"dns-{number}", protocol=UDP) for number in range(4)]
    assert proxy.apply(*services) == {}
    for service in services:
        client = stage.datagrams(to=proxy.addresses(service.name)[0])
        client.send(b"?")
        assert client.receive() == b"?"
    assert [worker.open_sessions for worker in proxy.counters().workers] == [2, 2]


class First:
    """Always the first endpoint in order, and it cannot leave its process."""

    def update(self, endpoints: Sequence[Endpoint], session_affinity_s: float | None) -> None:
        self.endpoints = sorted(endpoints)

    def pick(self, client: str, *, now: float, tried: Sequence[Endpoint] = ()) -> Endpoint:
        if not self.endpoints:
            raise NoEndpoints
        return self.endpoints[0]


def test_a_balancer_of_ones_own_balances_datagrams_too(stage: Stage) -> None:
    proxy = stage.proxy(balancer=First)
    backends = [stage.answering_datagrams(bytes) for _ in range(3)]
    address = proxy.serve(*(backend.endpoint for backend in backends), protocol=UDP)
    for _ in range(5):
        client = stage.datagrams(to=address)
        client.send(b"?")
        assert client.receive() == b"?"
    first = min(backends, key=lambda backend: backend.endpoint)
    assert len(first.received) == 5


def test_workers_that_cannot_start_are_tried_again_and_traffic_passes_without_them(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        proxy = stage.proxy()
        address = proxy.serve(stage.named_backend("a").endpoint)
        assert {ask(address) for _ in range(4)} == {"a"}
        assert eventually(lambda: restarts(proxy) >= 4)
        assert "has ended with exit status 1" in caplog.text
    assert eventually(lambda: all(worker.resident_bytes for worker in proxy.counters().workers), within=5.0)
    assert {ask(address) for _ in range(4)} == {"a"}


def test_no_worker_is_left_behind(stage: Stage) -> None:
    proxy = stage.proxy()
    relayed_pairs(proxy, stage, 4)
    process_ids = proxy.worker_processes()
    assert [process_state(process_id) in "SR" for process_id in process_ids] == [True, True]
    proxy.stop()
    assert all(map(is_gone, process_ids))


def test_workers_ignore_the_signals_that_are_for_the_proxy(proxy: RunningProxy, stage: Stage) -> None:
    address = proxy.serve(stage.named_backend("a").endpoint)
    assert ask(address) == "a"
    for process_id in proxy.worker_processes():
        os.kill(process_id, signal.SIGTERM)
        os.kill(process_id, signal.SIGINT)
    assert {ask(address) for _ in range(4)} == {"a"}
    assert restarts(proxy) == 0


def test_clients_wait_for_room_in_the_workers_as_for_descriptors(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_max_clients", lambda: 5)
    proxy = stage.proxy()
    backend = stage.serving_backend()
    address = proxy.serve(backend.endpoint)
    clients = [stage.connect(address) for _ in range(15)]
    for client in clients[:10]:
        client.send(b"hello")
        assert client.receive(5) == b"hello"
    clients[10].send(b"hello")
    assert clients[10].hears_nothing(during=0.2)
    assert open_by_worker(proxy) == [5, 5]
    for client in clients[:5]:
        client.close()
    for client in clients[10:]:
        client.send(b"hello")
        assert client.receive(5) == b"hello"
    assert caplog.text.count("no connection is accepted until others are closed") == 1


def test_what_a_worker_logs_is_in_the_log_of_the_proxy(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="userspace_proxy"):
        proxy = stage.proxy()
        backend = stage.named_backend("a")
        assert ask(proxy.serve(backend.endpoint)) == "a"
        assert eventually(lambda: f"is connected to {backend.endpoint}" in caplog.text)


def test_targets_that_have_no_clients_any_more_are_forgotten(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_keeper, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(worker_keeper, "_FORGET_AFTER_BEATS", 2)
    proxy = stage.proxy()
    backend = stage.named_backend("a")
    with refusing() as bad:
        address = proxy.serve(bad, backend.endpoint)
        assert [ask(address) for _ in range(6)] == ["a"] * 6
        links = proxy.plane._workers._links  # type: ignore[union-attr]
        assert eventually(lambda: not any(link._served for link in links))
        assert [ask(address) for _ in range(6)] == ["a"] * 6
        assert proxy.counters_of(backend.endpoint).connections == 12
        assert proxy.counters_of(bad).dial_failures == 6


@pytest.mark.usefixtures("quick_heartbeat")
def test_a_stuck_worker_that_answers_again_is_not_blamed_for_endpoints_that_have_changed_meanwhile(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 60.0})
    backends = [stage.answering_datagrams(bytes) for _ in range(4)]
    address = proxy.serve(backends[0].endpoint, protocol=UDP)
    client = stage.datagrams(to=address)
    client.send(b"before")
    assert client.receive() == b"before"
    serving = [worker.open_sessions for worker in proxy.counters().workers].index(1)
    monkeypatch.setattr(worker_keeper, "STUCK_AFTER_S", 0.5)
    with stopped(proxy.worker_processes()[serving]):
        assert eventually(lambda: warnings_about(f"worker-{serving}", caplog))
        for backend in backends[1:]:
            proxy.serve(backend.endpoint, protocol=UDP)
    assert eventually(lambda: f"worker-{serving} answers again" in caplog.text)
    client.send(b"after")
    assert client.receive() == b"after"
    counted = proxy.counters()
    assert (counted.open_sessions, counted.total.open_sessions, counted.total.sessions) == (1, 1, 2)
    assert restarts(proxy) == 0
