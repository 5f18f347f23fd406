"""The process of a worker: started by exec, so that it has nothing of its parent's but one end of a channel."""

from __future__ import annotations

import socket
import subprocess
import sys

_LAST_BREATH_S = 0.1


class WorkerProcess:
    """A process that runs, or has ended and is not forgotten yet."""

    def __init__(self, channel_end: socket.socket, loop_kind: str) -> None:
        """Start it on an event loop of this kind, `uvloop` or `asyncio`. Raises OSError."""
        fd = channel_end.fileno()
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "userspace_proxy.dataplane.worker", str(fd), loop_kind],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # the terminal's signals are for this process, which tells the workers
        )

    @property
    def id(self) -> int:
        return self._popen.pid

    def end_text(self) -> str | None:
        """Return how it has ended, as part of a sentence; None if it has not, though it was about to."""
        try:
            code = self._popen.wait(_LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            return None
        return f"was ended by signal {-code}" if code < 0 else f"has ended with exit status {code}"

    def end(self) -> None:
        """End it at once, whatever it does, and wait until it has ended."""
        self._popen.kill()
        self._popen.wait()
