"""Who reaches a service from where, over real traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest

from tests.netns.node import proxied
from tests.netns.services import BOTH, service
from tests.netns.topology import ADDRESSES, Topology
from tests.netns.traffic import NoAnswer, ask
from tests.support.namespaces import run
from userspace_proxy.core.model import IPFamily, L4Protocol
from userspace_proxy.core.rules import Style
from userspace_proxy.redirect.opening import BackendChoice

STYLES = pytest.mark.parametrize("style", list(Style), ids=str)


@STYLES
async def test_pods_the_host_and_the_outside_reach_every_address_of_a_service(
    topology: Topology, variant: BackendChoice, family: IPFamily, style: Style
) -> None:
    """Cases 1 to 7: cluster IP, node port, load-balancer and external IPs, TCP and connected UDP."""
    here = ADDRESSES[family]
    pod, node, outside = topology.pods[0], topology.node, topology.outside
    async with proxied(topology, variant, style) as served:
        assert (await served.serve(*BOTH)).is_complete
        asked = [
            (pod, here.cluster_ip, 80, ""),
            (node, here.cluster_ip, 80, ""),
            (node, here.cluster_ip, 80, here.bridge),
            (outside, here.node, 30080, ""),
            (outside, here.second, 30080, ""),
            (node, here.loopback, 30080, ""),
            (node, here.node, 30080, here.second),
            (outside, here.node, 30080, here.far_outside),
            (outside, here.second, 30080, here.far_outside),
            (pod, here.bridge, 30080, ""),
            (pod, here.load_balancer_ip, 80, ""),
            (node, here.load_balancer_ip, 80, ""),
            (outside, here.load_balancer_ip, 80, ""),
            (outside, here.external_ip, 80, ""),
            (pod, here.second, 80, ""),
            (node, here.second, 80, ""),
            (outside, here.second, 80, ""),
        ]
        if style is Style.DNAT:
            asked += [(namespace, here.external_ip, 80, "") for namespace in (node, pod)]
        failed = []
        for protocol in L4Protocol:
            for namespace, address, port, source in asked:
                try:
                    assert await ask(namespace, protocol, address, port, source=source) in ("p1", "p2")
                except NoAnswer as error:
                    failed.append((namespace.name, protocol, source, str(error)))
        assert not failed


async def test_faithful_rules_miss_an_external_ip_that_is_not_local_from_the_host_and_from_filtered_bridges(
    topology: Topology, variant: BackendChoice, family: IPFamily
) -> None:
    """Case 7, as redirector.md names it; kube-proxy 1.25 misses the same."""
    external_ip = ADDRESSES[family].external_ip
    async with proxied(topology, variant) as served:
        await served.serve(*BOTH)
        with pytest.raises(NoAnswer):
            await ask(topology.node, L4Protocol.TCP, external_ip, 80, patience_s=0.5)

        for bridges_are_filtered in filtered_bridges(topology):
            if bridges_are_filtered:
                with pytest.raises(NoAnswer):
                    await ask(topology.pods[0], L4Protocol.TCP, external_ip, 80, patience_s=0.5)
            else:
                assert await ask(topology.pods[0], L4Protocol.TCP, external_ip, 80) in ("p1", "p2")


def filtered_bridges(topology: Topology) -> Iterator[bool]:
    """Switch bridge netfilter on and off; where the kernel has none, bridges are never filtered."""
    if not Path("/proc/sys/net/bridge").exists():
        yield False
        return
    for switch in (1, 0):
        names = ("net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables")
        topology.node.run("sysctl", "-qw", *(f"{name}={switch}" for name in names))
        yield bool(switch)


async def test_a_pod_on_a_routed_link_reaches_a_cluster_ip_with_dnat(
    topology: Topology, variant: BackendChoice, family: IPFamily
) -> None:
    """Case 8."""
    async with proxied(topology, variant, Style.DNAT) as served:
        await served.serve(*BOTH)

        for protocol in L4Protocol:
            answer = await ask(topology.routed_pod, protocol, ADDRESSES[family].cluster_ip, 80, patience_s=4)
            assert answer in ("p1", "p2")


def close_firewall(variant: BackendChoice) -> None:
    for stem, icmp in (("iptables", "icmp"), ("ip6tables", "ipv6-icmp")):
        accepted = ("-i lo", "-m conntrack --ctstate ESTABLISHED", f"-p {icmp}")
        rules = "".join(f"-A INPUT {match} -j ACCEPT\n" for match in accepted)
        save = f"*filter\n:INPUT DROP [0:0]\n{rules}COMMIT\n"
        run(f"{stem}-{variant}-restore", "--noflush", stdin=save)


async def test_dnat_rules_pass_a_firewall_that_drops_and_proxy_ports_stay_closed_to_the_world(
    topology: Topology, variant: BackendChoice, family: IPFamily
) -> None:
    """Case 9."""
    close_firewall(variant)
    without_node_port = [replace(each, node_port=0) for each in BOTH]
    here = ADDRESSES[family]
    async with proxied(topology, variant, Style.DNAT) as served:
        await served.serve(*without_node_port)

        for protocol in L4Protocol:
            assert await ask(topology.pods[0], protocol, here.cluster_ip, 80) in ("p1", "p2")
            assert await ask(topology.outside, protocol, here.load_balancer_ip, 80) in ("p1", "p2")
        for port in (port for key, port in served.ports.items() if key.family is family):
            with pytest.raises(NoAnswer):
                await ask(topology.outside, L4Protocol.TCP, here.node, port, patience_s=0.3)


async def test_a_pod_reaches_its_own_service(topology: Topology, variant: BackendChoice, family: IPFamily) -> None:
    """Case 11."""
    async with proxied(topology, variant) as served:
        await served.serve(service(pods=1), service(L4Protocol.UDP, pods=1))

        for protocol in L4Protocol:
            assert await ask(topology.pods[0], protocol, ADDRESSES[family].cluster_ip, 80) == "p1"


async def test_source_ranges_keep_others_from_a_load_balancer_ip(
    topology: Topology, variant: BackendChoice, family: IPFamily
) -> None:
    ranges = (ip_network("192.168.77.0/24"), ip_network("fd00:77::/64"))
    here = ADDRESSES[family]
    restricted = replace(service(), load_balancer_source_ranges=ranges, external_ips=())
    local = replace(restricted, load_balancer_ips=(here.second,))
    async with proxied(topology, variant) as served:
        for service_port in (restricted, local):
            await served.serve(service_port)
            (address,) = (ip for ip in service_port.load_balancer_ips if (":" in ip) == (":" in here.node))
            assert await ask(topology.outside, L4Protocol.TCP, address, 80) in ("p1", "p2")
            with pytest.raises(NoAnswer):
                await ask(topology.pods[0], L4Protocol.TCP, address, 80, patience_s=0.5)


async def test_a_service_without_endpoints_closes_at_once(
    topology: Topology, variant: BackendChoice, family: IPFamily
) -> None:
    """Field case 9: neither the cluster IP nor the node port hangs, and both work once an endpoint is there."""
    here = ADDRESSES[family]
    asked = ((topology.pods[0], here.cluster_ip, 80), (topology.outside, here.node, 30080))
    async with proxied(topology, variant) as served:
        await served.serve(replace(service(), endpoints=()))
        for namespace, address, port in asked:
            with pytest.raises(NoAnswer, match=r"closed after|reset"):
                await ask(namespace, L4Protocol.TCP, address, port, patience_s=1)

        await served.serve(service())

        for namespace, address, port in asked:
            assert await ask(namespace, L4Protocol.TCP, address, port, patience_s=1) in ("p1", "p2")


async def test_a_held_node_port_is_served_when_the_rules_are_gone(
    topology: Topology, variant: BackendChoice, family: IPFamily
) -> None:
    async with proxied(topology, variant) as served:
        await served.serve(*BOTH)
        run("nft", "flush", "ruleset")
        for stem in ("iptables", "ip6tables"):
            run(f"{stem}-{variant}", "-t", "nat", "-F")

        for protocol in L4Protocol:
            assert await ask(topology.outside, protocol, ADDRESSES[family].second, 30080) in ("p1", "p2")


async def test_nothing_is_written_when_nothing_changed(topology: Topology, variant: BackendChoice) -> None:
    """Case 13."""
    async with proxied(topology, variant) as served:
        assert (await served.serve(*BOTH)).was_written
        assert not (await served.serve(*BOTH)).was_written
        assert not (await served.keeper.check()).was_written
