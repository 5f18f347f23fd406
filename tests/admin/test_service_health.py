"""Health checks of services over real HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.admin.conftest import taken_port
from tests.commands.conftest import free_port
from userspace_proxy.admin import ServiceHealthServers
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.health import ServiceHealthCheck, ServiceKey

WEB = ("shop", "web")


class Told:
    """What the servers ask and tell."""

    def __init__(self) -> None:
        self.is_proxy_healthy = True
        self.failures: list[tuple[ServiceKey, int]] = []

    def failed(self, key: ServiceKey, port: int, failure: ListenFailed) -> None:
        self.failures.append((key, port))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def servers(told: Told) -> AsyncIterator[ServiceHealthServers]:
    made = ServiceHealthServers(
        lambda: told.is_proxy_healthy, addresses=("127.0.0.1", "127.0.0.2"), on_failure=told.failed
    )
    yield made
    await made.close()


async def test_a_load_balancer_learns_how_many_endpoints_are_here(
    servers: ServiceHealthServers, told: Told, client: aiohttp.ClientSession
) -> None:
    port = free_port()
    await servers.apply({WEB: ServiceHealthCheck(port, 2)})
    for url in (f"http://127.0.0.1:{port}/", f"http://127.0.0.2:{port}/healthz"):
        async with client.get(url) as response:
            assert response.status == 200
            assert response.headers["X-Load-Balancing-Endpoint-Weight"] == "2"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert await response.json() == {
                "service": {"namespace": "shop", "name": "web"},
                "localEndpoints": 2,
                "serviceProxyHealthy": True,
            }
    told.is_proxy_healthy = False
    async with client.get(url) as response:
        assert response.status == 503
    async with client.post(url) as response:
        assert response.status == 405


async def test_endpoints_that_go_and_come_are_seen_without_a_new_listener(
    servers: ServiceHealthServers, client: aiohttp.ClientSession
) -> None:
    port = free_port()
    for count in (1, 0, 3):
        await servers.apply({WEB: ServiceHealthCheck(port, count)})
        async with client.get(f"http://127.0.0.1:{port}/") as response:
            assert response.status == (200 if count else 503)
            assert response.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)


async def test_a_port_that_moves_or_goes_is_closed(
    servers: ServiceHealthServers, client: aiohttp.ClientSession
) -> None:
    before, after = free_port(), free_port()
    await servers.apply({WEB: ServiceHealthCheck(before, 1)})
    await servers.apply({WEB: ServiceHealthCheck(after, 1)})
    async with client.get(f"http://127.0.0.1:{after}/") as response:
        assert response.status == 200
    await servers.apply({})
    for port in (before, after):
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(f"http://127.0.0.1:{port}/")


async def test_a_taken_port_is_told_once_tried_each_time_and_stops_no_other(
    servers: ServiceHealthServers, told: Told, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    other = free_port()
    with taken_port() as taken:
        checks = {WEB: ServiceHealthCheck(taken.port, 1), ("shop", "other"): ServiceHealthCheck(other, 1)}
        await servers.apply(checks)
        await servers.apply(checks)
        assert told.failures == [(WEB, taken.port)]
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
        async with client.get(f"http://127.0.0.1:{other}/") as response:
            assert response.status == 200
    await servers.apply(checks)
    async with client.get(f"http://127.0.0.1:{taken.port}/") as response:
        assert response.status == 200
