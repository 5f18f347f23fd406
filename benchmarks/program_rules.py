"""How long it takes to program services, per backend, and how long the event loop is held up meanwhile.

    sudo python benchmarks/program_rules.py [--services 10,1000,5000,10000] [--backends nft,legacy,libiptc]

Runs in a network namespace of its own. `stall` is the longest that a 1 ms timer of the same loop came late, which is
what a proxied request would wait for in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import uvloop

from userspace_proxy.core.model import IPFamily, ServicePort, ServicePortName
from userspace_proxy.core.portals import NodeFacts, ProxyPortKey
from userspace_proxy.redirect import conntrack
from userspace_proxy.redirect.backend import Backend
from userspace_proxy.redirect.keeper import RuleKeeper
from userspace_proxy.redirect.libiptc import LibiptcBackend
from userspace_proxy.redirect.programs import Variant, find_programs
from userspace_proxy.redirect.redirector import Redirector
from userspace_proxy.redirect.restore import RestoreBackend

CLONE_NEWNET = 0x40000000
NODE = NodeFacts("192.168.77.1")


@dataclass
class Stall:
    """The longest time that a timer came late, in seconds."""

    longest_s: float = 0.0

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - before - 0.001)


async def measured(work: Awaitable[object]) -> tuple[float, float]:
    """Return how long the work took and the longest stall, in seconds."""
    stall = Stall()
    watcher = asyncio.create_task(stall.watch())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    await work
    took_s = time.perf_counter() - began
    await asyncio.sleep(0.01)  # the watcher is to see the last stall, too
    watcher.cancel()
    return took_s, stall.longest_s


def service_ports(count: int) -> list[ServicePort]:
    """Return services of which every tenth has a node port."""
    return [
        ServicePort(
            ServicePortName(f"namespace-{number % 50}", f"service-{number}", "http"),
            80,
            cluster_ips=(f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}",),
            node_port=30000 + number // 10 if number % 10 == 0 else 0,
        )
        for number in range(count)
    ]


@contextmanager
def namespace() -> Iterator[None]:
    """Be in a new network namespace, which goes when the process goes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home:
        if libc.unshare(CLONE_NEWNET):
            raise SystemExit("cannot make a network namespace: run as root")
        yield
        libc.setns(home.fileno(), CLONE_NEWNET)


async def backend(name: str) -> Backend:
    if name == "libiptc":
        return LibiptcBackend(IPFamily.IPV4)
    return RestoreBackend((await find_programs(IPFamily.IPV4))[Variant(name)])


async def measure(name: str, count: int) -> None:
    keeper = RuleKeeper([Redirector(await backend(name))], conntrack=conntrack.available(), leftovers=None)
    services = service_ports(count)
    ports = {ProxyPortKey(each.name, IPFamily.IPV4): 40000 + number % 20000 for number, each in enumerate(services)}
    nodes = {IPFamily.IPV4: NODE}
    scratch_s, scratch_stall_s = await measured(keeper.apply(services, ports, nodes))
    services[count // 2] = replace(services[count // 2], port=81)
    change_s, change_stall_s = await measured(keeper.apply(services, ports, nodes))
    check_s, check_stall_s = await measured(keeper.check())
    await keeper.close()
    print(
        f"{name:8} {count:6} services: from scratch {scratch_s:6.3f} s (stall {scratch_stall_s * 1000:5.1f} ms), "
        f"one change {change_s:6.3f} s (stall {change_stall_s * 1000:5.1f} ms), "
        f"full check {check_s:6.3f} s (stall {check_stall_s * 1000:5.1f} ms)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", default="10,1000,5000,10000")
    parser.add_argument("--backends", default="nft,legacy,libiptc")
    arguments = parser.parse_args()
    for name in arguments.backends.split(","):
        for count in map(int, arguments.services.split(",")):
            with namespace():
                uvloop.run(measure(name, count))


if __name__ == "__main__":
    main()
