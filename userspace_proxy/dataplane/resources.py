"""What to do when the system has no descriptor left: stop accepting, say so once, go on when there are some."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

_RETRY_S = 0.1
_LOG_INTERVAL_S = 30.0

_log = logging.getLogger(__name__)


class DescriptorGate:
    """Closed while descriptors are out. Whoever got none leaves word of how to go on when there are some again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, free_some: Callable[[], None]) -> None:
        self.is_closed = False
        self.times_closed = 0
        self.may_open: Callable[[], bool] = lambda: True
        """What has to be true beside that this process has descriptors."""
        self._loop = loop
        self._free_some = free_some
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._last_logged: float | None = None

    def close(self, error: OSError) -> None:
        """Close for this reason, until two descriptors are free."""
        if self.is_closed:
            return
        self.is_closed = True
        self.times_closed += 1
        now = self._loop.time()
        if self._last_logged is None or now - self._last_logged >= _LOG_INTERVAL_S:
            self._last_logged = now
            _log.error("%s: no connection is accepted until others are closed", os.strerror(error.errno or 0).lower())
        self._free_some()
        self._timer = self._loop.call_later(_RETRY_S, self._try_to_open)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once, when the gate, which is closed, opens."""
        self._waiting.append(go_on)

    def shutdown(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _try_to_open(self) -> None:
        if not (self.may_open() and _has_descriptors()):
            self._timer = self._loop.call_later(_RETRY_S, self._try_to_open)
            return
        self._timer = None
        self.is_closed = False
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()


def _has_descriptors() -> bool:
    try:
        for fd in os.pipe():
            os.close(fd)
    except OSError:
        return False
    return True
