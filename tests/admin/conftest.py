"""Servers on loopback and a client that asks them, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvloop

from userspace_proxy.admin.server import HttpServer
from userspace_proxy.core.health import ProxyHealth
from userspace_proxy.core.model import ListenAddress
from userspace_proxy.metrics import Metrics

PATIENCE_S = 10.0
ANY_PORT = ListenAddress("127.0.0.1", 0)

Serve = Callable[[HttpServer], AbstractAsyncContextManager[str]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def serve() -> Serve:
    """Return a context manager that runs a server and gives its URL."""

    @asynccontextmanager
    async def running(server: HttpServer) -> AsyncIterator[str]:
        task = asyncio.create_task(server.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                bound = await server.until_bound()
            yield f"http://{bound}"
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    return running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
        yield session


@pytest.fixture
def health() -> ProxyHealth:
    """A proxy that syncs each 30 s, on a node that is as it should be."""
    made = ProxyHealth(30.0)
    made.is_node_eligible = True
    return made


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("1.2.3")


@contextlib.contextmanager
def taken_port() -> Any:
    """Hold a port as another program would."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield ListenAddress("127.0.0.1", other.getsockname()[1])
