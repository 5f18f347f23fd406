"""A proxy in a process of its own with few descriptors. Prints its port, then its counters for each line read."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
from dataclasses import asdict

from tests.traffic.conftest import VARIANTS, a_service
from userspace_proxy import Endpoint, L4Protocol, Proxy, Snapshot


async def main(variant: str, limit: int, protocol: str, *ports: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    chosen = next(candidate for candidate in VARIANTS if str(candidate) == variant)
    settings = chosen.settings(max_sessions=10_000)
    loop = asyncio.get_running_loop()
    endpoints = [Endpoint("127.0.0.1", int(port)) for port in ports]
    async with Proxy(settings, data_path=chosen.make_data_path) as proxy:
        service = a_service(*endpoints, protocol=L4Protocol(protocol))
        failures = await proxy.apply(Snapshot.of(service))
        assert not failures
        print(proxy.addresses(service.name)[0].port, flush=True)
        finished = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        def on_line() -> None:
            if not sys.stdin.readline():
                finished.set()
                return
            tasks.append(loop.create_task(tell()))

        async def tell() -> None:
            counters = await proxy.counters()
            told = {str(endpoint): asdict(counted) for endpoint, counted in counters.endpoints[service.name].items()}
            print(json.dumps({"accept_errors": counters.accept_errors, "endpoints": told}), flush=True)

        loop.add_reader(sys.stdin.fileno(), on_line)
        await finished.wait()
        loop.remove_reader(sys.stdin.fileno())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    chosen = next(candidate for candidate in VARIANTS if str(candidate) == sys.argv[1])
    with asyncio.Runner(loop_factory=chosen.new_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
