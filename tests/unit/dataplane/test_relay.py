"""The order in which bulk and small messages move. What moves, and how it ends, is in tests/traffic."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from userspace_proxy import DataPlaneSettings, Endpoint, ServicePortName
from userspace_proxy.dataplane.backends import Target
from userspace_proxy.dataplane.poller import READABLE, EpollPoller
from userspace_proxy.dataplane.relay import Relay

BULK = bytes(192 << 10)  # more than is copied before bulk waits for its turns


class HeldPoller(EpollPoller):
    """Keeps what is put off."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.put_off: list[tuple[Callable[[], None], bool]] = []

    def defer(self, resume: Callable[[], None], *, first: bool = False) -> None:
        self.put_off.append((resume, first))


class Stream:
    """A relayed connection of which the test holds both ends."""

    def __init__(self, relay: Relay) -> None:
        self.client, accepted = socket.socketpair()
        connected, self.backend = socket.socketpair()
        for sock in (self.client, accepted, connected, self.backend):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        target = Target(ServicePortName("default", "web"), Endpoint("127.0.0.1", 1))
        self.side, other = relay.start(accepted.detach(), socket.AF_UNIX, connected, target)
        relay.poller.watch(self.side.fd, self.side)
        relay.poller.watch(other.fd, other)

    def send(self, data: bytes) -> None:
        """Send all of it, and tell the relay."""
        assert self.client.send(data) == len(data)
        self.side.on_ready(READABLE)

    def received(self) -> int:
        """Return how many bytes have arrived since it was asked before."""
        total = 0
        try:
            while data := self.backend.recv(1 << 20):
                total += len(data)
        except BlockingIOError:
            return total
        raise AssertionError("an end")


@pytest.fixture
async def poller() -> AsyncIterator[HeldPoller]:
    poller = HeldPoller(asyncio.get_running_loop())
    yield poller
    poller.shutdown()


@pytest.fixture(params=[True, False], ids=["splice", "copy"])
async def stream(poller: HeldPoller, request: pytest.FixtureRequest) -> AsyncIterator[Stream]:
    relay = Relay(poller, asyncio.get_running_loop(), DataPlaneSettings(use_splice=request.param), lambda name: None)
    stream = Stream(relay)
    yield stream
    relay.close_all()
    stream.client.close()
    stream.backend.close()


async def test_a_small_message_moves_at_once(stream: Stream, poller: HeldPoller) -> None:
    stream.send(b"request")
    assert stream.received() == 7
    assert poller.put_off == []


async def test_bulk_waits_for_one_turn_however_often_more_of_it_arrives(stream: Stream, poller: HeldPoller) -> None:
    stream.send(BULK)
    assert stream.received() == len(BULK)
    for _ in range(10):
        stream.send(b"more")
    assert stream.received() == 0
    ((take_turn, is_first),) = poller.put_off
    assert not is_first
    take_turn()
    assert stream.received() == 40


async def test_bulk_that_goes_on_has_turns_in_a_row_and_then_lets_others_go_first(
    stream: Stream, poller: HeldPoller
) -> None:
    order = []
    for _ in range(30):
        stream.send(BULK + BULK)
        while poller.put_off:
            take_turn, is_first = poller.put_off.pop()
            order.append(is_first)
            stream.received()
            take_turn()
    assert stream.received() <= 2 * len(BULK)
    rows = "".join("r" if is_first else "-" for is_first in order)
    assert "r" in rows
    assert "r" * 8 not in rows
