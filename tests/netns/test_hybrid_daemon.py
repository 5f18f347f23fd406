"""The daemon in hybrid mode, as a process: what it leaves to the other kube-proxy, and moves from mode to mode."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.netns.daemon import V4, Daemon, answered, api_server, get, sample, slice_of, started, until, web
from tests.netns.other_proxy import OtherProxy, own_rules
from tests.netns.topology import Topology
from userspace_proxy.redirect.opening import BackendChoice

HYBRID = ("--unidling=hybrid", "--iptables-sync-period=1s")
OWN_HEALTH, OWN_METRICS = "http://127.0.0.1:10356", "http://127.0.0.1:10349"
OBJECTS = (web(externalTrafficPolicy="Local", healthCheckNodePort=32000), slice_of("web", *V4.pods))


@pytest.fixture
def ports_of_the_other_proxy(topology: Topology) -> Iterator[None]:
    """Hold what a kube-proxy has: health, metrics, a node port, a health check of a service."""
    with ExitStack() as stack:
        for port in (10256, 10249, 30080, 32000):
            stack.enter_context(socket.create_server(("0.0.0.0", port)))
        yield


async def synced() -> None:
    """Wait until rules were written once."""
    name = "kubeproxy_sync_proxy_rules_duration_seconds_count"

    async def has_synced() -> bool:
        return await sample(name, at=OWN_METRICS) > 0

    await until(has_synced, "no sync")


@pytest.mark.usefixtures("ports_of_the_other_proxy")
async def test_ports_of_the_other_proxy_are_not_wanted(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    other = OtherProxy(variant)
    before = other.rules()
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, variant).running(*HYBRID, "--conntrack-tcp-timeout-established=77s") as daemon:
            await daemon.logged("conntrack: without effect in hybrid mode")
            await synced()
            assert (await get(f"{OWN_HEALTH}/livez"))[0] == 200
            assert other.rules() == before
            assert await daemon.stop() == 0
    assert not [line for line in daemon.log if "cannot listen" in line or "health check" in line]
    assert own_rules(variant) == []
    assert other.rules() == before
    assert "established = 77" not in topology.node.run("sysctl", "net.netfilter")


async def test_a_server_whose_port_is_taken_says_who_may_have_it_and_what_to_set(
    topology: Topology, tmp_path: Path
) -> None:
    strangers = [socket.create_server(("0.0.0.0", port)) for port in (10356, 10349)]
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running(*HYBRID) as daemon:
            for port, field in ((10356, "healthz"), (10349, "metrics")):
                line = await daemon.logged(f":{port}: address already in use")
                assert "the other kube-proxy of this node may have it" in line
                assert f"--{field}-bind-address ({field}BindAddress)" in line
            for stranger in strangers:
                stranger.close()


async def test_a_node_moves_from_mode_to_mode(topology: Topology, variant: BackendChoice, tmp_path: Path) -> None:
    client = topology.outside
    async with api_server(web(), slice_of("web", V4.pods[0])) as api:
        daemon = Daemon(api, tmp_path, variant)
        for mode in ("off", "on"):
            async with daemon.running(f"--unidling={mode}") as running:
                await answered(client, V4.cluster_ip, 80, "p1")
                await answered(client, V4.node, 30080, "p1")
                await running.stop()
            assert own_rules(variant)
        other = OtherProxy(variant)
        other.leads_to(V4.pods[1])
        before = other.rules()
        async with daemon.running(*HYBRID) as running:
            await answered(client, V4.cluster_ip, 80, "p2")
            await synced()
            assert not [line for line in own_rules(variant) if line.startswith("-A KUBE-")]
            assert other.rules() == before
            await running.stop(signal.SIGKILL)
        assert own_rules(variant)
        async with daemon.running(*HYBRID) as running:
            await synced()
            assert await running.stop() == 0
        assert own_rules(variant) == []
        assert other.rules() == before
        async with daemon.running("--unidling=on"):
            await answered(client, V4.cluster_ip, 80, "p1")
            await until(lambda: _is_gone(other), "the rules of the other mode are still there")


async def _is_gone(other: OtherProxy) -> bool:
    return not any("KUBE-SERVICES" in line for line in other.rules())


async def test_a_clean_up_in_hybrid_mode_leaves_the_other_proxy_alone(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    async with api_server(web(), slice_of("web", V4.pods[0])) as api:
        async with Daemon(api, tmp_path, variant).running() as running:
            await answered(topology.outside, V4.cluster_ip, 80, "p1")
            await running.stop()
    other = OtherProxy(variant)
    before = other.rules()
    async with started(["--cleanup", "--unidling=hybrid"]) as cleaning:
        assert await cleaning.ended() == 0
    assert own_rules(variant) == []
    assert other.rules() == before
