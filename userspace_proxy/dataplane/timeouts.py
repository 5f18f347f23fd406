"""Connections that ended as nothing happened on them: how many, and one line in the log each 10 s."""

from __future__ import annotations

import asyncio
import logging

from userspace_proxy.dataplane.backends import Target
from userspace_proxy.dataplane.complaint import Complaint

_log = logging.getLogger(__name__)


class TimeOuts:
    """Counts three kinds: half-closed and silent; silent; given up by the kernel, as a peer acknowledged nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.half_close = 0
        self.idle = 0
        self.peer = 0
        self._loop = loop
        self._half_close_complaint, self._idle_complaint, self._peer_complaint = (Complaint(_log) for _ in range(3))

    def note_half_close(self, target: Target, timeout_s: float) -> None:
        """Count a half-closed connection to this target, on which nothing moved for so long."""
        self.half_close += 1
        self._complain(self._half_close_complaint, target, f"half-closed and silent for {timeout_s:g} s")

    def note_idle(self, target: Target, timeout_s: float) -> None:
        """Count a connection to this target, on which nothing moved for so long."""
        self.idle += 1
        self._complain(self._idle_complaint, target, f"silent for {timeout_s:g} s")

    def note_peer(self, target: Target) -> None:
        """Count a connection to this target: its client, or the target, did not acknowledge what was sent."""
        self.peer += 1
        self._complain(self._peer_complaint, target, "not acknowledged by a peer any more")

    def _complain(self, complaint: Complaint, target: Target, why: str) -> None:
        text = f"{target.name} (TCP): a connection to {target.endpoint} was closed, as it was {why}"
        complaint.say(text, now=self._loop.time())
