"""The whole daemon, as a process on a node: objects of a cluster in, traffic of pods and of the outside out."""

from __future__ import annotations

import json
from pathlib import Path

from tests.netns.daemon import (
    HEALTH,
    METRICS,
    V4,
    Daemon,
    answered,
    api_server,
    get,
    refused,
    slice_of,
    web,
)
from tests.netns.topology import Topology
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.redirect.opening import BackendChoice


async def test_objects_in_and_traffic_out(topology: Topology, variant: BackendChoice, tmp_path: Path) -> None:
    pod, outside = topology.pods[0], topology.outside
    async with api_server(web(), slice_of("web", *V4.pods)) as api:
        async with Daemon(api, tmp_path, variant).running() as daemon:
            for protocol in L4Protocol:
                await answered(pod, V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
                await answered(outside, V4.node, 30080, "p1", "p2", protocol=protocol)
            assert (await get(f"{HEALTH}/healthz"))[0] == 200
            assert (await get(f"{HEALTH}/livez"))[0] == 200
            assert (await get(f"{METRICS}/proxyMode")) == (200, "userspace")
            assert "kubeproxy.config.k8s.io" in json.loads((await get(f"{METRICS}/configz"))[1])
            print((await get(f"{METRICS}/metrics"))[1])

            api.put(slice_of("web", V4.pods[1]))
            await answered(pod, V4.cluster_ip, 80, "p2")

            api.delete("services", "web")
            await refused(pod, V4.cluster_ip, 80)
            await refused(outside, V4.node, 30080)
            assert await daemon.stop() == 0
            print("".join(daemon.log))
            assert 0
