"""All backends of a run: starts them, tells them how to behave, brings them back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from userspace_proxy.bench.addresses import Address, parse_address
from userspace_proxy.bench.backend.behaviour import BackendReport, Behaviour, Command
from userspace_proxy.bench.processes import Child, StartFailed, start

_PATIENCE_S = 10.0


class Backend:
    """One backend process, which keeps its address when it is started again."""

    def __init__(self, number: int, address: str, *, cpus: Collection[int], directory: Path) -> None:
        self.number = number
        self._wanted = address
        self._cpus, self._stderr_path = cpus, directory / f"backend-{number}.log"
        self._child: Child | None = None
        self._is_frozen = False
        self.behaviour = Behaviour()

    @property
    def address(self) -> Address:
        return parse_address(self._wanted)

    @property
    def child(self) -> Child | None:
        return self._child

    async def start(self) -> None:
        """Start the process, or do nothing when it runs. Raises StartFailed."""
        if self._child is not None and self._child.is_running:
            return
        module = "userspace_proxy.bench.backend.server"
        command = (sys.executable, "-m", module, str(self.number), self._wanted)
        self._child = await start(command, cpus=self._cpus, stderr_path=self._stderr_path, with_pipes=True)
        self._wanted = (await self._answer()).address
        self.behaviour, self._is_frozen = Behaviour(), False

    async def tell(self, command: Command) -> BackendReport | None:
        """Tell the backend something; return its report, or None when it does not live to give one."""
        if self._child is None or not self._child.is_running or self._is_frozen:
            return None
        self._child.stdin.write(msgspec.json.encode(command) + b"\n")
        try:
            return await self._answer()
        except StartFailed:
            return None

    async def behave(self, behaviour: Behaviour) -> None:
        """Make the backend behave like that from now on."""
        self.behaviour = behaviour
        await self.tell(Command(behave=behaviour))

    async def kill(self) -> None:
        if self._child is not None:
            await self._child.kill()

    def freeze(self, *, frozen: bool) -> None:
        """Stop the process where it stands, or let it go on."""
        if self._child is not None:
            self._is_frozen = frozen
            self._child.signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    async def restore(self) -> None:
        """Make it a good backend again, whatever has happened to it. Raises StartFailed."""
        self.freeze(frozen=False)
        await self.start()
        if self.behaviour != Behaviour():
            await self.behave(Behaviour())

    async def stop(self) -> None:
        if self._child is not None:
            self.freeze(frozen=False)
            self._child.stdin.close()
            await self._child.stop()

    async def _answer(self) -> BackendReport:
        assert self._child is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                line = await self._child.stdout.readline()
                if line:
                    return msgspec.json.decode(line, type=BackendReport)
        raise StartFailed(f"backend {self.number} on {self._wanted}: {self._child.complaints() or 'does not answer'}")


class Fleet:
    """The backends of a run while its context is open."""

    def __init__(self, addresses: Sequence[str], *, cpus: Collection[int], directory: Path) -> None:
        self.backends = [
            Backend(number, address, cpus=cpus, directory=directory) for number, address in enumerate(addresses, 1)
        ]

    async def __aenter__(self) -> Self:
        try:
            await self.restore()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    def __getitem__(self, number: int) -> Backend:
        """Return a backend by its number, from 1."""
        return self.backends[number - 1]

    def pids(self) -> list[int]:
        """Return the processes that run."""
        children = [backend.child for backend in self.backends]
        return [child.pid for child in children if child is not None and child.is_running]

    async def restore(self) -> None:
        """Make all backends good ones. Raises StartFailed."""
        for backend in self.backends:
            await backend.restore()

    async def reports(self, *, start_over: bool) -> list[BackendReport]:
        """Return what the living have seen, and let them count from 0."""
        found = [await backend.tell(Command(report=True, start_over=start_over)) for backend in self.backends]
        return [report for report in found if report is not None]

    async def _stop(self) -> None:
        for backend in self.backends:
            await backend.stop()
