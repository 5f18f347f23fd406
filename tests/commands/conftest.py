"""Runs `userspace-proxy local` as a user does: as a process, against real backends on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE_S, PROGRAM, Running

RunLocal = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def local() -> RunLocal:
    """Return a context manager that runs `userspace-proxy local` with these arguments."""

    @asynccontextmanager
    async def run(*arguments: str | Path, stdin: bytes | None = None) -> AsyncIterator[Running]:
        process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            "local",
            *map(str, arguments),
            stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                table = (await process.stdout.readuntil(b"\n\n")).decode()
        except asyncio.IncompleteReadError as error:
            pytest.fail(f"it did not start: {error.partial!r}{(await process.stderr.read()).decode()}")
        running = Running(process, table=table)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(running.read_log())
            try:
                yield running
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    return run


@dataclass(frozen=True)
class Ended:
    """A process that ended by itself."""

    exit_code: int
    stdout: str
    stderr: str


RunToEnd = Callable[..., Awaitable[Ended]]


@pytest.fixture
def run_to_end() -> RunToEnd:
    """Return a function that runs the program with these arguments until it ends by itself."""

    async def run(*arguments: str | Path, stdin: bytes = b"", prefix: tuple[str, ...] = ()) -> Ended:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *PROGRAM,
            *map(str, arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "COLUMNS": "200"},
        )
        async with asyncio.timeout(PATIENCE_S):
            stdout, stderr = await process.communicate(stdin)
        assert process.returncode is not None
        return Ended(process.returncode, stdout.decode(), stderr.decode())

    return run


@pytest.fixture
async def backends() -> AsyncIterator[Callable[[int], Awaitable[list[int]]]]:
    """Return a function that starts backends, which answer each connection with their own port, and gives the ports."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % writer.get_extra_info("sockname")[1])
        writer.write_eof()
        await reader.read()
        await closed(writer)

    servers: list[asyncio.Server] = []

    async def start(count: int) -> list[int]:
        started = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(count)]
        servers.extend(started)
        return [server.sockets[0].getsockname()[1] for server in started]

    yield start
    for server in servers:
        server.close()


def free_port() -> int:
    """Return a port that was free a moment ago, below those that the system gives to clients by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a stream and wait until it is."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def connection(
    port: int, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect for the length of the context."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        yield reader, writer
    finally:
        await closed(writer)


async def ask(port: int, address: str = "127.0.0.1") -> bytes:
    """Connect, send nothing, and return all that is answered until EOF."""
    async with connection(port, address) as (reader, writer), asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(OSError):  # the connection may be closed already
            writer.write_eof()
        return await reader.read()


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float) -> float:
    """Wait until the condition holds, at most `limit_s`, and return how long it took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)
    return loop.time() - start


def manifest(name: str, port: int, backend_ports: list[int], *, protocol: str = "TCP", extra: str = "") -> str:
    """Return a Service with one EndpointSlice for each of these ports on 127.0.0.1."""
    documents = [
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n"
        f"spec: {{{extra}ports: [{{name: main, port: {port}, protocol: {protocol}}}]}}\n"
    ]
    documents += [
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"
        f"metadata: {{name: {name}-{number}, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}\n"
        f"ports: [{{name: main, port: {number}, protocol: {protocol}}}]\n"
        "endpoints: [{addresses: [127.0.0.1], conditions: {ready: true}}]\n"
        for number in backend_ports
    ]
    return "---\n".join(documents)
