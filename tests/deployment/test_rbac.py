"""The cluster role permits what the program asks for, and nothing else: compared with what a server was asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.apiserver import ApiServer, node
from tests.deployment.test_manifests import OBJECTS
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.events import STARTING, ApiEvents, EventRecorder, node_reference
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.kubernetes import KubernetesSettings, KubernetesSource
from userspace_proxy.sources.this_node import wait_for_node

PATIENCE_S = 20.0

Permission = tuple[str, str, str]
"""API group, resource, verb."""


def permitted() -> set[Permission]:
    return {
        (group, resource, verb)
        for rule in OBJECTS["ClusterRole"]["rules"]
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
        source = KubernetesSource(connection, KubernetesSettings(node_name="node-1"))
        events = EventRecorder(ApiEvents(connection), "node-1")
        events.record(node_reference("node-1"), STARTING)
        await wait_for_node(connection, "node-1")
        running = [asyncio.create_task(source.run()), asyncio.create_task(events.run())]
        async with asyncio.timeout(PATIENCE_S):
            await events.flush(PATIENCE_S)
            await api.until(lambda: watched <= {each.resource for each in api.requests if each.verb == "watch"})
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
    assert asked <= permitted(), "a request would be forbidden"
    assert permitted() - asked == set(), "a permission that nobody uses"
