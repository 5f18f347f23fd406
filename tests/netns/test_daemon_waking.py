"""An idled service on a node, from its first client to its answer: real rules, an API server, pods that take time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests import apiserver
from tests.apiserver import ApiServer, Object
from tests.netns.daemon import NODE_NAME, V4, Daemon, api_server, sample, slice_of, web
from tests.netns.topology import Topology
from tests.netns.traffic import ask
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.redirect.opening import BackendChoice

TCP, UDP = L4Protocol.TCP, L4Protocol.UDP
IDLED = {
    "idling.alpha.openshift.io/idled-at": "2026-01-31T12:00:00Z",
    "idling.alpha.openshift.io/unidle-targets": '[{"kind":"Deployment","group":"apps","name":"web","replicas":2}]',
}
START_S = 2.0
PATIENCE_S = 15.0


def needs(api: ApiServer) -> list[Object]:
    """Return the Events that ask for pods."""
    return [each for each in api.posted if each["reason"] == "NeedPods"]


async def start_pods(api: ApiServer) -> None:
    """Do what OpenShift's controller and the kubelet do: scale, take the mark away, and be ready in a while."""
    await api.until(lambda: bool(needs(api)))
    api.put(apiserver.endpoints("web"))
    await asyncio.sleep(START_S)
    api.put(slice_of("web", *V4.pods))


@pytest.mark.parametrize("clients", [3, 16])
async def test_clients_of_an_idled_service_are_answered_once_its_pods_are_there(
    topology: Topology, variant: BackendChoice, tmp_path: Path, clients: int
) -> None:
    objects = (web(), slice_of("web"), apiserver.endpoints("web", annotations=IDLED))
    async with api_server(*objects, apiserver.workload("Deployment", "web", 0)) as api:
        async with Daemon(api, tmp_path, variant).running("--wake-scale") as daemon, asyncio.TaskGroup() as tasks:
            await daemon.logged("web:udp (UDP): ")
            starting = tasks.create_task(start_pods(api))
            asking = [
                tasks.create_task(ask(topology.pods[each % 2], TCP, V4.cluster_ip, 80, patience_s=PATIENCE_S))
                for each in range(clients - 1)
            ]
            asking += [
                tasks.create_task(ask(topology.outside, TCP, V4.node, 30080, patience_s=PATIENCE_S)),
                tasks.create_task(ask(topology.pods[0], UDP, V4.cluster_ip, 80, patience_s=PATIENCE_S)),
            ]
            await api.until(lambda: len(needs(api)) == 2)
            assert not starting.done()
            late = tasks.create_task(ask(topology.pods[1], UDP, V4.cluster_ip, 80, patience_s=PATIENCE_S))
            assert {await each for each in (*asking, late)} <= {"p1", "p2"}
            assert await sample('userspace_proxy_wake_events_total{result="done"}') == 2
            assert await sample('userspace_proxy_wake_scalings_total{result="done"}') == 1
    messages = {f"The service-port web:{name} needs pods." for name in ("tcp", "udp")}
    assert {each["message"] for each in needs(api)} == messages
    assert {each["source"]["host"] for each in needs(api)} == {NODE_NAME}
