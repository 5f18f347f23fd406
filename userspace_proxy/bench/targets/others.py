"""No balancer at all, any program, and whatever runs already."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from userspace_proxy.bench import addresses
from userspace_proxy.bench.addresses import text_of
from userspace_proxy.bench.processes import Child, StartFailed, family_of
from userspace_proxy.bench.scenario import Address, Command, Direct
from userspace_proxy.bench.targets.base import HOST, Managed, accepts, answers_datagrams, until, within

_READY_WITHIN_S = 10.0
_UDP_READY_WITHIN_S = 2.0


class DirectTarget:
    """The backends themselves: what the harness reaches without anything between."""

    def __init__(self, spec: Direct) -> None:
        self.name = spec.name

    def missing(self) -> str | None:
        return None

    def why_not(self, *, udp: bool, affinity: bool, endpoints_change: bool) -> str | None:
        if affinity:
            return "nothing is there to remember clients"
        return "nothing is there to be told of endpoints" if endpoints_change else None

    async def start(
        self, backends: Sequence[addresses.Address], affinity_s: float | None, *, tcp: bool, udp: bool
    ) -> None:
        """There is nothing to start."""

    async def set_endpoints(self, backends: Sequence[addresses.Address]) -> None:
        """Nobody has to be told."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    def addresses(self, backends: Sequence[addresses.Address], *, udp: bool) -> list[addresses.Address]:
        return list(backends)

    def pids(self) -> list[int]:
        return []

    def family(self) -> Child | None:
        return None

    def description(self) -> tuple[str, str]:
        return "the generator connects to the backends, one after the other", ""


class CommandTarget(Managed):
    """A program of the user's own."""

    def __init__(self, spec: Command, *, directory: Path, cpus: Collection[int]) -> None:
        super().__init__(spec.name, spec.command[:1], directory=directory, cpus=cpus)
        self._spec = spec

    def why_not(self, *, udp: bool, affinity: bool, endpoints_change: bool) -> str | None:
        if udp and self._spec.udp is False:
            return "it has no UDP (udp: false)"
        if udp and self._spec.udp is None and self.has_udp is False:
            return "it answers no datagrams (udp: true makes that a fault)"
        if endpoints_change and self._spec.reload == "none":
            return "it cannot be told of endpoints (reload: none)"
        return None

    def configure(self, backends: Sequence[addresses.Address], *, tcp: bool, udp: bool) -> list[str]:
        self._write(backends)
        values = {
            "host": HOST,
            "port": str(self.port),
            "listen": self.listen,
            "backends": ",".join(map(text_of, backends)),
            "backends_spaced": " ".join(map(text_of, backends)),
            "backends_file": str(self._file),
            "affinity": f"{self.affinity_s or 0:g}",
        }
        arguments = []
        for word in self._spec.command[1:]:
            for name, value in values.items():
                word = word.replace("{" + name + "}", value)
            arguments.append(word)
        return arguments

    async def set_endpoints(self, backends: Sequence[addresses.Address]) -> None:
        self._write(backends)
        if self._spec.reload != "file" and self._child is not None:
            self._child.signal(getattr(signal, self._spec.reload))

    def description(self) -> tuple[str, str]:
        return " ".join(self._spec.command), ""

    @property
    def _file(self) -> Path:
        return self.directory / "backends"

    def _write(self, backends: Sequence[addresses.Address]) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(text_of(address) + "\n" for address in backends))
        new.replace(self._file)


class AddressTarget:
    """Something that runs already. We neither start, stop nor configure it."""

    def __init__(self, spec: Address, *, allow_remote: bool) -> None:
        self.name = spec.name
        self._spec = spec
        self._tcp = addresses.resolve(spec.address, allow_remote=allow_remote)
        self._has_udp: bool | None = True if spec.udp_address else None
        self._udp = addresses.resolve(spec.udp_address or spec.address, allow_remote=allow_remote)

    def missing(self) -> str | None:
        return None

    def why_not(self, *, udp: bool, affinity: bool, endpoints_change: bool) -> str | None:
        if udp and self._has_udp is False:
            return "it answers no datagrams (udp_address makes that a fault)"
        return "it cannot be told of endpoints" if endpoints_change else None

    async def start(
        self, backends: Sequence[addresses.Address], affinity_s: float | None, *, tcp: bool, udp: bool
    ) -> None:
        request = self._spec.request.encode() if self._spec.own_backends else b""
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                if tcp:
                    await until(lambda: accepts(self._tcp))
        except TimeoutError:
            raise StartFailed(f"{self.name}: nobody answers on {self._spec.address}") from None
        if udp and self._has_udp is None:
            probe = until(lambda: answers_datagrams(self._udp, request, within_s=0.5))
            self._has_udp = await within(_UDP_READY_WITHIN_S, probe)

    async def set_endpoints(self, backends: Sequence[addresses.Address]) -> None:
        """It knows its backends already."""

    async def stop(self) -> None:
        """It is not ours."""

    def addresses(self, backends: Sequence[addresses.Address], *, udp: bool) -> list[addresses.Address]:
        return [self._udp if udp else self._tcp]

    def pids(self) -> list[int]:
        return family_of(self._spec.pid) if self._spec.pid else []

    def family(self) -> Child | None:
        return None

    def description(self) -> tuple[str, str]:
        return self._spec.address, ""
