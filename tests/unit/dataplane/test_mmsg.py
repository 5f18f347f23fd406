"""recvmmsg and sendmmsg on loopback: the same bytes, addresses and errors as one call for each datagram."""

from __future__ import annotations

import ctypes
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from userspace_proxy.core.model import IPFamily
from userspace_proxy.dataplane import mmsg
from userspace_proxy.dataplane.batches import DatagramBatches, make_batches
from userspace_proxy.dataplane.mmsg import BATCH, ClientAddress, ReceiveBatch, SendBatch, seal, unseal
from userspace_proxy.dataplane.packet_info import CONTROL_BYTES, ControlMessage, reply_control, request_packet_info

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="recvmmsg and sendmmsg are called on Linux only")

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
FAMILIES = pytest.mark.parametrize("family", LOOPBACK, ids=["IPv4", "IPv6"])
NewSocket = Callable[..., socket.socket]


@pytest.fixture
def bound() -> Iterator[NewSocket]:
    """Makes datagram sockets that do not block, bound on loopback."""
    with ExitStack() as stack:

        def new(family: int = socket.AF_INET, host: str = "") -> socket.socket:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            sock.setblocking(False)
            sock.bind((host or LOOPBACK[family], 0))  # type: ignore[index]
            return sock

        yield new


def send_all(batch: SendBatch, through: socket.socket, to: list[tuple[ClientAddress, bytes]]) -> int:
    """Send these datagrams from the socket, and return how many failed."""
    source, relay = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with source, relay:
        for client, data in to:
            source.send(data)
            assert batch.receive_from(relay, seal(client, None)) == len(data)
        return batch.send(through.fileno())


@pytest.mark.parametrize(
    "client",
    [("10.0.0.1", 53), ("255.255.255.254", 65535), ("2001:db8::1", 53, 0, 0), ("fe80::1", 4096, 7, 3)],
    ids=str,
)
@pytest.mark.parametrize(
    "control",
    [
        None,
        (socket.IPPROTO_IP, 8, b"in_pktinfo: "),
        (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, b"this is in6_pktinfo "),
    ],
    ids=["no control message", "IPv4", "IPv6"],
)
def test_what_was_sealed_is_unsealed(client: ClientAddress, control: ControlMessage | None) -> None:
    envelope = seal(client, control).ljust(len(seal(client, (0, 0, b""))), b"\0")
    assert unseal(envelope) == (client, [] if control is None else [control])


@FAMILIES
def test_it_receives_what_recvmsg_receives(bound: NewSocket, family: int) -> None:
    listener, client = bound(family, "::" if family == socket.AF_INET6 else "0.0.0.0"), bound(family)
    request_packet_info(listener, IPFamily.IPV6 if family == socket.AF_INET6 else IPFamily.IPV4)
    sent = [b"a", b"", bytes(range(256)) * 200, b"bb", b"x" * 65507]
    to = (LOOPBACK[socket.AddressFamily(family)], listener.getsockname()[1])
    client.sendto(b"one by one", to)
    _, control, _, sender = listener.recvmsg(100, CONTROL_BYTES)
    for data in sent:
        client.sendto(data, to)
    received = ReceiveBatch().receive(listener.fileno())
    assert [data for _, data in received] == sent
    assert len({envelope for envelope, _ in received}) == 1
    from_them, with_them = unseal(received[0][0])
    assert from_them == sender
    assert reply_control(with_them) == reply_control(control)
    assert with_them == [(level, kind, bytes(data)) for level, kind, data in control]


def test_it_receives_no_more_than_a_batch_and_says_when_there_is_nothing(bound: NewSocket) -> None:
    listener, client, batch = bound(), bound(), ReceiveBatch()
    for number in range(BATCH + 6):
        client.sendto(b"%d" % number, listener.getsockname())
    received = [data for _ in range(2) for _, data in batch.receive(listener.fileno())]
    assert received == [b"%d" % number for number in range(BATCH + 6)]
    with pytest.raises(BlockingIOError):
        batch.receive(listener.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        batch.receive(-1)


def test_nothing_of_one_socket_is_seen_with_the_datagrams_of_another(bound: NewSocket) -> None:
    batch = ReceiveBatch()
    for family in (socket.AF_INET6, socket.AF_INET, socket.AF_INET6):
        plain, telling = bound(family), bound(family)
        request_packet_info(telling, IPFamily.IPV6 if family == socket.AF_INET6 else IPFamily.IPV4)
        client = bound(family)
        for listener, size, controls in ((telling, 1000, 1), (plain, 3, 0), (telling, 0, 1)):
            client.sendto(b"x" * size, listener.getsockname())
            ((envelope, data),) = batch.receive(listener.fileno())
            assert data == b"x" * size
            assert unseal(envelope)[0] == client.getsockname()
            assert len(unseal(envelope)[1]) == controls


@FAMILIES
def test_it_sends_in_order_and_can_be_filled_again(bound: NewSocket, family: int) -> None:
    listener, batch = bound(family), SendBatch()
    clients = [bound(family) for _ in range(3)]
    for number in (BATCH, 1, 7):
        sent = [(clients[each % 3].getsockname(), b"%d " % each * each) for each in range(number)]
        assert send_all(batch, listener, sent) == 0
        assert batch.count == 0
        for client in clients:
            mine = [data for to, data in sent if to == client.getsockname()]
            assert [client.recvfrom(1 << 16) for _ in mine] == [(data, listener.getsockname()) for data in mine]


@pytest.mark.parametrize("bad", [{0}, {2}, {5}, {0, 1, 4}, {4, 5}, set(range(6))], ids=str)
def test_what_cannot_be_sent_is_counted_and_takes_no_neighbour_with_it(bound: NewSocket, bad: set[int]) -> None:
    listener, client = bound(), bound()
    too_large = b"x" * 65508
    sent = [too_large if number in bad else b"%d" % number for number in range(6)]
    assert send_all(SendBatch(), listener, [(client.getsockname(), data) for data in sent]) == len(bad)
    good = [data for data in sent if data is not too_large]
    assert [client.recv(100) for _ in good] == good


def test_nothing_is_added_when_there_is_nothing_to_receive(bound: NewSocket) -> None:
    listener, client, batch = bound(), bound(), SendBatch()
    with pytest.raises(BlockingIOError):
        batch.receive_from(bound(), seal(client.getsockname(), None))
    assert batch.count == 0
    assert batch.send(listener.fileno()) == 0


def refused_with(number: int) -> Callable[..., int]:
    """Return a call as the C library offers it, which the kernel refuses."""

    def call(*arguments: object) -> int:
        ctypes.set_errno(number)
        return -1

    return call


@pytest.mark.parametrize(
    ("libc", "reason"),
    [
        (SimpleNamespace(), "Function not implemented"),
        (SimpleNamespace(recvmmsg=refused_with(errno.ENOSYS), sendmmsg=refused_with(errno.EBADF)), "not implemented"),
        (SimpleNamespace(recvmmsg=refused_with(errno.EBADF), sendmmsg=refused_with(errno.EPERM)), "not permitted"),
    ],
    ids=["not in the C library", "not in the kernel", "filtered"],
)
def test_lacking_calls_are_noticed(monkeypatch: pytest.MonkeyPatch, libc: SimpleNamespace, reason: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: libc)
    mmsg._libc_functions.cache_clear()
    try:
        with pytest.raises(OSError, match=reason):
            ReceiveBatch()
        assert make_batches(TurnByTurn()) is None  # type: ignore[arg-type]
    finally:
        mmsg._libc_functions.cache_clear()


class TurnByTurn:
    """Stands for the engine and its poller."""

    def __init__(self) -> None:
        self.poller = self
        self.dropped_datagrams = 0
        self._finishing: list[Callable[[], None]] = []

    def at_turn_end(self, finish: Callable[[], None]) -> None:
        self._finishing.append(finish)

    def end_turn(self) -> int:
        """Return how many wanted to know."""
        finishing, self._finishing = self._finishing, []
        for finish in finishing:
            finish()
        return len(finishing)


def test_replies_leave_when_the_turn_ends_each_from_its_listener(bound: NewSocket) -> None:
    engine = TurnByTurn()
    batches = DatagramBatches(engine)  # type: ignore[arg-type]
    listeners, client, backend = [bound(), bound()], bound(), bound()
    session = bound()
    session.connect(backend.getsockname())
    order = [0, 0, 1, 0, 1, 1]
    for _ in range(2):
        for number, of in enumerate(order):
            backend.sendto(b"%d" % number, session.getsockname())
            batches.collect_reply(session, seal(client.getsockname(), None), listeners[of].fileno())
        assert engine.end_turn() == 1
        received = [client.recvfrom(100) for _ in order]
        assert received == [(b"%d" % number, listeners[of].getsockname()) for number, of in enumerate(order)]
    assert engine.end_turn() == 0
    assert engine.dropped_datagrams == 0


def test_more_replies_than_a_batch_has_room_for_all_leave(bound: NewSocket) -> None:
    engine = TurnByTurn()
    batches = DatagramBatches(engine)  # type: ignore[arg-type]
    listener, client, backend, session = bound(), bound(), bound(), bound()
    for number in range(2 * BATCH + 1):
        backend.sendto(b"%d" % number, session.getsockname())
        batches.collect_reply(session, seal(client.getsockname(), None), listener.fileno())
    with pytest.raises(BlockingIOError):
        batches.collect_reply(session, seal(client.getsockname(), None), listener.fileno())
    engine.end_turn()
    assert [client.recv(100) for _ in range(2 * BATCH + 1)] == [b"%d" % number for number in range(2 * BATCH + 1)]


def test_what_a_listener_cannot_send_is_counted_as_dropped(bound: NewSocket) -> None:
    engine = TurnByTurn()
    batches = DatagramBatches(engine)  # type: ignore[arg-type]
    listener, client, backend, session = bound(), bound(), bound(socket.AF_INET6), bound(socket.AF_INET6)
    for data in (b"a", b"x" * 65527, b"b"):
        backend.sendto(data, session.getsockname())
        batches.collect_reply(session, seal(client.getsockname(), None), listener.fileno())
    engine.end_turn()
    assert [client.recv(100) for _ in range(2)] == [b"a", b"b"]
    assert engine.dropped_datagrams == 1
