"""The limits of TCP as options of `userspace-proxy local`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from .conftest import RunLocal, RunToEnd, ask, connection, free_port

StartBackends = Callable[[int], Awaitable[list[int]]]


async def test_clients_beyond_the_limit_wait_for_a_place(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    async with local(f"--service=web:{port}=127.0.0.1:{backend}", "--max-connections=1") as running:
        async with connection(port) as (reader, _):
            assert await reader.read() == b"%d" % backend
            waiting = asyncio.create_task(ask(port))
            await running.logged("at the limit of 1 connections (maxConnections); others wait to be accepted")
            assert not waiting.done()
        assert await waiting == b"%d" % backend


async def test_all_limits_can_be_set(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    options = "--max-connections=9 --max-connections-per-service-port=1 --listen-backlog=100 --tcp-user-timeout=30s"
    times = "--tcp-idle-timeout=300ms --half-close-timeout=1m --dial-ladder=100ms,1s"
    async with local(f"--service=web:{port}=127.0.0.1:{backend}", *options.split(), *times.split()) as running:
        async with connection(port) as (reader, _):
            assert await reader.read() == b"%d" % backend
            await running.logged("silent for 0.3 s")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--max-connections=-1", "-1 is not in the range 0<=x<=2147483647"),
        ("--listen-backlog=0", "0 is not in the range 1<=x<=65535"),
        ("--tcp-idle-timeout=-1s", "must not be negative"),
        ("--half-close-timeout=0", "must be greater than 0"),
        ("--tcp-user-timeout=1000h", "must be less than or equal to 576h0m0s"),
        ("--dial-ladder=250ms,0s", "time limit 2 (0s): must be greater than 0"),
        ("--dial-ladder=", "time limit 1 (): '' is not a duration such as 250ms, 30s or 1h30m"),
    ],
)
async def test_a_limit_that_makes_no_sense_is_named(run_to_end: RunToEnd, option: str, reason: str) -> None:
    ended = await run_to_end("local", "--service=web:80=127.0.0.1:1", option)
    assert ended.exit_code == 2
    assert f"Invalid value for '{option.partition('=')[0]}': {reason}" in ended.stderr
