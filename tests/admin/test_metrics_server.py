"""The metrics server over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.admin.conftest import ANY_PORT, PATIENCE_S, Serve
from tests.commands.conftest import connection
from userspace_proxy.admin import HttpServer, metrics_server
from userspace_proxy.admin.monitoring import without_secrets
from userspace_proxy.admin.profiling import CpuProfile
from userspace_proxy.admin.scrape import Scrape
from userspace_proxy.admin.server import new_application
from userspace_proxy.metrics import Metrics


class Verbosity:
    """What was asked for."""

    def __init__(self) -> None:
        self.level = 0

    def set(self, level: int) -> None:
        self.level = level


@pytest.fixture
def verbosity() -> Verbosity:
    return Verbosity()


@pytest.fixture
def plain(metrics: Metrics) -> HttpServer:
    return metrics_server(ANY_PORT, metrics, lambda: {"bindAddress": "0.0.0.0"})


@pytest.fixture
def profiling(metrics: Metrics, verbosity: Verbosity) -> HttpServer:
    return metrics_server(ANY_PORT, metrics, dict, set_verbosity=verbosity.set)


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        ("/proxyMode", "text/plain; charset=utf-8", "userspace"),
        ("/healthz", "text/plain; charset=utf-8", "ok"),
        ("/healthz?verbose", "text/plain; charset=utf-8", "[+]ping ok\nhealthz check passed\n"),
        ("/configz", "application/json", '{"kubeproxy.config.k8s.io":{"bindAddress":"0.0.0.0"}}'),
    ],
)
async def test_answers_are_those_of_kube_proxy(
    path: str, content_type: str, body: str, serve: Serve, client: aiohttp.ClientSession, plain: HttpServer
) -> None:
    async with serve(plain) as url, client.get(url + path) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == content_type
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert await response.text() == body


async def test_metrics_are_what_prometheus_expects(
    serve: Serve, client: aiohttp.ClientSession, plain: HttpServer
) -> None:
    async with serve(plain) as url, client.get(f"{url}/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        names = {metric.name for metric in text_string_to_metric_families(await response.text())}
        assert {"kubeproxy_sync_proxy_rules_duration_seconds", "userspace_proxy_connections"} <= names


async def test_the_indicators_count_health_checks(
    serve: Serve, client: aiohttp.ClientSession, plain: HttpServer
) -> None:
    async with serve(plain) as url:
        async with client.get(f"{url}/healthz"):
            pass
        async with client.get(f"{url}/metrics/slis") as response:
            assert 'kubernetes_healthchecks_total{name="ping",type="healthz",status="success"} 1\n' in (
                await response.text()
            )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/livez", 404),
        ("GET", "/debug/pprof/", 404),
        ("PUT", "/debug/flags/v", 404),
        ("POST", "/metrics", 405),
        ("PUT", "/configz", 405),
        ("HEAD", "/metrics", 200),
    ],
)
async def test_only_what_there_is_can_be_asked_and_nothing_changed(
    method: str, path: str, status: int, serve: Serve, client: aiohttp.ClientSession, plain: HttpServer
) -> None:
    async with serve(plain) as url, client.request(method, url + path) as response:
        assert response.status == status


def endless_scrape(limit_s: float) -> HttpServer:
    """Return a server with more to send than any buffer holds."""

    async def endless() -> Iterator[str]:
        return ("x" * 100_000 for _ in range(1000))

    scrape = Scrape(endless, limit_s=limit_s)
    app = new_application()
    app.router.add_get("/metrics", scrape.answer)
    return HttpServer("metrics server", ANY_PORT, app, event_reason="")


@asynccontextmanager
async def slow_scrape(url: str) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for metrics and read the first line of the answer only."""
    async with connection(int(url.rpartition(":")[2])) as (reader, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        yield reader


async def test_two_may_scrape_at_once_and_a_third_one_is_told_to_wait(
    serve: Serve, client: aiohttp.ClientSession
) -> None:
    async with serve(endless_scrape(limit_s=60.0)) as url:
        async with slow_scrape(url), slow_scrape(url), client.get(f"{url}/metrics") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"


async def test_a_client_that_reads_too_slowly_is_cut_off(serve: Serve) -> None:
    async with serve(endless_scrape(limit_s=0.2)) as url:
        async with slow_scrape(url) as reader, asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0.5)
            received = 0
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 20):
                    received += len(data)
            assert received < 50_000_000


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ({"kubeconfig": "/etc/kubeconfig", "qps": 5.0}, {"kubeconfig": "/etc/kubeconfig", "qps": 5.0}),
        ({"a": [{"token": "abc"}, {"bearerToken": ""}]}, {"a": [{"token": "(hidden)"}, {"bearerToken": ""}]}),
        ({"proxy": "http://me:pass@proxy:3128"}, {"proxy": "http://(hidden)@proxy:3128"}),
        ({"client-key-data": "LS0t", "none": None}, {"client-key-data": "(hidden)", "none": None}),
    ],
)
def test_the_configuration_is_shown_without_secrets(document: Mapping[str, object], shown: object) -> None:
    assert without_secrets(document) == shown


async def test_the_verbosity_can_be_changed_where_profiling_is_on(
    serve: Serve, client: aiohttp.ClientSession, profiling: HttpServer, verbosity: Verbosity
) -> None:
    async with serve(profiling) as url:
        async with client.put(f"{url}/debug/flags/v", data="4\n") as response:
            assert await response.text() == "successfully set klog.logging.verbosity to 4"
        assert verbosity.level == 4
        for text in ("-1", "many", "9999", ""):
            async with client.put(f"{url}/debug/flags/v", data=text) as response:
                assert response.status == 400
        async with client.put(f"{url}/debug/flags/v", data="1" * 5000) as response:
            assert response.status == 413
        async with client.get(f"{url}/debug/flags/v") as response:
            assert response.status == 405
        assert verbosity.level == 4


async def test_tasks_and_threads_are_shown(serve: Serve, client: aiohttp.ClientSession, profiling: HttpServer) -> None:
    async with serve(profiling) as url:
        for path in ("/debug/pprof", "/debug/pprof/"):
            async with client.get(url + path) as response:
                assert "goroutine" in await response.text()
        async with client.get(f"{url}/debug/pprof/goroutine?debug=2") as response:
            text = await response.text()
    assert "thread MainThread:" in text
    assert "HttpServer.run" in text


async def test_a_cpu_profile_shows_who_works_and_the_loop_goes_on(
    serve: Serve, client: aiohttp.ClientSession, profiling: HttpServer
) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, lambda: None)  # as the daemon has handlers of the loop's own
    turns = 0

    async def work_hard() -> None:
        nonlocal turns
        while True:
            spin_for(0.002)
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work_hard())
    async with serve(profiling) as url:
        async with client.get(f"{url}/debug/pprof/profile?seconds=1") as response:
            text = await response.text()
    working.cancel()
    loop.remove_signal_handler(signal.SIGUSR2)
    assert turns > 5
    stack, _, count = text.splitlines()[0].rpartition(" ")
    assert stack.endswith("test_metrics_server:spin_for")
    assert int(count) >= 1


def spin_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def test_only_one_profile_is_taken_and_its_time_is_limited(
    serve: Serve, client: aiohttp.ClientSession, profiling: HttpServer
) -> None:
    async with serve(profiling) as url:
        with CpuProfile():
            async with client.get(f"{url}/debug/pprof/profile?seconds=1") as response:
                assert response.status == 500
                assert "already in use" in await response.text()
        for seconds in ("0", "1e9", "nan", "soon"):
            async with client.get(f"{url}/debug/pprof/profile?seconds={seconds}") as response:
                assert response.status == 400


async def test_another_thread_takes_no_profile() -> None:
    def profile() -> None:
        with CpuProfile():
            pass

    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(profile)
