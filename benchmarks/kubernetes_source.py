"""What a large cluster costs: time to first sync, memory, CPU per endpoint change, latency while it is listed again.

    python benchmarks/kubernetes_source.py [--services 5000] [--endpoints 10]

Three processes on loopback: the API server of the tests, a client with its backend, and in this one the source and a
proxy that listens for every service. The client sends requests at a fixed rate, each over a new connection, and counts
latency from the time a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.apiserver import ApiServer, cluster, endpoint_slice, node
from userspace_proxy import Endpoint, ListenAddress, Proxy, ServicePort, ServicePortName, Snapshot
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.kubernetes import KubernetesSource

RATE = 200
CHANGES = 500
CHANGES_PER_S = 50
MEASURED = ServicePortName("benchmark", "measured")
ANY = (ListenAddress("127.0.0.1", 0),)


# The API server: commands come over stdin


async def serve(services: int, endpoints: int) -> None:
    async with ApiServer() as api:
        for each in cluster(services, endpoints):
            api.put(each)
        print(api.port, flush=True)
        generation = 0
        async for command in commands():
            match command:
                case "relist":
                    api.put(node("elsewhere", "192.0.2.1"))  # a version to be newer than
                    api.compact()
                    api.cut_watches()
                case "change":
                    generation += 1
                    await change(api, services, endpoints, generation)
                case "change-all":
                    for number in range(services):
                        api.put(changed_slice(number, endpoints, 0))
                    api.compact()
                    api.cut_watches()
            print("done", flush=True)


async def change(api: ApiServer, services: int, endpoints: int, generation: int) -> None:
    started_at = time.monotonic()
    for count in range(CHANGES):
        await asyncio.sleep(started_at + count / CHANGES_PER_S - time.monotonic())
        api.put(changed_slice(count * 7 % services, endpoints, generation))


def changed_slice(number: int, endpoints: int, generation: int) -> dict[str, object]:
    addresses = [f"10.{100 + each}.{generation * 20 + number // 250}.{number % 250}" for each in range(endpoints)]
    return endpoint_slice(f"service-{number}", *addresses, namespace=f"namespace-{number % 100}")


async def commands() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


# The client and its backend


async def load() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(64))
        writer.close()

    backend = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(backend.sockets[0].getsockname()[1], flush=True)
    async for command in commands():
        port, seconds = command.split()
        latencies = await send(int(port), float(seconds))
        print(" ".join(f"{quantile(latencies, part) * 1000:.1f}" for part in (0.5, 0.99, 0.999, 1.0)), flush=True)


async def send(port: int, seconds: float) -> list[float]:
    latencies: list[float] = []

    async def request(due_at: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(64))
        await reader.readexactly(64)
        latencies.append(time.monotonic() - due_at)
        writer.close()

    started_at = time.monotonic()
    async with asyncio.TaskGroup() as requests:
        for count in range(int(seconds * RATE)):
            due_at = started_at + count / RATE
            await asyncio.sleep(due_at - time.monotonic())
            requests.create_task(request(due_at))
    return sorted(latencies)


def quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


# The proxy


class Placement:
    """Gives each service port an address to listen on, and leaves those alone that did not change."""

    def __init__(self, measured: ServicePort) -> None:
        self._measured = measured
        self._placed: dict[int, tuple[ServicePort, ServicePort]] = {}

    def place(self, snapshot: Snapshot) -> Snapshot:
        known, self._placed = self._placed, {}
        for port in snapshot.service_ports.values():
            self._placed[id(port)] = known.get(id(port)) or (port, replace(port, listen=ANY))
        ports = dict(zip(snapshot.service_ports, (placed for _, placed in self._placed.values()), strict=True))
        ports[MEASURED] = self._measured
        return Snapshot(MappingProxyType(ports))


async def measure(services: int, endpoints: int) -> None:
    api = await child("serve", services, endpoints)
    client = await child("load", services, endpoints)
    api_port, backend_port = int(await answer(api)), int(await answer(client))
    measured = ServicePort(MEASURED, 80, (Endpoint("127.0.0.1", backend_port),), listen=ANY)
    placement = Placement(measured)
    print(f"before: {rss_mib():.0f} MiB")
    async with Proxy() as proxy, ApiConnection(Access(f"http://127.0.0.1:{api_port}")) as connection:
        source = KubernetesSource(connection)
        await proxy.apply(placement.place(Snapshot()), quiet=True)
        started_at, cpu_at = time.monotonic(), time.process_time()
        running = asyncio.create_task(source.run())
        ticks = Ticks()
        snapshot = await source.next_snapshot()
        took_s, cpu_s = time.monotonic() - started_at, time.process_time() - cpu_at
        ticks.stop()
        count = sum(len(port.endpoints) for port in snapshot.service_ports.values())
        print(f"first sync: {took_s:.2f} s, CPU {cpu_s:.2f} s, {len(snapshot.service_ports)} ports, {count} endpoints")
        print(f"first sync: longest work between two ticks of the loop: {ticks.longest_s * 1000:.1f} ms of CPU")
        print(f"memory, source alone: {rss_mib():.0f} MiB, peak {peak_mib():.0f} MiB")
        following = asyncio.create_task(drain(source))
        await changes(api, "taken in")
        following.cancel()
        await proxy.apply(placement.place(snapshot), quiet=True)
        print(f"memory, with a proxy that listens for all: {rss_mib():.0f} MiB, peak {peak_mib():.0f} MiB")
        gc.collect()
        gc.freeze()
        following = asyncio.create_task(follow(source, proxy, placement))
        port = proxy.addresses(MEASURED)[0].port
        await report("idle", client, port, 5)
        await changes(api, "taken in, placed and applied to the proxy")
        for name in ("relist", "change-all"):
            listed = sum(each.lists for each in source.watches())
            loading = asyncio.create_task(report(name, client, port, 5))
            ticks = Ticks()
            started_at, cpu_at = time.monotonic(), time.process_time()
            await say(api, name)
            while sum(each.lists for each in source.watches()) < listed + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            ticks.stop()
            print(f"{name}: longest work between two ticks of the loop: {ticks.longest_s * 1000:.1f} ms of CPU")
            print(
                f"{name}: {time.monotonic() - started_at:.2f} s with back-off, CPU {time.process_time() - cpu_at:.2f} s"
            )
            await loading
        print(f"memory at the end: {rss_mib():.0f} MiB, peak {peak_mib():.0f} MiB")
        for task in (following, running):
            task.cancel()
    for process in (api, client):
        process.kill()
        await process.wait()


async def follow(source: KubernetesSource, proxy: Proxy, placement: Placement) -> None:
    while True:
        await proxy.apply(placement.place(await source.next_snapshot()), quiet=True)


class Ticks:
    """Measures the longest time that the event loop's thread worked between two ticks, whoever else has the CPU."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._worked_at = time.thread_time()
        self._is_stopped = False
        self._tick()

    def stop(self) -> None:
        self._is_stopped = True

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._worked_at)
        self._worked_at = now
        if not self._is_stopped:
            asyncio.get_running_loop().call_later(0.001, self._tick)


async def drain(source: KubernetesSource) -> None:
    while True:
        await source.next_snapshot()


async def changes(api: Process, what: str) -> None:
    cpu_at = time.process_time()
    await say(api, "change")
    await asyncio.sleep(0.5)
    print(f"CPU per endpoint change, {what}: {(time.process_time() - cpu_at) / CHANGES * 1000:.2f} ms")


async def report(name: str, client: Process, port: int, seconds: float) -> None:
    text = await say(client, f"{port} {seconds}")
    print(f"latency of proxied requests, {name}: p50 p99 p99.9 max = {text} ms")


async def child(role: str, services: int, endpoints: int) -> Process:
    arguments = (__file__, "--role", role, "--services", str(services), "--endpoints", str(endpoints))
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)


async def say(process: Process, command: str) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{command}\n".encode())
    return await answer(process)


async def answer(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=["measure", "serve", "load"], default="measure")
    parser.add_argument("--services", type=int, default=5000)
    parser.add_argument("--endpoints", type=int, default=10, help="of each service")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    import uvloop

    role = {"measure": measure, "serve": serve}.get(options.role)
    uvloop.run(role(options.services, options.endpoints) if role else load())


if __name__ == "__main__":
    main()
