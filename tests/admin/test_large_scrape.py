"""A scrape of a large cluster must not be felt by the data path."""

from __future__ import annotations

import asyncio
import gc
import time

import aiohttp
import pytest

from tests.admin.conftest import ANY_PORT, Serve
from userspace_proxy import DataPlaneSettings, Endpoint, Proxy, ServicePort, ServicePortName, Snapshot
from userspace_proxy.admin import metrics_server
from userspace_proxy.metrics import Metrics

SERVICE_PORTS, ENDPOINTS_EACH = 5000, 10
TURN_LIMIT_S = 0.05
"""What a busy machine may add is in it: the longest turn takes 1 to 3 ms, the client in this process included."""


def large_cluster() -> Snapshot:
    return Snapshot.of(
        *(
            ServicePort(
                ServicePortName(f"namespace-{number % 100}", f"service-{number}", "http"),
                80,
                tuple(
                    Endpoint(f"10.{each}.{number // 250}.{number % 250 + 1}", 8080) for each in range(ENDPOINTS_EACH)
                ),
            )
            for number in range(SERVICE_PORTS)
        )
    )


class LongestTurn:
    """How long the event loop was away from others at most, in CPU seconds of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0)
            self.seconds = max(self.seconds, time.process_time() - before)


@pytest.mark.parametrize("with_endpoints", [False, True])
async def test_a_scrape_of_5000_service_ports_and_50000_endpoints_lets_others_work(
    with_endpoints: bool, serve: Serve, client: aiohttp.ClientSession
) -> None:
    async with Proxy(DataPlaneSettings()) as proxy:
        await proxy.apply(large_cluster(), quiet=True)
        metrics = Metrics("1", read_counters=proxy.live_counters, with_endpoints=with_endpoints)
        gc.collect()
        gc.freeze()
        longest = LongestTurn()
        watching = asyncio.create_task(longest.watch())
        size = 0
        async with serve(metrics_server(ANY_PORT, metrics, dict)) as url, client.get(f"{url}/metrics") as response:
            async for chunk in response.content.iter_any():
                size += len(chunk)
        watching.cancel()
        gc.unfreeze()
    print(f"{size} bytes, longest turn {longest.seconds * 1000:.2f} ms")
    assert size > (15_000_000 if with_endpoints else 1_000_000)
    assert longest.seconds < TURN_LIMIT_S
