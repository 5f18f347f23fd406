"""Rules through python-iptables, for hosts without the iptables programs. It edits the legacy tables only.

The library is not thread safe, holds one family's NAT per process and borrows the process's standard output. So it
lives in a child process per family (`libiptc_child`), which gets one request at a time and is started anew if it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect import fingerprints
from userspace_proxy.redirect.libiptc_child import Answer, Request
from userspace_proxy.redirect.programs import TIME_LIMIT_S
from userspace_proxy.redirect.tables import TableChange, Tables


def is_installed() -> bool:
    """Return whether python-iptables can be imported in a child."""
    return find_spec("iptc") is not None


class LibiptcBackend:
    """The legacy tables of one family through a child process."""

    name = "libiptc"
    fingerprint_skips_own_writes = False

    def __init__(self, family: IPFamily) -> None:
        self.family = family
        self._child: asyncio.subprocess.Process | None = None
        self._fingerprint = fingerprints.opened(False, family)

    async def read(self) -> Tables:
        return await self._ask(Request()) or {}

    async def write(self, changes: Sequence[TableChange]) -> None:
        await self._ask(Request(tuple(changes)))

    def fingerprint(self) -> int | None:
        return self._fingerprint()

    async def close(self) -> None:
        self._fingerprint.close()
        await self._stop()

    async def _ask(self, request: Request) -> Tables | None:
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                answer = await self._exchange(request)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self._stop()
            raise RedirectFailed("libiptc", f"its process gave no answer: {error or 'too slow'}") from error
        except asyncio.CancelledError:
            await self._stop()
            raise
        if answer.error is not None:
            raise answer.error
        return answer.tables

    async def _exchange(self, request: Request) -> Answer:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                "from userspace_proxy.redirect.libiptc_child import main; main()",
                str(int(self.family)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        message = pickle.dumps(request)
        stdin.write(struct.pack("!I", len(message)) + message)
        await stdin.drain()
        (length,) = struct.unpack("!I", await stdout.readexactly(4))
        answer = pickle.loads(await stdout.readexactly(length))  # a pipe from our own child
        assert isinstance(answer, Answer)
        return answer

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
