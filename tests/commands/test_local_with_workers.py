"""`userspace-proxy local --workers`: several processes, of which none is left behind, however the first one ends."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.processes import Running

from .conftest import RunLocal, RunToEnd, ask, connection, free_port, until

StartBackends = Callable[[int], Awaitable[list[int]]]


def workers_of(running: Running) -> list[int]:
    """The process ids of the workers."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    return [int(child) for child in children.read_text().split()]


def is_gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def are_gone(process_ids: list[int]) -> bool:
    return all(map(is_gone, process_ids))


def services(port: int, backends: list[int]) -> str:
    return f"web:{port}=" + ",".join(f"127.0.0.1:{backend}" for backend in backends)


async def test_connections_take_exact_turns_over_two_workers(local: RunLocal, backends: StartBackends) -> None:
    ports, port = await backends(3), free_port()
    async with local("--service", services(port, ports), "--workers", "2") as running:
        assert Counter([await ask(port) for _ in range(12)]) == {b"%d" % backend: 4 for backend in ports}
        assert len(workers_of(running)) == 2
        assert await running.stop() == 0


async def test_sigterm_lets_workers_drain_and_ends_them(local: RunLocal, backends: StartBackends) -> None:
    ports, port = await backends(1), free_port()
    async with local("--service", services(port, ports), "--workers=2", "--drain-timeout=5s") as running:
        workers = workers_of(running)
        async with connection(port) as (reader, writer):
            assert await reader.readexactly(len(str(ports[0]))) == b"%d" % ports[0]
            for process_id in (running.process.pid, *workers):  # as systemd does it
                os.kill(process_id, signal.SIGTERM)
            writer.write(b"still here")
            await writer.drain()
            assert not any(map(is_gone, workers))
        assert await running.ended() == 0
        assert await are_gone(workers)


async def test_workers_end_when_the_first_process_is_killed(local: RunLocal, backends: StartBackends) -> None:
    ports, port = await backends(1), free_port()
    async with local("--service", services(port, ports), "--workers=2") as running:
        assert await ask(port) == b"%d" % ports[0]
        workers = workers_of(running)
        running.process.kill()
        await running.ended()
        await until(lambda: are_gone(workers), 5.0)


async def test_auto_is_a_worker_for_each_cpu_and_one_is_none(local: RunLocal, backends: StartBackends) -> None:
    ports, port = await backends(1), free_port()
    cpus = len(os.sched_getaffinity(0))
    for flag, expected in (("--workers=auto", cpus if cpus > 1 else 0), ("--workers=1", 0)):
        async with local("--service", services(port, ports), flag) as running:
            assert await ask(port) == b"%d" % ports[0]
            assert len(workers_of(running)) == expected
            assert await running.stop() == 0


@pytest.mark.parametrize("number", ["0", "-1", "many", ""])
async def test_what_is_no_number_of_workers_is_refused(run_to_end: RunToEnd, number: str) -> None:
    ended = await run_to_end("local", "--service", "web:1=127.0.0.1:1", f"--workers={number}")
    assert ended.exit_code == 2
    assert f"{number!r} is neither a number of processes nor auto" in ended.stderr
