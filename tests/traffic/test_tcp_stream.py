"""TCP: what one side says, the other side hears, unchanged; and ends are passed on as what they are."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import os
import random
import socket
import termios
import threading
import time

import pytest

from tests.traffic.conftest import VARIANTS, RunningProxy, Stage
from tests.traffic.peers import Peer, eventually

BULK = os.urandom(1 << 20) * 9  # beyond the 128 KiB after which bytes are spliced, and beyond a pipe


def test_bytes_arrive_unchanged_in_both_directions(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    client.send(b"question")
    assert backend.receive(8) == b"question"
    backend.send(b"answer")
    assert client.receive(6) == b"answer"


def test_bulk_arrives_unchanged_in_both_directions_at_once(proxy: RunningProxy, stage: Stage) -> None:
    client = stage.connect(proxy.serve(stage.serving_backend().endpoint))
    sender = threading.Thread(target=lambda: (client.send(BULK), client.half_close()))
    sender.start()
    received = client.receive_all()
    sender.join()
    assert hashlib.sha256(received).digest() == hashlib.sha256(BULK).digest()


def test_small_messages_after_bulk_still_pass_at_once(proxy: RunningProxy, stage: Stage) -> None:
    client = stage.connect(proxy.serve(stage.serving_backend().endpoint))
    sender = threading.Thread(target=client.send, args=(BULK,))
    sender.start()
    assert client.receive(len(BULK)) == BULK
    sender.join()
    for size in (1, 4095, 4096, 4097, 65535, 65536, 65537, 1, 1):
        client.send(b"x" * size)
        assert client.receive(size) == b"x" * size


def test_half_closed_client_still_receives_the_reply(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    client.send(b"request")
    client.half_close()
    assert backend.receive_all() == b"request"
    backend.send(BULK[:300_000])
    assert client.receive(300_000) == BULK[:300_000]
    backend.close()
    assert client.receive_all() == b""
    assert eventually(proxy.is_idle)


def test_half_closed_backend_still_receives_the_rest_of_the_request(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    backend.send(b"banner")
    backend.half_close()
    assert client.receive_all() == b"banner"
    sender = threading.Thread(target=lambda: (client.send(BULK), client.half_close()))
    sender.start()
    assert backend.receive_all() == BULK
    sender.join()
    assert eventually(proxy.is_idle)


def test_an_end_that_comes_while_the_receiver_is_slow_is_not_lost(proxy: RunningProxy, stage: Stage) -> None:
    """The edge of the FIN comes while its direction waits for room: an edge-triggered poller tells of it once."""
    client, backend = stage.connected_pair(proxy, receive_buffer=4096)
    sender = threading.Thread(target=lambda: (backend.send(BULK), backend.half_close()))
    sender.start()
    sender.join(0.3)
    assert client.receive_all() == BULK
    sender.join()
    client.send(b"still here")
    client.half_close()
    assert backend.receive_all() == b"still here"


def test_an_end_right_behind_the_data_is_passed_on(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.backend()
    address = proxy.serve(backend.endpoint)
    for size in (0, 1, 65535, 65536, 65537, 131072):
        client = stage.connect(address)
        client.send(b"y" * size)
        client.half_close()
        server = backend.accept()
        assert len(server.receive_all()) == size
        server.close()
        assert client.receive_all() == b""


def test_backend_that_closes_first_ends_the_client_within_500_ms(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 3"""
    client, backend = stage.connected_pair(proxy)
    began = time.monotonic()
    backend.send(b"imok")
    backend.close()
    assert client.receive_all() == b"imok"
    assert time.monotonic() - began < 0.5


def test_a_thousand_clients_that_went_leave_nothing_after_the_half_close_time_out(stage: Stage) -> None:
    """cases.md 1"""
    proxy = stage.proxy(settings={"half_close_timeout_s": 0.5})
    backend = stage.serving_backend(lambda peer: peer.receive_all() and None)
    address = proxy.serve(backend.endpoint)
    for _ in range(1000):
        with Peer.connect(address) as client:
            client.send(b"x")
    assert eventually(lambda: proxy.counters_of(backend.endpoint).connections == 1000)
    assert eventually(proxy.is_idle, within=3.0)
    assert proxy.counters_of(backend.endpoint).bytes_to_endpoint == 1000


def test_a_half_closed_connection_with_traffic_lives_beyond_the_time_out(stage: Stage) -> None:
    proxy = stage.proxy(settings={"half_close_timeout_s": 0.4})
    client, backend = stage.connected_pair(proxy)
    client.half_close()
    assert backend.receive_all() == b""
    for _ in range(6):
        backend.send(b"tick")
        assert client.receive(4) == b"tick"
        assert client.hears_nothing(during=0.1)
    began = time.monotonic()
    assert client.receive_until_reset() == b""  # an end would look like the end of the reply
    assert time.monotonic() - began < 1.0
    assert proxy.counters().limits.half_close_timeouts == 1


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20])
def test_a_reset_by_the_backend_reaches_the_client_after_the_data(proxy: RunningProxy, stage: Stage, size: int) -> None:
    client, backend = stage.connected_pair(proxy)
    backend.send(BULK[:size])
    assert eventually(lambda: unsent(backend) == 0)
    backend.reset()
    assert client.receive_until_reset() == BULK[:size]
    assert eventually(proxy.is_idle)


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20])
def test_a_reset_by_the_client_reaches_the_backend_after_the_data(proxy: RunningProxy, stage: Stage, size: int) -> None:
    client, backend = stage.connected_pair(proxy)
    client.send(BULK[:size])
    assert eventually(lambda: unsent(client) == 0)
    client.reset()
    assert backend.receive_until_reset() == BULK[:size]
    assert eventually(proxy.is_idle)


def test_a_reset_that_comes_together_with_the_data_is_not_missed(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    with proxy.held():
        backend.send(b"last words")
        assert eventually(lambda: unsent(backend) == 0)
        backend.reset()
    assert client.receive_until_reset() == b"last words"


def test_a_slow_reader_gets_all_that_the_backend_sent_before_its_reset(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy, receive_buffer=4096)
    backend.send(BULK[: 1 << 20])
    assert eventually(lambda: unsent(backend) == 0)
    backend.reset()
    received = b""
    while len(received) < 200_000:
        received += client.receive(20_000)
        assert client.hears_nothing(during=0.001) is False
    assert received + client.receive_until_reset() == BULK[: 1 << 20]


def test_a_clean_end_stays_clean_though_a_reset_follows(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 5"""
    client, backend = stage.connected_pair(proxy)
    backend.send(BULK[:65536])
    backend.half_close()
    assert eventually(lambda: unsent(backend) == 0)
    backend.reset()
    threading.Event().wait(0.3)  # the slow client of the case
    assert client.receive_all() == BULK[:65536]
    assert eventually(proxy.is_idle, within=1.0) or proxy.counters().open_connections == 1


def test_a_client_reset_after_its_clean_end_leaves_the_backend_a_clean_end(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    client.send(b"request")
    client.half_close()
    assert backend.receive_all() == b"request"
    client.reset()
    assert backend.receive_all() == b""


def test_reset_of_one_side_after_the_clean_end_of_the_other_is_still_a_reset(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    client.half_close()
    assert backend.receive_all() == b""
    backend.send(b"half of the reply")
    assert client.receive(17) == b"half of the reply"
    backend.reset()
    assert client.receive_until_reset() == b""


def test_what_the_backend_said_before_it_refused_to_listen_still_reaches_the_client(
    proxy: RunningProxy, stage: Stage
) -> None:
    """The first failed write in one direction does not lose the data of the other."""
    client, backend = stage.connected_pair(proxy)
    backend.send(b"413: too much")
    backend.close()
    backend_error = None
    try:
        for _ in range(100):
            client.send(BULK[:100_000])
    except (BrokenPipeError, ConnectionResetError) as error:
        backend_error = error
    received = b""
    try:
        received = client.receive(13)
    except ConnectionResetError:
        assert backend_error is None, "the reset came before the data"
    assert received == b"413: too much"


def test_reply_survives_a_backend_that_dies_with_the_request_unread(proxy: RunningProxy, stage: Stage) -> None:
    """Closing with unread input is a reset: the backend's words before it still come first."""
    client, backend = stage.connected_pair(proxy)
    client.send(b"unread")
    assert eventually(lambda: pending(backend) == 6)
    backend.send(BULK[:50_000])
    assert eventually(lambda: unsent(backend) == 0)
    backend.close()
    assert client.receive_until_reset() == BULK[:50_000]


def test_urgent_data_does_not_stop_the_stream_behind_it(proxy: RunningProxy, stage: Stage) -> None:
    """A read stops short at the urgent mark, which says nothing about how much there is behind it."""
    client, backend = stage.connected_pair(proxy)
    with proxy.held():
        client.send(b"before")
        client.sock.send(b"!", socket.MSG_OOB)
        client.send(b"after")
    assert backend.receive(11) == b"beforeafter"


def test_urgent_data_right_before_the_end_cuts_nothing_off(proxy: RunningProxy, stage: Stage) -> None:
    client, backend = stage.connected_pair(proxy)
    with proxy.held():
        client.send(b"before")
        client.sock.send(b"!", socket.MSG_OOB)
        client.send(b"after")
        client.half_close()
    assert backend.receive_all() == b"beforeafter"


def test_urgent_data_in_the_middle_of_bulk_does_not_stop_it(proxy: RunningProxy, stage: Stage) -> None:
    """A splice never gets past the urgent mark; behind it, it takes the end of the stream for the end of all."""
    client, backend = stage.connected_pair(proxy)

    def speak() -> None:
        client.send(BULK)
        client.sock.send(b"!", socket.MSG_OOB)
        client.send(BULK)
        client.half_close()

    speaker = threading.Thread(target=speak)
    speaker.start()
    received = backend.receive_all()
    speaker.join()
    assert received == BULK * 2


def test_a_reader_that_reads_nothing_stops_the_sender(proxy: RunningProxy, stage: Stage) -> None:
    """200 MiB are offered; what is taken on the way is bounded by the kernel's buffers, and by ours."""
    client, backend = stage.connected_pair(proxy)
    backend.sock.settimeout(0.5)
    taken, before = 0, resident_bytes()
    try:
        while taken < 200 << 20:
            taken += backend.sock.send(BULK[: 1 << 20])
    except TimeoutError:
        pass
    assert taken < 100 << 20
    assert resident_bytes() - before < 32 << 20
    client.send(b"the other way is open")
    assert backend.receive(21) == b"the other way is open"
    assert len(client.receive(taken)) == taken


def test_aborted_downloads_end_at_the_backend_and_later_ones_work(proxy: RunningProxy, stage: Stage) -> None:
    """cases.md 11"""
    ended: list[float] = []

    def pour(peer: Peer) -> None:
        try:
            while True:
                peer.send(BULK[: 1 << 16])
        except OSError:
            ended.append(time.monotonic())
            raise

    backend = stage.serving_backend(pour)
    address = proxy.serve(backend.endpoint)
    clients = [stage.connect(address) for _ in range(100)]
    for client in clients:
        assert len(client.receive(1 << 16)) == 1 << 16
    for client in clients:
        client.reset()
    reset_at = time.monotonic()
    assert eventually(lambda: len(ended) == 100, within=3.0)
    assert max(ended) - reset_at < 1.0
    assert eventually(proxy.is_idle)
    with Peer.connect(address) as client:
        assert len(client.receive(1 << 20)) == 1 << 20


def test_a_reset_in_the_middle_of_bulk_is_never_a_clean_end(proxy: RunningProxy, stage: Stage) -> None:
    """A splice that meets the reset after it moved something reports what it moved, and the error is gone."""
    backend = stage.backend()
    address = proxy.serve(backend.endpoint)
    rng = random.Random(5)
    for _ in range(60):
        client = Peer.connect(address, receive_buffer=rng.choice([4096, 65536, 1 << 20]))
        server = backend.accept()
        heard = []

        def pour(server: Peer = server, heard: list[OSError] = heard) -> None:
            try:
                server.send(BULK)
            except OSError as error:
                heard.append(error)

        pouring = threading.Thread(target=pour)
        pouring.start()
        client.receive(rng.randrange(100_000, 3_000_000))
        client.reset()
        pouring.join()
        if not heard:  # a socket tells of a reset once
            assert server.receive_until_reset() == b""
        server.close()


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.poller == "epoll"], ids=str)
def test_a_reset_behind_bytes_that_nobody_takes_ends_the_connection_in_time(stage: Stage) -> None:
    """Needs to be told of errors while reading waits, which the event loop's own readers cannot."""
    proxy = stage.proxy(settings={"half_close_timeout_s": 0.4})
    client, backend = stage.connected_pair(proxy)
    client.sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        client.send(BULK * 10)
    client.reset()
    assert eventually(proxy.is_idle, within=2.0)
    received = backend.receive_until_reset()
    assert (BULK * 10).startswith(received)


@pytest.mark.in_this_process("looks into the data path")
def test_nothing_is_kept_for_a_connection_that_is_idle_after_bulk(proxy: RunningProxy, stage: Stage) -> None:
    client = stage.connect(proxy.serve(stage.serving_backend().endpoint))
    sender = threading.Thread(target=client.send, args=(BULK,))
    sender.start()
    assert client.receive(len(BULK)) == BULK
    sender.join()
    client.send(b"small")
    assert client.receive(5) == b"small"
    relay = proxy.plane._engine.relay
    assert all(side._pipe is None and side.peer._pipe is None for side in proxy.call(lambda: list(relay._targets)))


def test_counters_are_exact(proxy: RunningProxy, stage: Stage) -> None:
    backend = stage.serving_backend(lambda peer: peer.send(b"z" * len(peer.receive(1000)) * 2))
    address = proxy.serve(backend.endpoint)
    for _ in range(3):
        with Peer.connect(address) as client:
            client.send(b"a" * 1000)
            assert len(client.receive(2000)) == 2000
    bulk = stage.serving_backend()
    assert eventually(lambda: proxy.counters_of(backend.endpoint).open_connections == 3)
    counters = proxy.counters_of(backend.endpoint)
    assert (counters.connections, counters.dial_failures, counters.sessions) == (3, 0, 0)
    assert (counters.bytes_to_endpoint, counters.bytes_to_client) == (3000, 6000)

    client = stage.connect(proxy.serve(bulk.endpoint))
    sender = threading.Thread(target=lambda: (client.send(BULK), client.half_close()))
    sender.start()
    assert len(client.receive_all()) == len(BULK)
    sender.join()
    counters = proxy.counters_of(bulk.endpoint)
    assert (counters.bytes_to_endpoint, counters.bytes_to_client) == (len(BULK), len(BULK))


def test_bytes_in_flight_survive_the_death_of_the_backend_though_both_have_half_closed(
    proxy: RunningProxy, stage: Stage
) -> None:
    """The client's unread FIN and ours to it look like a dead socket, but its bytes are still on their way."""
    client, backend = stage.connected_pair(proxy, receive_buffer=4096)
    backend.send(BULK[:600_000])
    backend.half_close()
    assert eventually(lambda: unsent(backend) == 0)
    with proxy.held():
        backend.reset()
        client.send(b"nobody reads this")
        client.half_close()
    assert client.receive_all() == BULK[:600_000]
    assert eventually(proxy.is_idle)


def test_connections_that_end_while_their_turn_is_put_off_raise_nothing(proxy: RunningProxy, stage: Stage) -> None:
    """A direction with more than its share is put off; by then its connection may be closed."""
    backend = stage.backend()
    address = proxy.serve(backend.endpoint)
    pairs = [(stage.connect(address), backend.accept()) for _ in range(8)]
    for client, server in pairs:
        server.send(b"w" * (1 << 20))
        client.send(b"v" * (1 << 20))
    for client, server in pairs:
        client.reset()
        server.reset()
    assert eventually(proxy.is_idle)


def test_an_event_of_a_closed_connection_does_not_reach_the_next_one_with_its_descriptor(
    proxy: RunningProxy, stage: Stage
) -> None:
    """In one batch: the first connection is closed, the second gets its number, and then comes news of the first."""
    backend = stage.backend()
    address = proxy.serve(backend.endpoint)
    for number in range(5):
        first, first_server = stage.connect(address), backend.accept()
        assert eventually(lambda number=number: proxy.counters_of(backend.endpoint).connections == number * 2 + 1)
        with proxy.held():
            first_server.reset()
            second = stage.connect(address)
            first.half_close()
        second_server = backend.accept()
        for _ in range(3):
            second.send(b"hello")
            assert second_server.receive(5) == b"hello"


def unsent(peer: Peer) -> int:
    """How much the kernel of the other end has not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(peer.sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def pending(peer: Peer) -> int:
    """How much has arrived and is not read."""
    count = array.array("i", [0])
    fcntl.ioctl(peer.sock.fileno(), termios.FIONREAD, count)
    return count[0]


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
