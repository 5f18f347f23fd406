"""The program as a process: its signals, its log, its end."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field

PROGRAM = [sys.executable, "-m", "userspace_proxy"]
PATIENCE_S = 10.0


@dataclass
class Running:
    """A process that runs. `table` is what `local` has printed at its start."""

    process: asyncio.subprocess.Process
    table: str = ""
    log: list[str] = field(default_factory=list)
    _new_line: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Return the exit code once it has ended by itself."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def logged(self, text: str, *, after: int = 0) -> str:
        """Return the first log line that contains the text, as soon as there is one. The first `after` do not count."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    for line in self.log[after:]:
                        if text in line:
                            return line
                    self._new_line.clear()
                    await self._new_line.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in the log:\n{''.join(self.log)}") from None

    async def read_log(self) -> None:
        """Collect what the process writes to stderr, until it ends."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())
            self._new_line.set()
