"""Cases 79 and 81, and the health server over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.admin.conftest import ANY_PORT, PATIENCE_S, Serve, taken_port
from tests.commands.conftest import closed
from userspace_proxy.admin import health_server, metrics_server
from userspace_proxy.admin import server as server_module
from userspace_proxy.admin.health import health_application
from userspace_proxy.admin.server import HttpServer
from userspace_proxy.core.counters import LiveCounters
from userspace_proxy.core.errors import ListenFailed, ServerFailed
from userspace_proxy.core.health import ProxyHealth
from userspace_proxy.core.model import IPFamily, ListenAddress
from userspace_proxy.core.objects import Node
from userspace_proxy.metrics import Metrics
from userspace_proxy.sources.this_node import TO_BE_DELETED_TAINT, observe


def the_server(which: str, address: ListenAddress, *, hard_fail: bool = False) -> HttpServer:
    if which == "health":
        return health_server(address, ProxyHealth(30.0), Metrics("1"), hard_fail=hard_fail, retry_s=0.05)
    return metrics_server(address, Metrics("1"), dict, hard_fail=hard_fail, retry_s=0.05)


@pytest.mark.parametrize("which", ["health", "metrics"])
async def test_case_79_a_taken_port_is_tried_again_until_it_is_free(
    which: str, serve: Serve, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    with taken_port() as address:
        server = the_server(which, address)
        task = asyncio.create_task(server.run())
        await asyncio.sleep(0.2)  # some attempts, of which only the first says anything
        assert server.bound is None
        assert not task.done()
        (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
        assert record.getMessage() == (
            f"{which} server: cannot listen on {address}: address already in use; trying again each 0.05 s"
        )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await server.until_bound() == address
        async with client.get(f"http://{address}/healthz") as response:
            assert response.status == (503 if which == "health" else 200)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("which", "reason"), [("health", "FailedToStartProxierHealthcheck"), ("metrics", "FailedToStartMetricServer")]
)
async def test_case_79_with_hard_fail_a_taken_port_is_final(which: str, reason: str) -> None:
    with taken_port() as address, pytest.raises(ServerFailed) as raised:
        await the_server(which, address, hard_fail=True).run()
    assert raised.value.event_reason == reason
    assert str(raised.value) == f"{which} server failed: cannot listen on {address}: address already in use"


@pytest.mark.parametrize(
    "node",
    [
        pytest.param({"spec": {"taints": [{"key": TO_BE_DELETED_TAINT}]}}, id="tainted"),
        pytest.param({"metadata": {"deletionTimestamp": "2024-01-01T00:00:00Z"}}, id="being deleted"),
    ],
)
async def test_case_81_a_node_that_goes_away_concerns_healthz_and_not_livez(
    node: dict[str, object], serve: Serve, client: aiohttp.ClientSession, health: ProxyHealth, metrics: Metrics
) -> None:
    async with serve(health_server(ANY_PORT, health, metrics)) as url:
        health.is_node_eligible = observe(msgspec.convert(node, Node)).is_eligible
        async with client.get(f"{url}/healthz") as response:
            assert response.status == 503
            document = await response.json()
            assert (document["nodeEligible"], document["healthy"]) == (False, True)
        async with client.get(f"{url}/livez") as response:
            assert response.status == 200
            assert "nodeEligible" not in await response.json()
    text = "".join(metrics.pieces(LiveCounters()))
    assert 'kubeproxy_proxy_healthz_total{code="503"} 1\n' in text
    assert 'kubeproxy_proxy_livez_total{code="200"} 1\n' in text


async def test_case_81_a_node_that_is_not_known_gets_no_traffic(
    serve: Serve, client: aiohttp.ClientSession, metrics: Metrics
) -> None:
    async with serve(health_server(ANY_PORT, ProxyHealth(30.0), metrics)) as url:
        async with client.get(f"{url}/healthz") as response:
            assert response.status == 503
        async with client.get(f"{url}/livez") as response:
            assert response.status == 200


async def test_a_change_that_waits_too_long_makes_both_unhealthy(
    serve: Serve, client: aiohttp.ClientSession, health: ProxyHealth, metrics: Metrics
) -> None:
    now = 100.0
    app = health_application(health, metrics, clock=lambda: now, wall_clock=lambda: 1_700_000_000.0 + now)
    health.updated(IPFamily.IPV4, now=99.0)
    health.queued(IPFamily.IPV4, now=now)
    async with serve(HttpServer("health server", ANY_PORT, app, event_reason="")) as url:
        for path in ("healthz", "livez"):
            now = 159.0
            async with client.get(f"{url}/{path}") as response:
                assert (response.status, (await response.json())["lastUpdated"]) == (200, "2023-11-14T22:15:59Z")
            now = 160.0
            async with client.get(f"{url}/{path}") as response:
                document = await response.json()
                assert (response.status, document["lastUpdated"]) == (503, "2023-11-14T22:14:59Z")
                assert document["status"] == {"IPv4": {"lastUpdated": "2023-11-14T22:14:59Z", "healthy": False}}


async def test_answers_have_the_headers_of_kube_proxys(
    serve: Serve, client: aiohttp.ClientSession, health: ProxyHealth, metrics: Metrics
) -> None:
    async with serve(health_server(ANY_PORT, health, metrics)) as url, client.get(f"{url}/healthz") as response:
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "Server" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics", 404),
        ("GET", "/healthz/", 404),
        ("POST", "/healthz", 405),
        ("DELETE", "/livez", 405),
        ("HEAD", "/healthz", 200),
    ],
)
async def test_only_what_there_is_can_be_asked(
    method: str,
    path: str,
    status: int,
    serve: Serve,
    client: aiohttp.ClientSession,
    health: ProxyHealth,
    metrics: Metrics,
) -> None:
    async with serve(health_server(ANY_PORT, health, metrics)) as url:
        async with client.request(method, url + path) as response:
            assert response.status == status
            assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
async def test_a_wildcard_has_both_families_as_in_go(
    wildcard: str, serve: Serve, client: aiohttp.ClientSession, health: ProxyHealth, metrics: Metrics
) -> None:
    server = health_server(ListenAddress(wildcard, 0), health, metrics)
    async with serve(server):
        assert server.bound is not None
        for host in ("127.0.0.1", "[::1]"):
            async with client.get(f"http://{host}:{server.bound.port}/livez") as response:
                assert response.status == 200


def no_ipv6(family: int, *arguments: object) -> socket.socket:
    if family == socket.AF_INET6:
        raise OSError(server_module.errno.EAFNOSUPPORT, "")
    return _real_socket(family, *arguments)  # type: ignore[arg-type]


_real_socket = socket.socket


@pytest.fixture
def host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(server_module.socket, "socket", no_ipv6)
        yield


def test_a_host_without_ipv6_has_the_wildcard_of_ipv4(host_without_ipv6: None) -> None:
    with server_module.listen(ListenAddress("0.0.0.0", 0)) as sock:
        assert sock.family == socket.AF_INET


def test_a_wildcard_is_refused_where_another_has_the_port() -> None:
    with taken_port() as address, pytest.raises(ListenFailed, match="address already in use"):
        server_module.listen(ListenAddress("0.0.0.0", address.port))


async def test_a_fault_of_ours_is_logged_and_answered(
    serve: Serve, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: web.Request) -> web.Response:
        raise ValueError("what")

    app = server_module.new_application()
    app.router.add_get("/", fail)
    async with serve(HttpServer("health server", ANY_PORT, app, event_reason="")) as url:
        async with client.get(url) as response:
            assert response.status == 500
    assert any(record.exc_info and "what" in str(record.exc_info[1]) for record in caplog.records)


async def test_when_connections_are_many_the_oldest_ends_and_a_probe_gets_through(
    serve: Serve, client: aiohttp.ClientSession, health: ProxyHealth, metrics: Metrics
) -> None:
    app = health_application(health, metrics)
    async with serve(HttpServer("health server", ANY_PORT, app, event_reason="", most_connections=3)) as url:
        port = int(url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            async with client.get(f"{url}/livez") as response:
                assert response.status == 200
            assert await idle[0][0].read() == b""
        for _, writer in idle:
            await closed(writer)


async def test_what_is_no_http_is_refused_without_a_word_in_the_log(
    serve: Serve, health: ProxyHealth, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(health_server(ANY_PORT, health, metrics)) as url:
        for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET /livez HTTP/1.1\r\nbroken\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(garbage)
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read()).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
            await closed(writer)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_stopping_takes_no_time_although_a_client_stays(
    serve: Serve, client: aiohttp.ClientSession, health: ProxyHealth, metrics: Metrics
) -> None:
    loop = asyncio.get_running_loop()
    async with serve(health_server(ANY_PORT, health, metrics)) as url:
        async with client.get(f"{url}/livez") as response:
            await response.read()
        stopped_at = loop.time()
    assert loop.time() - stopped_at < 1.0
