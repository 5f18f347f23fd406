"""Many datagrams at once: one set of arrays for all listeners, so that a listener costs no memory for it.

Replies wait until the poller's turn ends, and leave in the order in which they came, by one system call for each run of
one listener's.
"""

from __future__ import annotations

import logging
import socket
from typing import Protocol

from userspace_proxy.dataplane.mmsg import BATCH, ReceiveBatch, SendBatch
from userspace_proxy.dataplane.poller import Poller

_log = logging.getLogger(__name__)


class Counting(Protocol):
    """Whoever has the poller and counts what is dropped."""

    poller: Poller
    dropped_datagrams: int


class DatagramBatches:
    """Receives for any listener; collects the replies of one listener at a time."""

    def __init__(self, engine: Counting) -> None:
        """Raises OSError where the system lacks the calls, or memory."""
        self.requests = ReceiveBatch()
        self._engine = engine
        self._replies = SendBatch()
        self._listener_fd = -1
        self._awaits_turn_end = False

    def collect_reply(self, sock: socket.SocketType, envelope: bytes, listener_fd: int) -> int:
        """Receive a reply, which will leave from the listener's socket in this envelope. Return its size.

        Raises OSError, and then has collected nothing.
        """
        replies = self._replies
        if listener_fd != self._listener_fd or replies.count == BATCH:
            self.send_replies()
            self._listener_fd = listener_fd
        size = replies.receive_from(sock, envelope)
        if not self._awaits_turn_end:
            self._awaits_turn_end = True
            self._engine.poller.at_turn_end(self._end_turn)
        return size

    def send_replies(self) -> None:
        """Send what was collected. What cannot be sent is dropped: as if lost on the way."""
        if self._replies.count:
            self._engine.dropped_datagrams += self._replies.send(self._listener_fd)

    def _end_turn(self) -> None:
        self._awaits_turn_end = False
        self.send_replies()


def make_batches(engine: Counting) -> DatagramBatches | None:
    """Return what receives and sends many datagrams at once, or None where the system cannot."""
    try:
        return DatagramBatches(engine)
    except OSError as error:
        _log.info("each datagram is received and sent by itself, as recvmmsg is not to be had: %s", error.strerror)
        return None
