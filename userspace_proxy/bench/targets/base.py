"""What the runner needs of any target, and what all that we start ourselves have in common."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Protocol

from userspace_proxy.bench import wire
from userspace_proxy.bench.addresses import Address, free_port
from userspace_proxy.bench.processes import Child, StartFailed, start

HOST = "127.0.0.1"
_READY_WITHIN_S = 15.0
_UDP_READY_WITHIN_S = 3.0
_POLL_S = 0.01


class Unsupported(Exception):
    """The target cannot do what a test asks for. The message says what."""


class Target(Protocol):
    """Something that is measured."""

    name: str

    def missing(self) -> str | None:
        """Return what has to be installed first, or None."""

    def why_not(self, *, udp: bool, affinity: bool, endpoints_change: bool) -> str | None:
        """Return why the target cannot take part in a test of that kind, or None."""

    async def start(self, backends: Sequence[Address], affinity_s: float | None, *, tcp: bool, udp: bool) -> None:
        """Be ready to be asked. Raises StartFailed."""

    async def set_endpoints(self, backends: Sequence[Address]) -> None:
        """Balance over these from now on."""

    async def stop(self) -> None:
        """End, and leave nothing behind."""

    def addresses(self, backends: Sequence[Address], *, udp: bool) -> list[Address]:
        """Return where the load goes."""

    def pids(self) -> list[int]:
        """Return the processes whose cost is the target's; none where that is not known."""

    def family(self) -> Child | None:
        """Return the process that we have started, if any."""

    def description(self) -> tuple[str, str]:
        """Return the command and the configuration, for the record."""


class Managed:
    """A target that we start with a configuration of ours in `directory`, on CPUs of its own."""

    def __init__(self, name: str, program: Sequence[str], *, directory: Path, cpus: Collection[int]) -> None:
        self.name = name
        self.directory = directory / name.replace(" ", "-")
        self.port = 0
        self.has_udp: bool | None = None  # whether it answered datagrams when it was started
        self.affinity_s: float | None = None
        self._program, self._cpus = tuple(program), cpus
        self._child: Child | None = None

    @property
    def listen(self) -> str:
        return f"{HOST}:{self.port}"

    # What each kind says for itself

    def configure(self, backends: Sequence[Address], *, tcp: bool, udp: bool) -> list[str]:
        """Write the configuration. Return the command's arguments."""
        raise NotImplementedError

    def configuration(self) -> str:
        """Return the configuration as it was written."""
        return ""

    # What all have in common

    def missing(self) -> str | None:
        program = self._program[0]
        return None if shutil.which(program) else f"{program} is not installed"

    def why_not(self, *, udp: bool, affinity: bool, endpoints_change: bool) -> str | None:
        return None

    async def start(self, backends: Sequence[Address], affinity_s: float | None, *, tcp: bool, udp: bool) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port, self.affinity_s = free_port(HOST), affinity_s
        arguments = self.configure(backends, tcp=tcp, udp=udp)
        log = self.directory / "stderr.log"
        log.unlink(missing_ok=True)
        self._child = await start([*self._program, *arguments], cpus=self._cpus, stderr_path=log)
        try:
            if tcp:
                async with asyncio.timeout(_READY_WITHIN_S):
                    await until(self._accepts)
            if udp:
                self.has_udp = await within(_UDP_READY_WITHIN_S, until(self._answers_datagrams))
        except TimeoutError:
            complaints = self._child.complaints()
            await self.stop()
            raise StartFailed(f"{self.name} was not ready within {_READY_WITHIN_S:g} s. {complaints}") from None
        except BaseException:
            await self.stop()
            raise

    async def set_endpoints(self, backends: Sequence[Address]) -> None:
        raise Unsupported(f"{self.name} cannot be told of endpoints")

    async def stop(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await child.stop()

    def addresses(self, backends: Sequence[Address], *, udp: bool) -> list[Address]:
        return [(HOST, self.port)]

    def pids(self) -> list[int]:
        return self._child.family() if self._child else []

    def family(self) -> Child | None:
        return self._child

    def description(self) -> tuple[str, str]:
        return " ".join(self._program), self.configuration()

    async def _accepts(self) -> bool:
        self._require_running()
        return await accepts((HOST, self.port))

    async def _answers_datagrams(self) -> bool:
        self._require_running()
        return await answers_datagrams((HOST, self.port))

    def _require_running(self) -> None:
        if self._child is None or not self._child.is_running:
            complaints = self._child.complaints() if self._child else ""
            raise StartFailed(f"{self.name} ended at once. {complaints}")


async def until(is_ready: Callable[[], Awaitable[bool]]) -> None:
    """Return when it is so. Only another's word can tell, so it is asked again and again."""
    while not await is_ready():  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


async def within(limit_s: float, waiting: Coroutine[None, None, None]) -> bool:
    """Tell whether what is waited for happened in time."""
    try:
        async with asyncio.timeout(limit_s):
            await waiting
    except TimeoutError:
        return False
    return True


async def accepts(address: Address) -> bool:
    """Tell whether somebody accepts TCP connections there."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(*address)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
    return False


async def answers_datagrams(address: Address, request: bytes = b"", within_s: float = 0.1) -> bool:
    """Tell whether a datagram is answered, by a backend of ours unless another request is given."""
    request = request or wire.pack(wire.REQUEST, 0, wire.HEADER.size, wire.HEADER.size)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):
            sock.connect(address)
            sock.send(request)
            async with asyncio.timeout(within_s):
                return bool(await asyncio.get_running_loop().sock_recv(sock, wire.MAX_DATAGRAM))
    await asyncio.sleep(_POLL_S)
    return False
