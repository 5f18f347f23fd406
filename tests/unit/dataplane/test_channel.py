"""Messages and descriptors from one end of a channel to the other, and what ends it."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from userspace_proxy.dataplane.channel import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, Channel


class Note(msgspec.Struct, frozen=True):
    text: str


class End:
    """One end, with all that came."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[tuple[str, list[int]]] = []
        self.reasons: list[str] = []
        self.channel: Channel[Note] = Channel(
            asyncio.get_running_loop(), sock, Note, on_message=self._on_message, on_end=self.reasons.append
        )

    def _on_message(self, message: Note, fds: list[int]) -> None:
        if message.text == "fault":
            raise ValueError
        self.messages.append((message.text, fds))

    def close(self) -> None:
        self.channel.close()
        for _, fds in self.messages:
            for fd in fds:
                os.close(fd)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    made = tuple(End(sock) for sock in socket.socketpair())
    yield made  # type: ignore[misc]
    for each in made:
        each.close()


@pytest.fixture
async def raw() -> AsyncIterator[tuple[socket.socket, End]]:
    """A socket that can send anything, and an end that has to bear it."""
    ours, theirs = socket.socketpair()
    end = End(theirs)
    with ours:
        yield ours, end
    end.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)


@contextmanager
def at_most(descriptors: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_messages_arrive_in_order_and_each_with_its_descriptors(ends: tuple[End, End]) -> None:
    one, other = ends
    for number in range(1000):
        pipe = os.pipe() if number % 10 == 0 else ()
        one.channel.send(Note(f"{number} " + "x" * (number * 10)), pipe)
    await until(lambda: len(other.messages) == 1000)
    assert [text.split()[0] for text, _ in other.messages] == [str(number) for number in range(1000)]
    assert [len(fds) for _, fds in other.messages] == [2 if number % 10 == 0 else 0 for number in range(1000)]
    assert one.channel.pending_bytes == 0
    for _, fds in other.messages[::10]:
        os.write(fds[1], b"x")
        assert os.read(fds[0], 1) == b"x"


async def test_lent_descriptors_stay_open(ends: tuple[End, End]) -> None:
    one, other = ends
    pipe = os.pipe()
    one.channel.send(Note("lent"), pipe, lent=True)
    await until(lambda: other.messages)
    for fd in pipe:
        os.close(fd)  # raises where it was closed before


async def test_as_many_descriptors_as_the_kernel_takes_pass_in_one_message(ends: tuple[End, End]) -> None:
    one, other = ends
    one.channel.send(Note("many"), [os.dup(0) for _ in range(MAX_DESCRIPTORS)])
    await until(lambda: other.messages)
    assert len(set(other.messages[0][1])) == MAX_DESCRIPTORS


async def test_who_has_no_room_for_descriptors_gets_the_message_with_fewer(ends: tuple[End, End]) -> None:
    one, other = ends
    one.channel.send(Note("too many"), [os.dup(0) for _ in range(10)])
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with at_most(lowest_free + 4):
        await until(lambda: other.messages)
    assert len(other.messages[0][1]) < 10
    one.channel.send(Note("next"), [os.dup(0)])
    await until(lambda: len(other.messages) == 2)
    assert len(other.messages[1][1]) == 1


async def test_an_end_that_closes_is_noticed_by_the_other(ends: tuple[End, End]) -> None:
    one, other = ends
    one.channel.send(Note("farewell"))
    one.channel.close()
    await until(lambda: other.reasons)
    assert (other.messages, other.reasons, one.reasons) == ([("farewell", [])], [""], [])
    fd = os.dup(0)
    one.channel.send(Note("too late"), [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("!IB", MAX_MESSAGE_BYTES + 1, 0), "a message has 8388609 bytes and 0 descriptors"),
        (struct.pack("!IB", 1, 254) + b"x", "a message has 1 bytes and 254 descriptors"),
        (struct.pack("!IB", 1, 0) + b"\xc1", "a message cannot be read"),
        (struct.pack("!IB", 6, 0) + msgspec.msgpack.encode({"txt": 1}), "a message cannot be read"),
        (struct.pack("!IB", 7, 0) + msgspec.msgpack.encode({"text": 1}), "a message cannot be read"),
        (struct.pack("!IB", 12, 0) + msgspec.msgpack.encode({"text": "fault"}), "Note could not be handled"),
    ],
)
async def test_what_is_no_message_ends_the_channel_with_a_reason(
    raw: tuple[socket.socket, End], data: bytes, reason: str
) -> None:
    ours, end = raw
    ours.sendall(data)
    await until(lambda: end.reasons)
    assert end.reasons[0].startswith(reason)
    assert not end.channel.is_open


async def test_a_message_that_is_cut_short_is_told(raw: tuple[socket.socket, End]) -> None:
    ours, end = raw
    ours.sendall(struct.pack("!IB", 5, 0))
    ours.close()
    await until(lambda: end.reasons)
    assert end.reasons == ["the last message was cut short"]


async def test_descriptors_of_no_message_end_the_channel(raw: tuple[socket.socket, End]) -> None:
    ours, end = raw
    body = msgspec.msgpack.encode(Note("none"))
    socket.send_fds(ours, [struct.pack("!IB", len(body), 0) + body], [0])
    await until(lambda: end.reasons)
    assert end.reasons == ["descriptors came that belong to no message"]
