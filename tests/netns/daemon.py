"""The daemon as a process on the node of the topology, and an API server there that it follows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests import apiserver
from tests.apiserver import ApiServer, Object
from tests.netns.services import BACKEND_PORT
from tests.netns.topology import ADDRESSES
from tests.netns.traffic import NoAnswer, ask
from tests.support.namespaces import Namespace, run
from tests.support.processes import PATIENCE_S, PROGRAM, Running
from userspace_proxy.core.model import IPFamily, L4Protocol

NODE_NAME = "node-1"
V4, V6 = ADDRESSES[IPFamily.IPV4], ADDRESSES[IPFamily.IPV6]
HEALTH, METRICS = "http://127.0.0.1:10256", "http://127.0.0.1:10249"


def web(name: str = "web", *, cluster_ip: str = V4.cluster_ip, node_port: int = 30080, **spec: Any) -> Object:
    """Return a service that answers on port 80, by TCP and UDP."""
    ports = [
        {"name": protocol.lower(), "protocol": protocol, "port": 80, **({"nodePort": node_port} if node_port else {})}
        for protocol in L4Protocol
    ]
    kind = "NodePort" if node_port else "ClusterIP"
    return apiserver.service(name, cluster_ip=cluster_ip, ports=ports, **{"type": kind, **spec})


def slice_of(service: str, *addresses: str, nodes: tuple[str, ...] = (), name: str = "", **fields: Any) -> Object:
    """Return the slice of a service of `web`, with ready endpoints; `nodes` says where each is."""
    each = {**apiserver.endpoint_slice(service, *addresses, name=name), **fields}
    each["ports"] = [{"name": p.lower(), "port": BACKEND_PORT, "protocol": p} for p in L4Protocol]
    for endpoint, node in zip(each["endpoints"], nodes, strict=False):
        endpoint["nodeName"] = node
    return each


def this_node(**options: Any) -> Object:
    """Return this node's object."""
    return apiserver.node(NODE_NAME, V4.node, V6.node, **options)


@asynccontextmanager
async def api_server(*objects: Object, runs: bool = True) -> AsyncIterator[ApiServer]:
    """Serve the cluster: this node, and these objects. Without `runs`, it has a port but refuses connections."""
    async with ApiServer() as api:
        for each in (this_node(), *objects):
            api.put(each)
        if not runs:
            await api.stop()
        yield api


@dataclass
class Daemon:
    """How the daemon of a test is started."""

    api: ApiServer
    folder: Path
    variant: str

    def arguments(self, *more: str) -> list[str]:
        """Return the command line, with a kubeconfig for the API server."""
        kubeconfig = self.folder / "kubeconfig"
        cluster = {"clusters": [{"name": "c", "cluster": {"server": self.api.url}}]}
        context = {"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}
        kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **cluster, **context}))
        return [
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={NODE_NAME}",
            f"--iptables-backend={self.variant}",
            *more,
        ]

    @asynccontextmanager
    async def running(
        self, *flags: str, prefix: tuple[str, ...] = (), environ: dict[str, str] | None = None
    ) -> AsyncIterator[Running]:
        """Run it for the length of the context. It is killed at the end, if it still runs then."""
        async with started(self.arguments(*flags), prefix=prefix, environ=environ) as running:
            yield running


@asynccontextmanager
async def started(
    arguments: list[str], *, prefix: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> AsyncIterator[Running]:
    """Run the program, in the namespace that the test is in."""
    process = await asyncio.create_subprocess_exec(
        *prefix, *PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE, env={**os.environ, **(environ or {})}
    )
    running = Running(process)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(running.read_log())
        try:
            yield running
        except BaseException:
            print("".join(running.log), file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def child(daemon: Running, role: str) -> int:
    """Return the process number of the daemon's child of this role; 0 while there is none."""
    for each in children(daemon.process.pid):
        with contextlib.suppress(OSError):
            if f"\0{role}-process\0" in Path(f"/proc/{each}/cmdline").read_text():
                return each
    return 0


def children(pid: int) -> list[int]:
    """Return the process numbers of the children of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def status(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def get(url: str) -> tuple[int, str]:
    """Return status and text; status 0 when nobody answers."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            async with session.get(url) as response:
                return response.status, await response.text()
    except aiohttp.ClientConnectionError:
        return 0, ""


async def sample(name: str, *, at: str = METRICS) -> float:
    """Return the value of a sample of /metrics; 0 where it is not there."""
    _, text = await get(f"{at}/metrics")
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} ")), 0.0)


async def until(condition: Callable[[], Awaitable[bool]], what: str, limit_s: float = PATIENCE_S) -> float:
    """Wait until a condition holds that others bring about, and return how long it took."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < limit_s, what
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def answered(
    client: Namespace,
    address: str,
    port: int,
    *names: str,
    protocol: L4Protocol = L4Protocol.TCP,
    limit_s: float = PATIENCE_S,
) -> float:
    """Wait until one of these backends answers, and return how long that took."""

    async def right_one() -> bool:
        try:
            return await ask(client, protocol, address, port, patience_s=0.5) in names
        except NoAnswer:
            return False

    return await until(right_one, f"{address} {port} is not answered by {names}", limit_s)


async def exclusively(client: Namespace, address: str, port: int, name: str) -> None:
    """Wait until four answers in a row come from one backend."""

    async def four_times() -> bool:
        try:
            return {await ask(client, L4Protocol.TCP, address, port, patience_s=0.5) for _ in range(4)} == {name}
        except NoAnswer:
            return False

    await until(four_times, f"{address} {port} is not answered by {name} alone")


async def refused(client: Namespace, address: str, port: int, *, limit_s: float = PATIENCE_S) -> float:
    """Wait until nobody answers."""

    async def nobody() -> bool:
        try:
            await ask(client, L4Protocol.TCP, address, port, patience_s=0.3)
        except NoAnswer:
            return True
        return False

    return await until(nobody, f"{address} {port} is still answered", limit_s)


def rules(variant: str) -> list[str]:
    """Return all rules and chains of kube-proxy's on the node, of both families, as they are saved."""
    saved = [run(f"{stem}-{variant}-save") for stem in ("iptables", "ip6tables")]
    return [line for text in saved for line in text.splitlines() if "KUBE-" in line]
