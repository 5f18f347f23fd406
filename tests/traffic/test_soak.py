"""Much at once, for a while: every byte is accounted for, by both ends and by the proxy, and nothing is left.

USERSPACE_PROXY_SOAK_S makes it longer, USERSPACE_PROXY_SOAK_SEED another one. A longer one that watches a proxy in a
process of its own is benchmarks/soak.py.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

from tests.traffic.conftest import RunningProxy, Stage, a_service, open_descriptors
from tests.traffic.peers import eventually, refusing
from tests.traffic.soaking import NOISE, Soak
from userspace_proxy import Endpoint, EndpointCounters, L4Protocol, ServicePort
from userspace_proxy.dataplane.remote_datagrams import RemoteListener

SOAK_S = float(os.environ.get("USERSPACE_PROXY_SOAK_S", "2.5"))
SEED = int(os.environ.get("USERSPACE_PROXY_SOAK_SEED", "1"))
CLIENTS = 6  # of each kind
CHANGE_S = 0.03


def in_the_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_soak_accounts_for_every_byte_and_leaves_nothing(proxy: RunningProxy, stage: Stage) -> None:
    """Two service ports share backends that come and go. On one all ends are orderly, so that all counts are exact."""
    soak = Soak(SEED)
    backends = [stage.serving_backend(soak.be_backend) for _ in range(4)]
    endpoints = [backend.endpoint for backend in backends]
    services = {is_orderly: "orderly" if is_orderly else "rough" for is_orderly in (True, False)}

    def serve(*endpoints: Endpoint) -> list[ServicePort]:
        service_ports = [a_service(*endpoints, name=name) for name in services.values()]
        assert proxy.apply(*service_ports) == {}
        return service_ports

    names = [service_port.name for service_port in serve(*endpoints)]
    idle_descriptors = count_descriptors(proxy)
    until = time.monotonic() + SOAK_S

    with refusing() as refuses:

        def keep_changing() -> None:
            rng = random.Random(SEED)
            while time.monotonic() < until:
                serve(*rng.sample([*endpoints, refuses], 2), rng.choice(endpoints))
                time.sleep(CHANGE_S)

        changing = in_the_background(keep_changing)
        clients = [
            client
            for name, is_orderly in zip(names, services, strict=True)
            for client in soak.load(
                proxy.addresses(name)[0],
                is_orderly=is_orderly,
                clients=CLIENTS,
                goes_on=lambda: time.monotonic() < until,
            )
        ]
        for thread in (changing, *clients):
            thread.join()
    assert eventually(proxy.is_idle, within=10)
    for backend in backends:
        backend.finish()
    assert soak.faults == []
    assert soak.outcomes["clean"] > 50
    assert soak.outcomes["reset"] > 5
    totals = proxy.counters().service_ports
    expect_exact_counts(soak, totals[names[0]])
    expect_bounded_counts(soak, totals[names[1]])
    assert sum(totals[name].connections for name in names) == sum(backend.connections for backend in backends)
    expect_nothing_left(proxy)
    assert eventually(lambda: count_descriptors(proxy) == idle_descriptors)


def expect_exact_counts(soak: Soak, counted: EndpointCounters) -> None:
    account = soak.accounts[True]
    assert counted.connections == account.connections
    assert account.request_bytes_sent == counted.bytes_to_endpoint == account.request_bytes_received
    assert account.reply_bytes_sent == counted.bytes_to_client == account.reply_bytes_received


def expect_bounded_counts(soak: Soak, counted: EndpointCounters) -> None:
    """A reset loses what is under way, on either side of the proxy. It may also come before there was a connection."""
    account = soak.accounts[False]
    assert counted.connections <= account.connections
    assert account.request_bytes_received <= counted.bytes_to_endpoint <= account.request_bytes_sent
    assert account.reply_bytes_received <= counted.bytes_to_client <= account.reply_bytes_sent


_SOCKETS_OF_A_CHILD = 8  # its listeners, the two connections to its parents, and those of the event loop


def count_descriptors(proxy: RunningProxy) -> list[int]:
    """How many descriptors this process has open, and each worker."""
    return [len(open_descriptors(process)) for process in ("self", *proxy.worker_processes())]


def expect_nothing_left(proxy: RunningProxy) -> None:
    """No connection in any state, no pipe, and no descriptor watched but the listeners'.

    Of another process, its descriptors tell.
    """
    if proxy.is_child:
        pipes = [each for each in proxy.child_descriptors() if each.startswith("pipe:")]
        assert len(pipes) <= 5  # standard error, and two of the event loop's with both ends
        assert len([each for each in proxy.child_descriptors() if each.startswith("socket:")]) <= _SOCKETS_OF_A_CHILD
        return
    engine = proxy.plane._engine
    relay = engine.relay
    assert not engine.dials
    assert not relay._targets
    assert not relay._last_progress
    assert not relay._half_closed
    assert not relay._partings._waiting
    assert relay.pipes is None or (relay.pipes._allotted_bytes, relay.pipes._idle) == (0, [])
    here = [each for each in proxy.plane._listeners.values() if not isinstance(each, RemoteListener)]
    assert len(engine.poller._handlers) == len(here)


def test_a_soak_of_sessions_leaves_nothing(stage: Stage) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 0.2, "max_sessions": 50})
    backends = [stage.answering_datagrams(bytes) for _ in range(3)]
    address = proxy.serve(*(backend.endpoint for backend in backends), protocol=L4Protocol.UDP)
    idle_descriptors = count_descriptors(proxy)
    rng = random.Random(SEED)
    sent = answers = 0
    until = time.monotonic() + SOAK_S / 5
    while time.monotonic() < until:
        clients = [stage.datagrams(to=address) for _ in range(rng.randrange(1, 40))]
        for client in clients:
            payload = NOISE[: rng.choice([0, 1, 1400, 9000])]
            client.send(payload)
            sent += len(payload)
            if rng.random() < 0.5:
                while client.receive() != payload:  # an answer to the last owner of the client's port
                    continue
                answers += len(payload)
        if rng.random() < 0.3:  # an endpoint goes, and comes back
            proxy.serve(*(backend.endpoint for backend in rng.sample(backends, 2)), protocol=L4Protocol.UDP)
            proxy.serve(*(backend.endpoint for backend in backends), protocol=L4Protocol.UDP)
        for client in clients:
            client.close()
    assert eventually(proxy.is_idle)
    (counted,) = proxy.counters().service_ports.values()
    assert counted.bytes_to_endpoint == sent
    assert answers <= counted.bytes_to_client <= sent
    expect_nothing_left(proxy)
    assert eventually(lambda: count_descriptors(proxy) == idle_descriptors)
