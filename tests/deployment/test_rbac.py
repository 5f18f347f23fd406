"""The cluster role permits what the program asks for, and nothing else: compared with what a server was asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.apiserver import ApiServer, node, workload
from tests.deployment.test_manifests import OBJECTS, OPTIONAL, Object
from userspace_proxy.core.idling import IdledService, ScaleTarget
from userspace_proxy.core.model import ServicePortName
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.events import STARTING, ApiEvents, EventRecorder, node_reference
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.kubernetes import KubernetesSettings, KubernetesSource
from userspace_proxy.sources.this_node import wait_for_node
from userspace_proxy.sources.waking import Waker, WakeSettings

PATIENCE_S = 20.0
WEB = ServicePortName("shop", "web")
SCALABLE = ("Deployment", "StatefulSet", "ReplicaSet", "ReplicationController", "DeploymentConfig")

Permission = tuple[str, str, str]
"""API group, resource, verb."""


def permitted(role: Object) -> set[Permission]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@contextlib.asynccontextmanager
async def server_of(*kinds: str) -> AsyncIterator[ApiServer]:
    async with ApiServer(served=kinds) as api:
        api.put(node("node-1", "192.0.2.1"))
        yield api


async def asked_of(api: ApiServer, *, watched: set[str]) -> set[Permission]:
    """Return what a daemon asks the server for, until it watches these resources."""
    async with ApiConnection(Access(api.url), qps=0) as connection:
        source = KubernetesSource(connection, KubernetesSettings(node_name="node-1", unidling=True))
        waker = Waker(connection, "node-1", lambda name: IdledService())
        waker.needs_pods(WEB)
        events = EventRecorder(ApiEvents(connection), "node-1")
        events.record(node_reference("node-1"), STARTING)
        await wait_for_node(connection, "node-1")
        running = [asyncio.create_task(each.run()) for each in (source, events, waker)]
        async with asyncio.timeout(PATIENCE_S):
            await events.flush(PATIENCE_S)
            await api.until(lambda: watched <= {each.resource for each in api.requests if each.verb == "watch"})
            await api.until(lambda: len(api.posted) == 2)
        for task in running:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return {(each.group, each.resource, each.verb) for each in api.requests}


async def test_the_role_covers_all_requests_and_no_more() -> None:
    async with server_of("services", "endpointslices", "nodes", "events") as api:
        with_slices = await asked_of(api, watched={"services", "endpointslices", "nodes"})
    async with server_of("services", "endpoints", "nodes", "events") as api:
        with_endpoints = await asked_of(api, watched={"services", "endpoints", "nodes"})
    asked = with_slices | with_endpoints
    assert asked == permitted(OBJECTS["ClusterRole"]), "a request would be forbidden, or nobody uses a permission"


async def test_the_role_for_scaling_covers_its_requests_and_no_more() -> None:
    async with ApiServer() as api, ApiConnection(Access(api.url), qps=0) as connection:
        for kind in SCALABLE:
            api.put(workload(kind, "web", 0, namespace="shop"))
        targets = tuple(ScaleTarget(kind, "web") for kind in SCALABLE)
        waker = Waker(
            connection, "node-1", lambda name: IdledService(targets=targets), lambda: WakeSettings(scales=True)
        )
        waker.needs_pods(WEB)
        running = asyncio.create_task(waker.run())
        async with asyncio.timeout(PATIENCE_S):
            await api.until(lambda: api.count("update") == len(SCALABLE))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        asked = {(each.group, each.resource, each.verb) for each in api.requests if each.resource != "events"}
    assert asked == permitted(OPTIONAL["ClusterRole"])
