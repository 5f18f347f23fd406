"""Hybrid mode: beside another kube-proxy, only what is idled is led here, and nothing of the other one is touched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.netns.daemon import answered, until
from tests.netns.other_proxy import NftablesProxy, OtherProxy, own_rules
from tests.netns.services import BACKEND_PORT
from tests.netns.topology import ADDRESSES, Topology
from tests.netns.traffic import opened
from tests.support.namespaces import Namespace, run
from userspace_proxy.core import hybrid
from userspace_proxy.core.config import DEFAULTS, Config, with_field
from userspace_proxy.core.config_addresses import NodeAddresses
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.health import ProxyHealth
from userspace_proxy.core.model import Endpoint, IPFamily, L4Protocol, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.rules import JUMPS_IN_FRONT
from userspace_proxy.metrics import Metrics
from userspace_proxy.node_proxy import NodeProxy
from userspace_proxy.redirect import conntrack
from userspace_proxy.redirect.cleanup import of_userspace_mode
from userspace_proxy.redirect.keeper import RuleKeeper
from userspace_proxy.redirect.opening import BackendChoice, open_redirectors

V4, V6 = ADDRESSES[IPFamily.IPV4], ADDRESSES[IPFamily.IPV6]
NODE = NodeAddresses(IPFamily.IPV4, {IPFamily.IPV4: V4.node, IPFamily.IPV6: V6.node})


def web(protocol: L4Protocol, *pods: str, is_idled: bool = False) -> ServicePort:
    """Return the service that the other proxy knows, too."""
    name = ServicePortName("default", "web", protocol.lower(), protocol)
    endpoints = tuple(Endpoint(pod, BACKEND_PORT) for pod in pods)
    return ServicePort(name, 80, endpoints, cluster_ips=(V4.cluster_ip,), node_port=30080, wakes_on_connect=is_idled)


IDLED = Snapshot.of(*(web(protocol, is_idled=True) for protocol in L4Protocol))
WOKEN = Snapshot.of(*(web(protocol, V4.pods[0]) for protocol in L4Protocol))


@asynccontextmanager
async def hybrid_proxy(variant: BackendChoice, *, is_killed: bool = False) -> AsyncIterator[NodeProxy]:
    """Run what the daemon runs, with snapshots of the test's own. Unless it is killed, its rules go with it."""
    document = with_field(DEFAULTS, "userspaceProxy.unidling", "hybrid")
    config = Config(document=with_field(document, "iptables.minSyncPeriod", Duration(0)))
    found = await open_redirectors(variant, jumps=JUMPS_IN_FRONT)
    keeper = RuleKeeper(found.redirectors, conntrack=conntrack.available(), leftovers=of_userspace_mode)
    proxy = NodeProxy(config, NODE, keeper, ProxyHealth(30.0), Metrics("0"))
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(proxy.run())
            yield proxy
            running.cancel()
    finally:
        if not is_killed:
            await keeper.withdraw()
        await keeper.close()


async def led_here(variant: BackendChoice, *, is_led: bool = True) -> None:
    """Wait until the cluster IP is led to the proxy, or is so no more."""

    async def is_right() -> bool:
        rules = [line for line in own_rules(variant) if line.startswith("-A KUBE-PORTALS-CONTAINER")]
        return len(rules) == (2 if is_led else 0)

    await until(is_right, f"the cluster IP is {'not ' * is_led}led here: {own_rules(variant)}")


async def is_accepted(client: Namespace, address: str, port: int) -> bool:
    with opened(client, L4Protocol.TCP, address) as sock:
        try:
            async with asyncio.timeout(2):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except (OSError, TimeoutError):
            return False
    return True


async def test_only_what_is_idled_is_led_here_and_no_rule_of_the_other_proxy_is_touched(
    topology: Topology, variant: BackendChoice
) -> None:
    other = OtherProxy(variant)
    before = other.rules()
    outside = topology.outside
    awake = ServicePort(
        ServicePortName("default", "awake"), 80, (Endpoint(V4.pods[0], BACKEND_PORT),), cluster_ips=("10.96.0.11",)
    )
    assert not await is_accepted(outside, V4.cluster_ip, 80)
    async with hybrid_proxy(variant) as proxy:
        proxy.want(Snapshot.of(*IDLED.service_ports.values(), awake))
        await led_here(variant)
        for address, port in ((V4.cluster_ip, 80), (V4.node, 30080)):
            assert await is_accepted(outside, address, port)
        assert await is_accepted(topology.node, V4.cluster_ip, 80)
        for chain in ("PREROUTING", "OUTPUT"):
            jumps = [
                line for line in run(f"iptables-{variant}-save", "-t", "nat").splitlines() if f"-A {chain} " in line
            ]
            first, second, third, *_ = (line.rpartition(" ")[2] for line in jumps)
            assert first.startswith("KUBE-PORTALS")
            assert second.startswith("KUBE-NODEPORT")
            assert third == "KUBE-SERVICES"
        assert not any("10.96.0.11" in line for line in own_rules(variant))
        listening = topology.node.run("ss", "-Hltun")
        assert ":30080 " not in listening
        assert other.rules() == before

        proxy.want(Snapshot.of(*WOKEN.service_ports.values(), awake))
        await led_here(variant, is_led=False)
        assert not await is_accepted(outside, V4.cluster_ip, 80)
        assert other.rules() == before
    assert own_rules(variant) == []
    assert other.rules() == before


async def test_beside_the_nftables_mode(topology: Topology, variant: BackendChoice) -> None:
    other, client = NftablesProxy(), topology.outside
    before = other.rules()
    assert not await is_accepted(client, V4.cluster_ip, 80)
    async with hybrid_proxy(variant) as proxy:
        proxy.want(IDLED)
        await led_here(variant)
        for each in (client, topology.node):
            assert await is_accepted(each, V4.cluster_ip, 80)
        assert other.rules() == before
        other.leads_to(V4.pods[1])
        assert await is_accepted(client, V4.cluster_ip, 80)
        before = other.rules()
        proxy.want(WOKEN)
        await led_here(variant, is_led=False)
        await answered(client, V4.cluster_ip, 80, "p2")
    assert own_rules(variant) == []
    assert other.rules() == before


async def test_beside_the_ipvs_mode_which_makes_cluster_ips_local(topology: Topology, variant: BackendChoice) -> None:
    topology.node.ip("link", "add", "kube-ipvs0", "type", "bridge")
    topology.node.ip("addr", "add", f"{V4.cluster_ip}/32", "dev", "kube-ipvs0")
    assert not await is_accepted(topology.outside, V4.cluster_ip, 80)
    async with hybrid_proxy(variant) as proxy:
        proxy.want(IDLED)
        await led_here(variant)
        for each in (topology.outside, topology.node):
            assert await is_accepted(each, V4.cluster_ip, 80)
        assert f"{V4.cluster_ip}:80 " not in topology.node.run("ss", "-Hltun")


async def test_a_woken_service_is_the_other_proxys_for_new_clients_at_once_and_for_udp_flows_after_a_minute(
    topology: Topology, variant: BackendChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "WAKING_S", 3.0)
    p1, p2 = V4.pods
    other, client = OtherProxy(variant), topology.outside
    loop = asyncio.get_running_loop()
    async with hybrid_proxy(variant) as proxy:
        proxy.want(IDLED)
        await led_here(variant)
        with opened(client, L4Protocol.UDP, V4.cluster_ip) as flow:
            await loop.sock_connect(flow, (V4.cluster_ip, 80))

            async def asked() -> str:
                await loop.sock_sendall(flow, b"ping")
                try:
                    async with asyncio.timeout(0.2):
                        return (await loop.sock_recv(flow, 100)).decode()
                except (OSError, TimeoutError):
                    return ""

            async def answers(name: str) -> bool:
                return await asked() == f"{name}:ping"

            await asked()  # the kernel knows the flow now
            other.leads_to(p2)
            before = other.rules()
            proxy.want(Snapshot.of(*(web(protocol, p1) for protocol in L4Protocol)))
            await until(lambda: answers("p1"), "the flow is not served by what it woke")
            await led_here(variant, is_led=False)
            assert await answers("p1")
            for protocol in L4Protocol:
                await answered(client, V4.cluster_ip, 80, "p2", protocol=protocol)
            assert await answers("p1")

            await until(lambda: answers("p2"), "the flow does not go the other proxy's way")
            assert other.rules() == before


async def test_a_service_that_is_idled_again_is_led_here_again(topology: Topology, variant: BackendChoice) -> None:
    async with hybrid_proxy(variant) as proxy:
        for _ in range(2):
            proxy.want(IDLED)
            await led_here(variant)
            assert await is_accepted(topology.outside, V4.cluster_ip, 80)
            proxy.want(WOKEN)
            await led_here(variant, is_led=False)


async def test_what_a_killed_process_left_is_put_right_by_the_next_one(
    topology: Topology, variant: BackendChoice
) -> None:
    other = OtherProxy(variant)
    before = other.rules()
    async with hybrid_proxy(variant, is_killed=True) as proxy:
        proxy.want(IDLED)
        await led_here(variant)
    await led_here(variant)
    other.leads_to(V4.pods[1])
    async with hybrid_proxy(variant) as proxy:
        proxy.want(WOKEN)
        await answered(topology.outside, V4.cluster_ip, 80, "p2")
        await led_here(variant, is_led=False)
    assert own_rules(variant) == []
    assert before != other.rules()  # it has an endpoint now


async def test_what_was_left_in_the_other_variant_goes_and_nothing_else(topology: Topology) -> None:
    other = OtherProxy("legacy")
    before = other.rules()
    async with hybrid_proxy(BackendChoice.LEGACY, is_killed=True) as proxy:
        proxy.want(IDLED)
        await led_here(BackendChoice.LEGACY)
    async with hybrid_proxy(BackendChoice.NFT) as proxy:
        proxy.want(IDLED)
        await led_here(BackendChoice.NFT)
        await until(lambda: _has_none(BackendChoice.LEGACY), "rules of ours in the other variant")
        assert other.rules() == before


async def _has_none(variant: BackendChoice) -> bool:
    return not own_rules(variant)
