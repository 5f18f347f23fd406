"""Listeners: opened and closed as the snapshot says, all or nothing, and nothing else is touched."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from contextlib import suppress

import pytest

from tests.traffic.conftest import RunningProxy, Stage, a_service, ask
from tests.traffic.peers import Peer, eventually
from userspace_proxy import L4Protocol, ListenAddress, Proxy, ServicePortName, Snapshot

WEB = ServicePortName("default", "web")
OTHER = ServicePortName("default", "other")


def on(address: str, port: int = 0) -> tuple[ListenAddress, ...]:
    return (ListenAddress(address, port),)


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """Return a port that is free at all addresses, below those that the system gives to clients by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket(socket.AF_INET, kind) as sock:
            sock.bind(("0.0.0.0", port))
            return port


def is_refused(address: ListenAddress) -> bool:
    try:
        Peer.connect(address).reset()  # leaves nothing behind that the proxy would wait for
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it was in the queue when the listener closed
        return True
    return False


def test_both_families_have_listeners_of_their_own_on_one_port(proxy: RunningProxy, stage: Stage) -> None:
    """A wildcard of IPv6 leaves the IPv4 port to its own listener: IPV6_V6ONLY."""
    port = free_port()
    a, b = stage.named_backend("a").endpoint, stage.named_backend("b").endpoint
    service, other = a_service(a, listen=on("::", port)), a_service(b, name="other", listen=on("0.0.0.0", port))
    assert proxy.apply(service, other) == {}
    assert ask(("::1", port)) == "a"
    assert ask(("127.0.0.1", port)) == "b"


def test_tcp_and_udp_share_a_port(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 91"""
    port = free_port()
    tcp = stage.named_backend("tcp")
    udp = stage.answering_datagrams(lambda data: b"udp")
    services = [
        a_service(udp.endpoint, protocol=L4Protocol.UDP, listen=on("127.0.0.1", port)),
        a_service(tcp.endpoint, protocol=L4Protocol.TCP, listen=on("127.0.0.1", port)),
    ]
    for order in (services, services[::-1]):
        assert proxy.apply(*order) == {}
        assert ask(("127.0.0.1", port)) == "tcp"
        client = stage.datagrams(to=("127.0.0.1", port))
        client.send(b"?")
        assert client.receive() == b"udp"
        proxy.apply()


def test_a_listener_that_goes_refuses_new_clients(proxy: RunningProxy, stage: Stage) -> None:
    address = proxy.serve(stage.named_backend("a").endpoint)
    proxy.apply()
    assert is_refused(address)


def test_a_port_moves_from_one_service_to_another_in_one_step(proxy: RunningProxy, stage: Stage) -> None:
    port = free_port()
    a, b = stage.named_backend("a").endpoint, stage.named_backend("b").endpoint
    proxy.apply(a_service(a, listen=on("127.0.0.1", port)))
    assert proxy.apply(a_service(b, name="other", listen=on("127.0.0.1", port))) == {}
    assert ask(("127.0.0.1", port)) == "b"
    assert proxy.apply(a_service(b, name="other", listen=on("0.0.0.0", port))) == {}
    assert ask(("127.0.0.2", port)) == "b"


def test_a_conflict_names_both_services_and_the_second_gets_the_port_when_the_first_goes(
    proxy: RunningProxy, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    a, b = stage.named_backend("a").endpoint, stage.named_backend("b").endpoint
    first = a_service(a, listen=on("127.0.0.1", port))
    second = a_service(b, name="other", listen=on("127.0.0.1", port))
    (failure,) = proxy.apply(first, second)[OTHER]
    assert str(failure) == f"cannot listen on 127.0.0.1:{port}: in use by default/web"
    assert failure.errno_name == "EADDRINUSE"
    assert f"default/other (TCP): {failure}" in caplog.text
    assert ask(("127.0.0.1", port)) == "a"
    assert proxy.apply(second) == {}
    assert ask(("127.0.0.1", port)) == "b"


def test_only_the_owner_of_an_overlapping_address_is_named(proxy: RunningProxy, stage: Stage) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.2", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        failures = proxy.apply(
            a_service(listen=on("127.0.0.1", port)),
            a_service(name="other", listen=on("127.0.0.2", port)),
            a_service(name="third", listen=on("192.0.2.1", port)),
        )
    assert "in use by" not in str(failures[OTHER][0])
    assert failures[ServicePortName("default", "third")][0].errno_name == "EADDRNOTAVAIL"
    assert "in use by" not in str(failures[ServicePortName("default", "third")][0])


def test_a_service_listens_on_all_of_its_new_addresses_or_on_none(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.named_backend("a").endpoint
    port = free_port()
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.2", port))
        foreign.listen()
        service = a_service(backend, listen=(*on("127.0.0.1", port), *on("127.0.0.2", port), *on("127.0.0.3", port)))
        (failure,) = proxy.apply(service)[WEB]
        assert failure.address == f"127.0.0.2:{port}"
        assert is_refused(ListenAddress("127.0.0.1", port))
        assert is_refused(ListenAddress("127.0.0.3", port))
        assert proxy.addresses(WEB) == ()
    assert eventually(lambda: len(proxy.addresses(WEB)) == 3, within=2.5)  # it is tried again each second
    assert {ask(address) for address in proxy.addresses(WEB)} == {"a"}


def test_a_taken_port_leaves_the_service_on_its_others_and_is_claimed_when_free(
    proxy: RunningProxy, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    backend = stage.named_backend("a").endpoint
    keep, taken = free_port(), socket.socket()
    with taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = on("127.0.0.1", taken.getsockname()[1])
        proxy.apply(a_service(backend, listen=on("127.0.0.1", keep)))
        listener = proxy.listener()
        assert proxy.apply(a_service(backend, listen=(*on("127.0.0.1", keep), *wanted))).keys() == {WEB}
        assert proxy.listener() is listener
        assert ask(("127.0.0.1", keep)) == "a"
        assert eventually(lambda: "trying again" in caplog.text)
    assert eventually(lambda: len(proxy.addresses(WEB)) == 2, within=2.5)
    assert ask(wanted[0]) == "a"
    assert caplog.text.count("trying again") == 1


def test_a_failure_is_forgotten_when_the_address_is_no_longer_wanted(proxy: RunningProxy, stage: Stage) -> None:
    keep = on("127.0.0.1", free_port())
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        assert proxy.apply(a_service(listen=keep)) == {}
        assert proxy.apply(a_service(listen=(*keep, *on("127.0.0.1", foreign.getsockname()[1])))).keys() == {WEB}
        assert proxy.apply(a_service(listen=keep)) == {}


def test_addresses_come_in_the_order_asked_for(proxy: RunningProxy) -> None:
    one, two, three = (ListenAddress(f"127.0.0.{last}", free_port()) for last in (1, 2, 3))
    proxy.apply(a_service(listen=(two,)))
    proxy.apply(a_service(listen=(one, two, three)))
    assert proxy.addresses(WEB) == (one, two, three)
    assert proxy.addresses(OTHER) == ()


def test_a_service_that_did_not_change_is_not_touched(proxy: RunningProxy, stage: Stage) -> None:
    a, b = stage.named_backend("a").endpoint, stage.named_backend("b").endpoint
    proxy.apply(a_service(a, b))
    address, listener = proxy.addresses(WEB)[0], proxy.listener()
    first = ask(address)
    proxy.apply(a_service(b, a), a_service(name="other"))
    proxy.apply(a_service(b, a))
    assert proxy.listener() is listener
    assert ask(address) != first  # the turn went on: the same endpoints came in another order


def test_many_services_are_listened_on_and_left_again(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.named_backend("a").endpoint
    services = [a_service(backend, name=f"service-{number}") for number in range(500)]
    assert proxy.apply(*services) == {}
    for service in services[::50]:
        assert ask(proxy.addresses(service.name)[0]) == "a"
    proxy.apply(services[0])
    assert len(proxy.counters().endpoints) == 1
    assert ask(proxy.addresses(services[0].name)[0]) == "a"


def test_an_apply_that_is_cancelled_half_way_leaves_no_listener_that_nobody_knows(
    proxy: RunningProxy, stage: Stage
) -> None:
    backend = stage.named_backend("a").endpoint
    services = [a_service(backend, name=f"service-{number}") for number in range(300)]

    async def cancelled_apply() -> None:
        task = asyncio.get_running_loop().create_task(proxy.proxy.apply(Snapshot.of(*services)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    proxy.run(cancelled_apply())
    assert proxy.apply(*services[::2]) == {}
    assert {ask(proxy.addresses(service.name)[0]) for service in services[::60]} == {"a"}
    assert len(proxy.listeners()) == len(proxy.counters().endpoints) == 150
    proxy.apply()
    assert not proxy.listeners()


def test_leaving_while_an_apply_is_under_way_leaves_nothing(stage: Stage) -> None:
    proxy = stage.proxy()
    services = [a_service(name=f"service-{number}") for number in range(300)]

    async def leave_during_apply() -> None:
        task = asyncio.get_running_loop().create_task(proxy.proxy.apply(Snapshot.of(*services)))
        await asyncio.sleep(0)
        proxy._leave.set()
        assert await task == {}
        with pytest.raises(RuntimeError, match="was left"):
            await proxy.proxy.apply(Snapshot())

    proxy.run(leave_during_apply())
    proxy.stop()


def test_leaving_gives_open_connections_time_and_new_ones_none(stage: Stage) -> None:
    proxy = stage.proxy(drain_timeout_s=3.0)
    client, backend = stage.connected_pair(proxy)
    address = proxy.addresses(WEB)[0]
    proxy.loop.call_soon_threadsafe(proxy._leave.set)
    assert eventually(lambda: not proxy.listeners(), within=1.0)
    assert is_refused(address)
    client.send(b"request")
    assert backend.receive(7) == b"request"
    backend.send(b"reply")
    backend.close()
    assert client.receive_all() == b"reply"
    client.close()
    began = time.monotonic()
    proxy.stop()
    assert time.monotonic() - began < 1.0


def test_leaving_ends_after_the_drain_time_out(stage: Stage) -> None:
    proxy = stage.proxy(drain_timeout_s=0.3)
    client, _ = stage.connected_pair(proxy)
    began = time.monotonic()
    proxy.stop()
    assert 0.3 <= time.monotonic() - began < 1.0
    assert client.receive_all() == b""


def test_an_error_of_the_body_comes_out_as_itself(stage: Stage) -> None:
    async def body() -> None:
        async with Proxy():
            raise LookupError("mine")

    with asyncio.Runner() as runner, pytest.raises(LookupError, match="mine"):
        runner.run(body())


def test_a_cancelled_body_stays_cancelled(stage: Stage) -> None:
    async def body() -> None:
        async with asyncio.timeout(0.05), Proxy():
            await asyncio.Event().wait()

    with asyncio.Runner() as runner, pytest.raises(TimeoutError):
        runner.run(body())


def test_changes_are_told_once_each(proxy: RunningProxy, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    backend = stage.named_backend("a").endpoint
    address = proxy.serve(backend)
    proxy.serve(backend)
    proxy.serve()
    proxy.apply()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        f"default/web (TCP): {address} -> {backend}",
        f"default/web (TCP): {address} -> no endpoints",
        "default/web (TCP): no longer served",
    ]
