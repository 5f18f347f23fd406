"""Idle, connect, wake, with `userspace-proxy local` and a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.apiserver import ApiServer, endpoint_slice, endpoints, service, workload

from .conftest import RunLocal, connection, free_port
from .test_local_with_a_cluster import write_kubeconfig

StartBackends = Callable[[int], Awaitable[list[int]]]


async def ask(port: int) -> bytes:
    """Connect, say a word, and return what is answered."""
    async with connection(port) as (reader, writer), asyncio.timeout(10):
        writer.write(b"?")
        return await reader.read(100)


IDLED = {
    "idling.alpha.openshift.io/idled-at": "2026-01-31T12:00:00Z",
    "idling.alpha.openshift.io/unidle-targets": '[{"kind":"Deployment","name":"web","replicas":2}]',
}


async def test_clients_of_an_idled_service_are_served_once_it_is_scaled_up(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (backend,), port = await backends(1), free_port()
    async with ApiServer(tokens={"secret"}) as api:
        api.put(workload("Deployment", "web", 0, namespace="shop"))
        api.put(service("web", namespace="shop", ports=[{"port": port, "protocol": "TCP"}]))
        api.put(endpoints("web", namespace="shop", annotations=IDLED))
        flags = ("--kubeconfig", write_kubeconfig(tmp_path / "config", api), "--context", "test", "--wake-scale")
        async with local(*flags) as running, asyncio.TaskGroup() as tasks:
            assert "none: the first client asks for pods" in running.table
            asking = [tasks.create_task(ask(port)) for _ in range(3)]
            await api.until_requested("update", "deployments/scale")
            await api.until(lambda: bool(api.posted))
            api.put(endpoints("web", namespace="shop"))  # as OpenShift's controller does before pods are ready
            late = tasks.create_task(ask(port))
            await api.until_requested("watch", "endpoints")
            api.put(endpoint_slice("web", "127.0.0.1", namespace="shop", port=backend))
            assert [await each for each in (*asking, late)] == [b"%d" % backend] * 4
        assert len(api.posted) == 1
