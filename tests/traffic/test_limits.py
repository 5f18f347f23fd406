"""TCP: how many connections there may be, how long they last when nothing happens, and what is told of that."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.traffic.conftest import RunningProxy, Stage, a_service
from tests.traffic.peers import Peer, black_hole, echo, eventually, hold, refusing
from userspace_proxy import DataPlaneSettings, Endpoint, LimitCounters, ListenAddress
from userspace_proxy.dataplane import dial
from userspace_proxy.dataplane.side import Side
from userspace_proxy.dataplane.sockets import borrowed

BULK = b"x" * (1 << 20)
MAX_FEW = {"max_connections": 3}
MAX_FEW_EACH = {"max_connections_per_service_port": 3}


def limits(proxy: RunningProxy) -> LimitCounters:
    return proxy.counters().limits


def is_paused(proxy: RunningProxy, wanted: bool) -> bool:
    return limits(proxy).paused_listeners == wanted


def reconfigure(proxy: RunningProxy, **changed: Any) -> None:
    settings = replace(proxy.proxy._settings, **changed)
    proxy.reconfigure(settings)


def is_served(client: Peer) -> bool:
    """Tell whether its echo comes back within a moment; one that waits has sent its bytes all the same."""
    return not client.hears_nothing(during=0.05)


def served(clients: list[list[Peer]]) -> list[int]:
    """Return how many of each group of clients are served."""
    return [sum(map(is_served, group)) for group in clients]


def speaking_clients(stage: Stage, address: ListenAddress, count: int) -> list[Peer]:
    clients = [stage.connect(address) for _ in range(count)]
    for client in clients:
        client.send(b"hi")
    return clients


def serve_two(proxy: RunningProxy, stage: Stage) -> tuple[ListenAddress, ListenAddress]:
    services = [a_service(stage.serving_backend(echo).endpoint, name=name) for name in ("one", "other")]
    assert proxy.apply(*services) == {}
    one, other = (proxy.addresses(service.name)[0] for service in services)
    return one, other


def warnings(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in texts if part in text]


@pytest.mark.parametrize("settings", [MAX_FEW, MAX_FEW_EACH], ids=["total", "per service port"])
def test_clients_beyond_the_limit_wait_and_are_served_one_for_each_that_goes(
    stage: Stage, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    proxy = stage.proxy(settings=settings)
    clients = speaking_clients(stage, proxy.serve(stage.serving_backend().endpoint), 10)
    waiting = clients
    for closed in range(8):
        admitted = 1 if closed else 3
        assert [client.receive(2) for client in waiting[:admitted]] == [b"hi"] * admitted
        waiting = waiting[admitted:]
        assert not any(map(is_served, waiting[:2]))
        assert limits(proxy).admitted_connections == 3
        assert eventually(partial(is_paused, proxy, bool(waiting)))
        clients[closed].close()
    assert not waiting
    assert eventually(lambda: limits(proxy).admitted_connections == 2)
    assert len(warnings(caplog, "at the limit of 3 connections") + warnings(caplog, "at its limit of 3")) == 1
    reached = limits(proxy).max_connections_reached, limits(proxy).max_connections_per_service_port_reached
    assert reached == ((1, 0) if settings == MAX_FEW else (0, 1))


def test_a_limit_that_is_just_reached_pauses_nobody(stage: Stage) -> None:
    proxy = stage.proxy(settings={**MAX_FEW, **MAX_FEW_EACH})
    clients = speaking_clients(stage, proxy.serve(stage.serving_backend().endpoint), 3)
    assert all(client.receive(2) == b"hi" for client in clients)
    assert limits(proxy) == LimitCounters(max_connections=3, max_connections_per_service_port=3, admitted_connections=3)


def test_the_limit_of_one_service_port_does_not_concern_another(stage: Stage) -> None:
    proxy = stage.proxy(settings=MAX_FEW_EACH)
    one, other = serve_two(proxy, stage)
    speaking_clients(stage, one, 10)
    assert eventually(lambda: limits(proxy).paused_listeners == 1)
    assert [client.receive(2) for client in speaking_clients(stage, other, 3)] == [b"hi"] * 3


def test_all_listeners_of_a_service_port_share_its_limit(stage: Stage) -> None:
    proxy = stage.proxy(settings=MAX_FEW_EACH)
    listen = (ListenAddress("127.0.0.1", 0), ListenAddress("127.0.0.2", 0))
    service = a_service(stage.serving_backend().endpoint, listen=listen)
    assert proxy.apply(service) == {}
    first, second = proxy.addresses(service.name)
    clients = speaking_clients(stage, first, 3)
    assert all(client.receive(2) == b"hi" for client in clients)
    (waiting,) = speaking_clients(stage, second, 1)
    assert not is_served(waiting)
    clients[0].close()
    assert waiting.receive(2) == b"hi"


def test_room_in_total_goes_to_service_ports_in_turn(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_connections": 4})
    addresses = serve_two(proxy, stage)
    holders = speaking_clients(stage, addresses[0], 4)
    assert all(client.receive(2) == b"hi" for client in holders)
    waiting = [speaking_clients(stage, address, 8) for address in addresses]
    assert eventually(lambda: limits(proxy).paused_listeners == 2)
    for client in holders:
        client.close()
    assert eventually(lambda: proxy.counters().total.connections == 8)
    assert eventually(lambda: served(waiting) == [2, 2])
    assert limits(proxy).admitted_connections == 4


def test_many_places_that_become_free_at_once_are_shared_out_evenly_and_all_used(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_connections": 10})
    addresses = serve_two(proxy, stage)
    holders = speaking_clients(stage, addresses[0], 10)
    assert all(client.receive(2) == b"hi" for client in holders)
    waiting = [speaking_clients(stage, address, 12) for address in addresses]
    assert eventually(lambda: limits(proxy).paused_listeners == 2)
    with proxy.held():
        for client in holders:
            client.close()
    assert eventually(lambda: proxy.counters().total.connections == 20)
    assert limits(proxy).admitted_connections == 10
    assert eventually(lambda: served(waiting) == [5, 5])


@pytest.mark.parametrize("raised", [{"max_connections": 8}, {"max_connections": 0}], ids=["raised", "none"])
def test_a_raised_limit_lets_those_in_who_wait(stage: Stage, raised: dict[str, int]) -> None:
    proxy = stage.proxy(settings=MAX_FEW)
    clients = speaking_clients(stage, proxy.serve(stage.serving_backend().endpoint), 8)
    assert [client.receive(2) for client in clients[:3]] == [b"hi"] * 3
    assert not is_served(clients[3])
    reconfigure(proxy, **raised)
    assert [client.receive(2) for client in clients[3:]] == [b"hi"] * 5


def test_a_lowered_limit_ends_nobody_and_lets_nobody_in_before_enough_have_gone(stage: Stage) -> None:
    proxy = stage.proxy()
    address = proxy.serve(stage.serving_backend().endpoint)
    clients = speaking_clients(stage, address, 5)
    assert [client.receive(2) for client in clients] == [b"hi"] * 5
    reconfigure(proxy, max_connections_per_service_port=2)
    (late,) = speaking_clients(stage, address, 1)
    for client in clients[:3]:
        assert not is_served(late)
        client.close()
    assert eventually(lambda: limits(proxy).admitted_connections == 2)
    assert not is_served(late)
    clients[3].close()
    assert late.receive(2) == b"hi"
    clients[4].send(b"ho")
    assert clients[4].receive(2) == b"ho"


def test_a_connection_that_is_dialled_counts_and_gives_its_place_back_when_it_fails(stage: Stage) -> None:
    proxy = stage.proxy(settings={"max_connections": 1, "dial_ladder_s": (0.3,)})
    with black_hole() as dark:
        address = proxy.serve(dark)
        first, second = stage.connect(address), stage.connect(address)
        assert eventually(lambda: limits(proxy).admitted_connections == limits(proxy).paused_listeners == 1)
        assert second.hears_nothing(during=0.05)
        assert first.receive_all() == b""
        assert second.receive_all() == b""
    assert limits(proxy).abandoned_connections == 2
    assert eventually(lambda: limits(proxy).admitted_connections == 0)


def test_clients_that_wait_for_a_service_that_refuses_are_all_closed_in_the_end(stage: Stage) -> None:
    """Each failure makes the next place at once: that must not pile up."""
    proxy = stage.proxy(settings={"max_connections": 1})
    with refusing() as bad:
        address = proxy.serve(bad)
        with proxy.held():
            clients = [stage.connect(address) for _ in range(300)]
        assert all(client.receive_all() == b"" for client in clients)
    assert limits(proxy).abandoned_connections == 300
    assert limits(proxy).admitted_connections == 0


def test_a_paused_listener_can_be_closed_and_its_connections_still_count(stage: Stage) -> None:
    proxy = stage.proxy(settings=MAX_FEW)
    backend = stage.serving_backend()
    clients = speaking_clients(stage, proxy.serve(backend.endpoint), 5)
    assert [client.receive(2) for client in clients[:3]] == [b"hi"] * 3
    assert eventually(lambda: limits(proxy).paused_listeners == 1)
    proxy.apply()
    assert limits(proxy) == replace(limits(proxy), paused_listeners=0, admitted_connections=3)
    (late,) = speaking_clients(stage, proxy.serve(backend.endpoint), 1)
    assert not is_served(late)
    clients[0].close()
    assert late.receive(2) == b"hi"


def test_the_backlog_is_as_long_as_is_set_also_later(stage: Stage) -> None:
    proxy = stage.proxy(settings={"listen_backlog": 2, "max_connections": 1})
    address = proxy.serve(stage.serving_backend(hold).endpoint)
    stage.connect(address)
    assert eventually(lambda: limits(proxy).admitted_connections == 1)
    for _ in range(3):  # Linux: one more than is set
        stage.connect(address)
    with pytest.raises(TimeoutError):
        Peer.connect(address, timeout=0.2)
    reconfigure(proxy, listen_backlog=10)
    for _ in range(5):
        stage.connect(address)


def test_a_connection_on_which_nothing_moves_ends_on_both_sides(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    proxy = stage.proxy(settings={"tcp_idle_timeout_s": 0.3})
    client, server = stage.connected_pair(proxy)
    for _ in range(5):
        client.send(b"tick")
        assert server.receive(4) == b"tick"
        assert client.hears_nothing(during=0.1)
    # Without a reset the end would look like that of a message.
    assert client.receive_until_reset() == server.receive_until_reset() == b""
    assert limits(proxy).idle_timeouts == 1
    assert eventually(proxy.is_idle)
    assert len(warnings(caplog, "silent for 0.3 s")) == 1


def test_a_half_closed_connection_that_idles_ends_with_a_reset_only_where_no_end_was_sent(stage: Stage) -> None:
    proxy = stage.proxy(settings={"tcp_idle_timeout_s": 0.3})
    client, server = stage.connected_pair(proxy)
    client.half_close()
    assert server.receive_all() == b""
    assert client.receive_until_reset() == b""
    assert eventually(proxy.is_idle)


def test_a_peer_that_takes_its_bytes_slowly_is_not_idle(stage: Stage) -> None:
    """What it has not taken yet is in the kernel's buffers, so the proxy itself reads and writes nothing."""
    proxy = stage.proxy(settings={"tcp_idle_timeout_s": 0.6})
    client, server = stage.connected_pair(proxy, receive_buffer=4096)
    server.send(BULK[:200_000])
    received = 0
    for _ in range(20):
        time.sleep(0.1)
        received += len(client.receive(4096))
    assert received + len(client.receive(200_000 - received)) == 200_000


def test_a_peer_that_takes_nothing_more_is_idle(stage: Stage) -> None:
    proxy = stage.proxy(settings={"tcp_idle_timeout_s": 0.3})
    client, server = stage.connected_pair(proxy)
    server.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        server.send(BULK * 20)
    assert eventually(lambda: limits(proxy).idle_timeouts == 1)
    assert BULK.startswith(client.receive_until_reset()[:1])


def test_an_idle_time_out_can_be_set_and_taken_back_while_connections_are_open(stage: Stage) -> None:
    proxy = stage.proxy()
    client, _ = stage.connected_pair(proxy)
    reconfigure(proxy, tcp_idle_timeout_s=0.2)
    reconfigure(proxy, tcp_idle_timeout_s=0.0)
    assert client.hears_nothing(during=0.5)
    reconfigure(proxy, tcp_idle_timeout_s=0.2)
    assert client.receive_until_reset() == b""


def test_a_thousand_idle_connections_end_with_one_line_in_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = stage.proxy(settings={"tcp_idle_timeout_s": 0.5})
    address = proxy.serve(stage.serving_backend(hold).endpoint)
    clients = [stage.connect(address) for _ in range(1000)]
    for client in clients:
        assert client.receive_until_reset() == b""
    assert limits(proxy).idle_timeouts == 1000
    assert len(warnings(caplog, "silent for")) == 1


def test_a_half_close_time_out_that_is_changed_counts_for_open_connections(stage: Stage) -> None:
    proxy = stage.proxy()
    client, server = stage.connected_pair(proxy)
    reconfigure(proxy, half_close_timeout_s=0.2)
    client.half_close()
    assert server.receive_all() == b""
    assert client.receive_until_reset() == b""


def test_a_peer_that_takes_nothing_for_the_user_time_out_is_given_up(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = stage.proxy(settings={"tcp_user_timeout_s": 0.3})
    client, server = stage.connected_pair(proxy, receive_buffer=4096)
    server.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        server.send(BULK * 20)
    assert eventually(lambda: limits(proxy).peer_timeouts == 1)
    assert server.receive_until_reset() == b""
    assert eventually(proxy.is_idle)
    assert len(warnings(caplog, "not acknowledged by a peer any more")) == 1
    client.close()


@pytest.mark.in_this_process("looks at the sockets", without_workers=True)
def test_both_sockets_of_a_connection_have_the_user_time_out(stage: Stage) -> None:
    proxy = stage.proxy(settings={"tcp_user_timeout_s": 1.5})
    backend = stage.serving_backend()
    address = proxy.serve(backend.endpoint)
    expected = []
    for timeout_ms in (1500, 2500, 0):
        reconfigure(proxy, tcp_user_timeout_s=timeout_ms / 1000)
        client = stage.connect(address)
        client.send(b"hi")
        assert client.receive(2) == b"hi"
        expected.append((timeout_ms, timeout_ms))

    def user_timeouts() -> list[tuple[int, int]]:
        return [(_user_timeout(side), _user_timeout(side.peer)) for side in proxy.plane._engine.relay._targets]

    assert proxy.call(user_timeouts) == expected


def test_an_endpoint_that_only_the_dial_itself_answers_counts_as_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens at a port that the system also gives to clients, a dial may reach itself."""
    with refusing() as bad:
        port = bad.port
    new_stream_socket = dial.new_stream_socket

    def from_that_port(family: int) -> socket.SocketType:
        sock = new_stream_socket(family)
        with contextlib.suppress(OSError):  # it is in use by the attempt before
            sock.bind(("127.0.0.1", port))
        return sock

    proxy = stage.proxy(settings={"dial_ladder_s": (1.0,)})
    address = proxy.serve(Endpoint("127.0.0.1", port))
    monkeypatch.setattr(dial, "new_stream_socket", from_that_port)
    client = stage.connect(address)
    client.send(b"hello")
    with contextlib.suppress(ConnectionResetError):  # as nobody read that
        assert client.receive_all() == b""
    assert proxy.counters_of(Endpoint("127.0.0.1", port)).dial_failures == 1
    assert proxy.counters().total.connections == 0
    backend = stage.backend(port=port)  # and the port is free for the one that is to listen there
    monkeypatch.undo()
    proxy.serve(backend.endpoint)
    stage.connect(address)
    backend.accept()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dial_ladder_s": ()}, "dial_ladder_s is empty: it must have one time limit at least"),
        ({"dial_ladder_s": (1, 0.0)}, "dial_ladder_s[1] is 0: it must be greater than 0"),
        ({"half_close_timeout_s": -1}, "half_close_timeout_s is -1: it must be greater than 0"),
        ({"hold_timeout_s": 0.0}, "hold_timeout_s is 0: it must be greater than 0"),
        ({"max_held": 0}, "max_held is 0: it must be greater than 0"),
        ({"max_connections": -1}, "max_connections is -1: it must not be negative"),
        ({"tcp_user_timeout_s": 1e9}, "tcp_user_timeout_s is 1e+09: it can be 2.0736e+06 at most"),
        ({"listen_backlog": 0}, "listen_backlog is 0: it must be within the range [1, 65535]"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        DataPlaneSettings(**settings)


def _user_timeout(side: Side) -> int:
    with borrowed(side.fd, side.family) as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
