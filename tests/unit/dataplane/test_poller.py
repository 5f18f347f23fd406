"""The poller, where it has to know more than which descriptor is ready."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from userspace_proxy.dataplane.poller import make_poller


class Recorder:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[int] = []

    def on_ready(self, events: int) -> None:
        self.events.append(events)


@pytest.mark.parametrize("kind", ["epoll", "loop"])
async def test_a_closed_descriptor_that_another_process_still_has_tells_nothing_to_the_next_one(kind: str) -> None:
    poller = make_poller(kind, asyncio.get_running_loop(), are_shared=True)
    first, first_peer = socket.socketpair()
    second, second_peer = socket.socketpair()
    number = first.detach()
    copy = os.dup(number)  # as if in another process
    try:
        poller.watch(number, Recorder())
        poller.close(number)
        assert os.dup(second.fileno()) == number
        recorder = Recorder()
        poller.watch(number, recorder)
        first_peer.send(b"late")
        for _ in range(5):
            await asyncio.sleep(0)
        assert recorder.events == []
        second_peer.send(b"!")
        async with asyncio.timeout(5.0):
            while not recorder.events:  # noqa: ASYNC110 - the loop has to turn
                await asyncio.sleep(0)
        poller.close(number)
    finally:
        poller.shutdown()
        os.close(copy)
        for sock in (first_peer, second, second_peer):
            sock.close()
