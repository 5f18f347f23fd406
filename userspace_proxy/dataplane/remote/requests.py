"""Requests to the other process, and who waits for their answers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from itertools import count

import msgspec

from userspace_proxy.dataplane.channel import Channel
from userspace_proxy.dataplane.remote.messages import Answered, Done, Page, Report

Answer = asyncio.Future[Done | Page | None]
"""What a request is answered with; None where the other process is gone, or not there."""


class Requests:
    """Sends requests over a channel, while there is one, and finds for each answer who waits for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel: Channel[Report] | None = None
        self._answers: dict[int, Answer] = {}
        self._ids = count(1)

    def use(self, channel: Channel[Report]) -> None:
        """Send over this channel from now on."""
        self._channel = channel

    def stop(self) -> None:
        """Send nothing more. Whoever waits for an answer gets none."""
        self._channel = None
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(None)

    def send(self, request: Answered, sockets: Iterable[socket.socket] = ()) -> Answer:
        """Send a request with copies of sockets, and return what will have its answer. Raises OSError for no copies."""
        answer: Answer = self._loop.create_future()
        if self._channel is None:
            answer.set_result(None)
            return answer
        copies = _copies(sockets)
        number = next(self._ids)
        self._answers[number] = answer
        self._channel.send(msgspec.structs.replace(request, id=number), copies)
        return answer

    def take(self, answer: Done | Page) -> None:
        """Give an answer to whoever waits for it, if somebody does still."""
        waiting = self._answers.pop(answer.to, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


def _copies(sockets: Iterable[socket.socket]) -> list[int]:
    """Return a copy of each descriptor. Raises OSError when there cannot be all of them."""
    copies: list[int] = []
    try:
        for sock in sockets:
            copies.append(os.dup(sock.fileno()))
    except OSError:
        for fd in copies:
            os.close(fd)
        raise
    return copies
