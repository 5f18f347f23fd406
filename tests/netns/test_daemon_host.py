"""The daemon and its surroundings: ports that are taken, a node that goes away, capabilities, systemd."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from tests.apiserver import ApiServer
from tests.netns.daemon import (
    HEALTH,
    METRICS,
    NODE_NAME,
    V4,
    Daemon,
    answered,
    api_server,
    child,
    get,
    sample,
    slice_of,
    status,
    this_node,
    until,
    web,
)
from tests.netns.topology import Topology
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.redirect.opening import BackendChoice

OBJECTS = (web(), slice_of("web", *V4.pods))


async def _answers(url: str, status: int) -> bool:
    return (await get(url))[0] == status


async def test_ports_of_servers_that_are_taken_are_tried_again(topology: Topology, tmp_path: Path) -> None:
    """Case 79."""
    strangers = [socket.create_server(("0.0.0.0", port)) for port in (10249, 10256)]
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged("10249")
            await daemon.logged("10256")
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            for stranger in strangers:
                stranger.close()
            await until(lambda: _answers(f"{METRICS}/healthz", 200), "no metrics server")
            await until(lambda: _answers(f"{HEALTH}/healthz", 200), "no health server")


@pytest.mark.parametrize(
    ("port", "reason"), [(10249, "FailedToStartMetricServer"), (10256, "FailedToStartProxierHealthcheck")]
)
async def test_with_hard_fail_a_taken_port_ends_the_process_with_an_event(
    topology: Topology, tmp_path: Path, port: int, reason: str
) -> None:
    """Case 79."""
    with socket.create_server(("0.0.0.0", port)):
        async with api_server(*OBJECTS) as api:
            async with Daemon(api, tmp_path, "nft").running("--bind-address-hard-fail") as daemon:
                assert await daemon.ended() == 1
                await daemon.logged(str(port))
            told = {each["reason"]: each for each in api.posted}
            assert told[reason]["type"] == "Warning"
            assert told[reason]["regarding"]["name"] == NODE_NAME


def going_away(api: ApiServer) -> None:
    api.put(this_node(taints=("ToBeDeletedByClusterAutoscaler",)))


def gone(api: ApiServer) -> None:
    api.delete("nodes", NODE_NAME)


async def test_a_node_that_goes_away_gets_no_more_traffic_but_its_proxy_is_alive(
    topology: Topology, tmp_path: Path
) -> None:
    """Case 81."""
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running():
            for goes in (going_away, gone):
                api.put(this_node())
                await until(lambda: _answers(f"{HEALTH}/healthz", 200), "eligible")
                goes(api)
                await until(lambda: _answers(f"{HEALTH}/healthz", 503), "not eligible")
                assert json.loads((await get(f"{HEALTH}/healthz"))[1])["nodeEligible"] is False
                status, text = await get(f"{HEALTH}/livez")
                assert status == 200
                assert "nodeEligible" not in text
            assert await sample('kubeproxy_proxy_livez_total{code="200"}') == 2


def restricted(*capabilities: str) -> tuple[str, ...]:
    """Return what runs a program with these capabilities and no others."""
    granted = ",".join(["-all", *(f"+{each}" for each in capabilities)])
    return ("setpriv", f"--bounding-set={granted}", f"--inh-caps={granted}", "--no-new-privs", "--")


async def test_the_capabilities_of_the_manifest_are_enough(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    low = web("low", cluster_ip="10.96.0.11", node_port=0, externalIPs=[V4.second])
    granted = restricted("net_admin", "net_raw", "net_bind_service")
    async with api_server(*OBJECTS, low, slice_of("low", *V4.pods)) as api:
        async with Daemon(api, tmp_path, variant).running(prefix=granted) as daemon:
            for protocol in L4Protocol:
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
            await answered(topology.outside, V4.node, 30080, "p1", "p2")
            await answered(topology.outside, V4.second, 80, "p1", "p2")
            assert not [line for line in daemon.log if "lacks" in line or "cannot listen" in line]
            found = status(child(daemon, "data"))
            assert {found[f"Cap{each}"] for each in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
            assert found["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    ("variant", "capabilities", "missing"),
    [
        ("nft", ["net_admin"], "CAP_NET_BIND_SERVICE"),
        ("nft", ["net_bind_service"], "CAP_NET_ADMIN"),
        ("legacy", ["net_admin", "net_bind_service"], "CAP_NET_RAW"),
    ],
)
async def test_missing_capabilities_are_named(
    topology: Topology, tmp_path: Path, variant: str, capabilities: list[str], missing: str
) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, variant).running(
            "--iptables-sync-period=1s", prefix=restricted(*capabilities)
        ) as daemon:
            assert missing in await daemon.logged("this process lacks")
            assert "WARNING" in await daemon.logged("this process lacks")
            if capabilities == ["net_admin"]:
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            else:
                await daemon.logged("trying again")
                await until(lambda: _answers(f"{HEALTH}/livez", 503), "healthy without any rules")


async def test_systemd_is_told(topology: Topology, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(path))
        told.settimeout(10)
        async with api_server() as api:
            async with Daemon(api, tmp_path, "nft").running(environ={"NOTIFY_SOCKET": str(path)}) as daemon:
                assert await asyncio.to_thread(told.recv, 100) == b"READY=1"
                await daemon.stop()
                assert await asyncio.to_thread(told.recv, 100) == b"STOPPING=1"
