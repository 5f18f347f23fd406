"""The generator processes of a run: given jobs, asked for what they saw."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from userspace_proxy.bench.generator.job import Job, Raw
from userspace_proxy.bench.processes import Child, start
from userspace_proxy.bench.quantities import number_of_quantity
from userspace_proxy.core.errors import ProxyError

_GRACE_S = 30.0


class GeneratorFailed(ProxyError):
    """A generator process broke down, which is nobody's fault but ours."""


class Crew:
    """So many generator processes while its context is open. They are kept from job to job."""

    def __init__(self, size: int, *, cpus: Collection[int], directory: Path) -> None:
        self._size, self._cpus, self._directory = size, cpus, directory
        self._children: list[Child] = []
        self._decoder = msgspec.msgpack.Decoder(Raw)

    async def __aenter__(self) -> Self:
        command = (sys.executable, "-m", "userspace_proxy.bench.generator")
        for number in range(self._size):
            log = self._directory / f"generator-{number}.log"
            self._children.append(await start(command, cpus=self._cpus, stderr_path=log, with_pipes=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in self._children:
            child.stdin.close()
            if error is not None:
                await child.kill()  # it may be in the middle of a job
            await child.stop()

    async def carry_out(self, jobs: Sequence[Job]) -> list[Raw]:
        """Give each process one job, and return what they saw. Raises GeneratorFailed."""
        async with asyncio.TaskGroup() as tasks:
            pairs = zip(self._children, jobs, strict=False)
            running = [tasks.create_task(self._carry_out(child, job)) for child, job in pairs]
        return [task.result() for task in running]

    async def _carry_out(self, child: Child, job: Job) -> Raw:
        limit_s = job.warm_up_s + job.duration_s + 3 * float(job.load.timeout) + _GRACE_S
        child.stdin.write(msgspec.json.encode(job, enc_hook=number_of_quantity) + b"\n")
        try:
            async with asyncio.timeout(limit_s):
                size = int.from_bytes(await child.stdout.readexactly(4), "big")
                raw = self._decoder.decode(await child.stdout.readexactly(size))
        except (TimeoutError, asyncio.IncompleteReadError):
            raise GeneratorFailed(f"a generator broke down. {child.complaints()}") from None
        if raw.fault:
            raise GeneratorFailed(f"a generator broke down:\n{raw.fault}")
        return raw
