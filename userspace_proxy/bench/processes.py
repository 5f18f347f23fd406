"""Processes that we start: on CPUs of their own, in sessions of their own, as Ctrl-C is for us alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from userspace_proxy.core.errors import ProxyError

_PATIENCE_S = 3.0
_STDERR_KEPT = 2000


class StartFailed(ProxyError):
    """A program could not be started, or ended before it was ready. The message says why."""


class Child:
    """A running process. `stderr_path` is where its complaints go."""

    def __init__(self, process: asyncio.subprocess.Process, stderr_path: Path | None) -> None:
        self._process, self._stderr_path = process, stderr_path
        self.pid = process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    def family(self) -> list[int]:
        """Return the ids of the process and of all its descendants."""
        return family_of(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def signal_family(self, number: int) -> None:
        """Send a signal to the process and all its descendants."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self) -> None:
        """End the process without warning, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """End the process and whatever it has started; kindly first."""
        family = self.family()
        self.signal_family(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._process.wait()
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid != self.pid or self.is_running:
                    os.kill(pid, signal.SIGKILL)
        await self._process.wait()

    def complaints(self) -> str:
        """Return the end of what the process wrote to stderr."""
        if self._stderr_path is None:
            return ""
        with contextlib.suppress(OSError):
            return self._stderr_path.read_text(errors="replace").strip()[-_STDERR_KEPT:]
        return ""


async def start(
    command: Sequence[str],
    *,
    cpus: Collection[int] = (),
    stderr_path: Path | None = None,
    with_pipes: bool = False,
    cwd: Path | None = None,
) -> Child:
    """Start a program. Raises StartFailed when there is no such program."""
    pipe = asyncio.subprocess.PIPE if with_pipes else asyncio.subprocess.DEVNULL
    with contextlib.ExitStack() as stack:
        stderr = stack.enter_context(stderr_path.open("ab")) if stderr_path else None
        stack.enter_context(on_cpus(cpus))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True, cwd=cwd, limit=2**26
            )
        except OSError as error:
            raise StartFailed(f"{command[0]}: {error.strerror}") from None
    return Child(process, stderr_path)


@contextlib.contextmanager
def on_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Run what is inside, and the processes that it starts, on these CPUs; on all where none are given."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def family_of(pid: int) -> list[int]:
    """Return the process and all its descendants, as far as they still exist."""
    found, to_visit = [], [pid]
    while to_visit:
        current = to_visit.pop()
        found.append(current)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{current}/task"):
                children = Path(f"/proc/{current}/task/{task}/children").read_text()
                to_visit.extend(int(child) for child in children.split())
    return found


def split_cpus(*, pin: bool) -> tuple[list[int], list[int]]:
    """Return the CPUs for the harness and those for targets; nothing where they cannot be kept apart."""
    cpus = sorted(os.sched_getaffinity(0))
    if not pin or len(cpus) < 2:
        return [], []
    half = len(cpus) // 2
    return cpus[:half], cpus[half:]
