"""The whole daemon, as a process on a node: objects of a cluster in, traffic of pods and of the outside out."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import apiserver
from tests.netns.daemon import (
    HEALTH,
    METRICS,
    NODE_NAME,
    V4,
    V6,
    Daemon,
    answered,
    api_server,
    exclusively,
    get,
    refused,
    rules,
    sample,
    slice_of,
    until,
    web,
)
from tests.netns.topology import Topology
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.core.objects import TRIGGER_TIME_ANNOTATION
from userspace_proxy.redirect.opening import BackendChoice

TCP = L4Protocol.TCP
CONFIG = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


async def test_objects_in_and_traffic_out(topology: Topology, variant: BackendChoice, tmp_path: Path) -> None:
    pod, outside = topology.pods[0], topology.outside
    of_v6 = slice_of("web", *V6.pods, name="web-6", addressType="IPv6")
    service = web(clusterIPs=[V4.cluster_ip, V6.cluster_ip], ipFamilies=["IPv4", "IPv6"])
    async with api_server(service, slice_of("web", *V4.pods), of_v6) as api:
        async with Daemon(api, tmp_path, variant).running() as daemon:
            for here in (V4, V6):
                for protocol in L4Protocol:
                    await answered(pod, here.cluster_ip, 80, "p1", "p2", protocol=protocol)
                    await answered(outside, here.node, 30080, "p1", "p2", protocol=protocol)

            api.put(slice_of("web", V4.pods[1]))
            await exclusively(pod, V4.cluster_ip, 80, "p2")

            api.delete("services", "web")
            for here in (V4, V6):
                await refused(pod, here.cluster_ip, 80)
                await refused(outside, here.node, 30080)

            began = time.monotonic()
            assert await daemon.stop() == 0
            assert time.monotonic() - began < 2


async def test_workers_serve_tcp_and_udp(topology: Topology, tmp_path: Path) -> None:
    pod = topology.pods[0]
    async with api_server(web(), slice_of("web", *V4.pods)) as api:
        async with Daemon(api, tmp_path, "nft").running("--workers=2") as daemon:
            for protocol in L4Protocol:
                await answered(pod, V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
            await until(lambda: _has_reached("userspace_proxy_connections_total", 1), "no connection is counted")
            for process in ("worker-0", "worker-1"):
                assert await sample(f'userspace_proxy_worker_resident_memory_bytes{{process="{process}"}}') > 0
            began = time.monotonic()
            assert await daemon.stop() == 0
            assert time.monotonic() - began < 2


async def test_what_operators_can_ask(topology: Topology, tmp_path: Path) -> None:
    service = web(internalTrafficPolicy="Local")
    async with api_server(service, slice_of("web", *V4.pods, nodes=("other", "other"))) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await answered(topology.outside, V4.node, 30080, "p1", "p2")
            await daemon.logged("web:udp (UDP)")
            synced = "kubeproxy_sync_proxy_rules_duration_seconds_count"
            await until(lambda: _has_reached(synced, 1), "the first sync is not counted")
            for path in (f"{HEALTH}/healthz", f"{HEALTH}/livez", f"{METRICS}/healthz"):
                assert (await get(path))[0] == 200
            assert await get(f"{METRICS}/proxyMode") == (200, "userspace")
            configz = json.loads((await get(f"{METRICS}/configz"))[1])["kubeproxy.config.k8s.io"]
            assert configz["hostnameOverride"] == NODE_NAME
            assert abs(await sample("kubeproxy_sync_proxy_rules_last_timestamp_seconds") - time.time()) < 20
            assert await sample("kubeproxy_sync_proxy_rules_service_changes_total") == 2
            assert await sample("kubeproxy_sync_proxy_rules_service_changes_pending") == 0
            assert await sample('kubeproxy_sync_proxy_rules_iptables_total{table="nat"}') == 8
            assert await sample('kubeproxy_sync_proxy_rules_iptables_total{table="filter"}') == 2
            name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
            assert await sample(f'{name}{{traffic_policy="internal"}}') == 1
            assert await sample(f'{name}{{traffic_policy="external"}}') == 0
            assert await sample("userspace_proxy_connections_total") >= 1
            changed = slice_of("web", V4.pods[0], nodes=("other",))
            moment = datetime.fromtimestamp(time.time(), UTC).isoformat()
            changed["metadata"]["annotations"] = {TRIGGER_TIME_ANNOTATION: moment}
            api.put(changed)
            name = "kubeproxy_network_programming_duration_seconds_count"
            await until(lambda: _has_reached(name, 1), "the time from pod to rules is not measured")
            await api.until(lambda: bool(api.posted))
            assert [(each["reason"], each["regarding"]["name"]) for each in api.posted] == [("Starting", NODE_NAME)]
            daemon.process.send_signal(signal.SIGHUP)
            await daemon.logged("SIGHUP is ignored")
            assert (await get(f"{METRICS}/healthz"))[0] == 200


async def test_traffic_from_outside_stays_on_the_node_where_its_policy_says_so(
    topology: Topology, tmp_path: Path
) -> None:
    service = web(externalTrafficPolicy="Local")
    async with api_server(service, slice_of("web", *V4.pods, nodes=(NODE_NAME, "other"))) as api:
        async with Daemon(api, tmp_path, "nft").running():
            await exclusively(topology.outside, V4.node, 30080, "p1")
            await answered(topology.pods[0], V4.cluster_ip, 80, "p2")
            of_tcp = [line for line in rules("nft") if " -p tcp " in line and "-A KUBE-PORTALS" in line]
            outside = [line for line in rules("nft") if " -p tcp " in line and "-A KUBE-NODEPORT-CONTAINER" in line]
            inside_port, outside_port = (re.search(r"--to-ports (\d+)", "".join(each)) for each in (of_tcp, outside))
            assert inside_port
            assert outside_port
            assert inside_port[1] != outside_port[1]


async def test_a_node_port_that_a_stranger_has_is_claimed_when_it_is_free(topology: Topology, tmp_path: Path) -> None:
    """Case 60."""
    stranger = socket.create_server(("0.0.0.0", 30080))
    async with api_server(web(), slice_of("web", *V4.pods)) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            line = await daemon.logged("cannot listen on 0.0.0.0:30080")
            assert "default/web:tcp" in line
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            assert await sample('userspace_proxy_failing_service_ports{cause="listen"}') == 1
            await api.until(lambda: any(each["reason"] == "NodePortUnavailable" for each in api.posted))
            told = api.posted[-1]
            assert (told["regarding"]["kind"], told["regarding"]["name"]) == ("Service", "web")
            assert "0.0.0.0:30080" in told["note"]

            stranger.close()
            await until(
                lambda: _has_reached('userspace_proxy_failing_service_ports{cause="listen"}', 0), "still failing"
            )
            await daemon.logged("default/web:tcp (TCP): 0.0.0.0:")
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("0.0.0.0", 30080))
            await answered(topology.outside, V4.node, 30080, "p1", "p2")


async def test_service_ports_beyond_the_range_wait_for_a_free_one(topology: Topology, tmp_path: Path) -> None:
    """Case 66."""
    objects = [apiserver.service(f"s{n}", cluster_ip=f"10.96.0.{20 + n}") for n in range(4)]
    objects += [apiserver.endpoint_slice(f"s{n}", *V4.pods) for n in range(4)]
    with socket.create_server(("0.0.0.0", 31001)):
        async with api_server(*objects) as api:
            async with Daemon(api, tmp_path, "nft").running("--proxy-port-range=31000-31003") as daemon:
                line = await daemon.logged("no remaining ports in 31000-31003")
                await until(
                    lambda: _has_reached('userspace_proxy_failing_service_ports{cause="listen"}', 1), "a failure"
                )
                late = next(n for n in range(4) if f"default/s{n} " in line)
                served = [n for n in range(4) if n != late]
                for n in served:
                    await answered(topology.pods[0], f"10.96.0.{20 + n}", 80, "p1", "p2")
                api.delete("services", f"s{served[0]}")
                await answered(topology.pods[0], f"10.96.0.{20 + late}", 80, "p1", "p2")


async def _has_reached(name: str, value: float) -> bool:
    return await sample(name) >= value


async def test_rules_through_python_iptables_serve_as_well(topology: Topology, tmp_path: Path) -> None:
    async with api_server(web(), slice_of("web", *V4.pods)) as api:
        async with Daemon(api, tmp_path, "libiptc").running() as daemon:
            for protocol in L4Protocol:
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
            assert await daemon.stop() == 0


async def test_without_rules_node_ports_are_served_and_nothing_is_written(topology: Topology, tmp_path: Path) -> None:
    async with api_server(web(), slice_of("web", *V4.pods)) as api:
        async with Daemon(api, tmp_path, "none").running():
            await answered(topology.outside, V4.node, 30080, "p1", "p2")
            assert rules("nft") == rules("legacy") == []
