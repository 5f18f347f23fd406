"""Rules: where packets go, and the very text that kube-proxy 1.25 left behind."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network

import pytest

from tests.support import golden
from tests.support.tracer import Kernel, Packet
from userspace_proxy.core.model import Endpoint, IPFamily, L4Protocol, Scope, ServicePort, ServicePortName
from userspace_proxy.core.portals import HeldPort, NodeFacts, ProxyPortKey, held_ports, proxy_port_keys
from userspace_proxy.core.rule import OWN_CHAINS, Chain, Comment, Jump, Table, Verdict, comment_text
from userspace_proxy.core.rules import FIRST_JUMPS, LAST_JUMPS, Style, render

NODE = NodeFacts("192.168.77.1", local_addresses=frozenset({"192.168.77.1", "192.168.77.5", "10.244.1.1", "127.0.0.1"}))
NODE_6 = NodeFacts("fd00:77::1", bind_address="::", local_addresses=frozenset({"fd00:77::1", "::1"}))
WEB = ServicePort(
    ServicePortName("prod", "web", "http"),
    80,
    cluster_ips=("10.96.0.5", "fd00:96::5"),
    external_ips=("203.0.113.7",),
    load_balancer_ips=("198.51.100.9",),
    node_port=30080,
)
GAME = ServicePort(ServicePortName("prod", "game", "", L4Protocol.UDP), 7000, cluster_ips=("10.96.0.6",))
PORTS = {
    ProxyPortKey(WEB.name, IPFamily.IPV4): 40001,
    ProxyPortKey(WEB.name, IPFamily.IPV6): 40006,
    ProxyPortKey(GAME.name, IPFamily.IPV4): 40002,
}
POD, CLIENT, HOST = "10.244.1.11", "192.168.77.100", "192.168.77.1"
BOTH_STYLES = pytest.mark.parametrize("style", list(Style))


def kernel(*service_ports: ServicePort, node: NodeFacts = NODE, style: Style = Style.FAITHFUL) -> Kernel:
    return Kernel(render(service_ports, PORTS, node, style), node.local_addresses, interface="10.244.1.1")


def texts(*service_ports: ServicePort, node: NodeFacts = NODE, style: Style = Style.FAITHFUL) -> list[str]:
    return [rule.text for rule in render(service_ports, PORTS, node, style)]


def test_faithful_rules_are_those_that_kube_proxy_printed() -> None:
    rules = render(golden.service_ports(), golden.proxy_ports(), golden.NODE)

    written, printed = golden.lines_of(rules), golden.rule_lines(golden.userspace_save())

    assert {chain: sorted(lines) for chain, lines in written.items()} == {
        chain: sorted(lines) for chain, lines in printed.items()
    }
    for chain in (Chain.PREROUTING, Chain.OUTPUT, Chain.INPUT):
        assert written[chain] == printed[chain]


def test_own_chains_are_those_that_kube_proxy_printed() -> None:
    declared = {line[1:].split()[0] for line in golden.userspace_save().splitlines() if line.startswith(":KUBE-")}

    assert declared == {chain.value for chains in OWN_CHAINS.values() for chain in chains}


def test_every_jump_leads_from_a_table_into_a_chain_of_the_same_table() -> None:
    for jump in (*FIRST_JUMPS, *LAST_JUMPS):
        assert isinstance(jump.target, Jump)
        assert jump.chain.table is jump.target.chain.table
        assert jump.target.chain in OWN_CHAINS[jump.chain.table]
    assert list(Table) == [Table.FILTER, Table.NAT]


def test_a_pod_reaches_a_cluster_ip_at_the_address_that_its_packet_came_in_by() -> None:
    packet = kernel(WEB).from_elsewhere(Packet(POD, "10.96.0.5", 80))

    assert (packet.destination, packet.port) == ("10.244.1.1", 40001)


def test_with_dnat_a_pod_reaches_a_cluster_ip_at_the_node_ip() -> None:
    packet = kernel(WEB, style=Style.DNAT).from_elsewhere(Packet(POD, "10.96.0.5", 80))

    assert (packet.destination, packet.port) == ("192.168.77.1", 40001)


@BOTH_STYLES
def test_a_specific_bind_address_is_the_destination_of_every_rule(style: Style) -> None:
    node = replace(NODE, bind_address="192.168.77.5")
    bound = kernel(WEB, node=node, style=style)

    for packet in (
        bound.from_elsewhere(Packet(POD, "10.96.0.5", 80)),
        bound.from_host(Packet(HOST, "10.96.0.5", 80)),
        bound.from_elsewhere(Packet(CLIENT, "192.168.77.1", 30080)),
        bound.from_host(Packet(HOST, "127.0.0.1", 30080)),
    ):
        assert (packet.destination, packet.port) == ("192.168.77.5", 40001)
    assert not any("REDIRECT" in text for text in texts(WEB, node=node, style=style))


@BOTH_STYLES
@pytest.mark.parametrize("destination", ["10.96.0.5", "198.51.100.9"])
def test_the_host_reaches_every_portal_at_the_node_ip(style: Style, destination: str) -> None:
    packet = kernel(WEB, style=style).from_host(Packet(HOST, destination, 80))

    assert (packet.destination, packet.port) == ("192.168.77.1", 40001)


@BOTH_STYLES
def test_another_port_or_protocol_of_a_portal_is_left_alone(style: Style) -> None:
    untouched = kernel(WEB, GAME, style=style)

    for packet in (Packet(POD, "10.96.0.5", 81), Packet(POD, "10.96.0.5", 80, L4Protocol.UDP)):
        assert untouched.from_elsewhere(packet) == packet
        assert untouched.from_host(packet) == packet


def test_udp_and_tcp_each_reach_their_own_proxy_port() -> None:
    packet = kernel(WEB, GAME).from_elsewhere(Packet(POD, "10.96.0.6", 7000, L4Protocol.UDP))

    assert packet.port == 40002


@BOTH_STYLES
@pytest.mark.parametrize("destination", ["192.168.77.1", "192.168.77.5", "127.0.0.1"])
def test_a_node_port_answers_on_every_local_address(style: Style, destination: str) -> None:
    node = kernel(WEB, style=style)

    assert node.from_elsewhere(Packet(CLIENT, destination, 30080)).port == 40001
    assert node.from_host(Packet(HOST, destination, 30080)).port == 40001


@BOTH_STYLES
def test_the_number_of_a_node_port_at_a_foreign_address_is_left_alone(style: Style) -> None:
    packet = Packet(POD, "93.184.216.34", 30080)

    assert kernel(WEB, style=style).from_elsewhere(packet) == packet


@BOTH_STYLES
def test_node_port_addresses_restrict_node_ports(style: Style) -> None:
    node = replace(NODE, node_port_networks=(ip_network("192.168.77.5/32"),))
    restricted = kernel(WEB, node=node, style=style)

    assert restricted.from_elsewhere(Packet(CLIENT, "192.168.77.5", 30080)).port == 40001
    assert restricted.from_elsewhere(Packet(CLIENT, "192.168.77.1", 30080)).port == 30080
    assert restricted.from_host(Packet(HOST, "192.168.77.1", 30080)).port == 30080


def test_a_family_without_node_port_networks_has_no_node_ports() -> None:
    node = replace(NODE, node_port_networks=())

    assert not any("NODEPORT" in text for text in texts(WEB, node=node))


def test_node_port_addresses_that_allow_all_change_no_text() -> None:
    node = replace(NODE, node_port_networks=(ip_network("0.0.0.0/0"),))

    assert texts(WEB, node=node) == texts(WEB)


def test_faithful_rules_miss_an_external_ip_that_is_not_local_from_the_host_and_from_bridge_ports() -> None:
    node = kernel(WEB)
    from_bridge_port = Packet(POD, "203.0.113.7", 80, from_bridge_port=True)

    assert node.from_elsewhere(Packet(CLIENT, "203.0.113.7", 80)).port == 40001
    assert node.from_elsewhere(from_bridge_port) == from_bridge_port
    assert node.from_host(Packet(HOST, "203.0.113.7", 80)).port == 80


def test_faithful_rules_serve_an_external_ip_that_is_local_from_everywhere() -> None:
    node = replace(NODE, local_addresses=NODE.local_addresses | {"203.0.113.7"})
    local = kernel(WEB, node=node)

    assert local.from_elsewhere(Packet(POD, "203.0.113.7", 80, from_bridge_port=True)).port == 40001
    assert local.from_host(Packet(HOST, "203.0.113.7", 80)).port == 40001


def test_dnat_rules_serve_an_external_ip_from_everywhere() -> None:
    node = kernel(WEB, style=Style.DNAT)

    assert node.from_elsewhere(Packet(POD, "203.0.113.7", 80, from_bridge_port=True)).port == 40001
    assert node.from_host(Packet(HOST, "203.0.113.7", 80)).port == 40001


def test_faithful_rules_let_only_the_proxy_ports_of_node_ports_through_a_closed_firewall() -> None:
    node = kernel(WEB, GAME)

    assert node.lets_in(node.from_elsewhere(Packet(POD, "10.96.0.5", 80)))
    assert not node.lets_in(node.from_elsewhere(Packet(POD, "10.96.0.6", 7000, L4Protocol.UDP)))
    assert node.lets_in(Packet(CLIENT, "192.168.77.1", 40001))


def test_dnat_rules_let_every_service_through_a_closed_firewall_and_nobody_who_asks_for_a_proxy_port() -> None:
    node = kernel(WEB, GAME, style=Style.DNAT)

    assert node.lets_in(node.from_elsewhere(Packet(POD, "10.96.0.6", 7000, L4Protocol.UDP)))
    assert not node.lets_in(Packet(CLIENT, "192.168.77.1", 40001))


def test_each_family_has_its_own_portals_and_proxy_ports() -> None:
    packet = kernel(WEB, GAME, node=NODE_6).from_host(Packet("fd00:77::1", "fd00:96::5", 80))

    assert (packet.destination, packet.port) == ("fd00:77::1", 40006)
    assert not any("10.96" in text or "198.51" in text for text in texts(WEB, node=NODE_6))


def test_ipv6_rules_are_written_as_ip6tables_prints_them() -> None:
    assert (
        '-A KUBE-PORTALS-HOST -d fd00:96::5/128 -p tcp -m comment --comment "prod/web:http" -m tcp --dport 80'
        " -j DNAT --to-destination [fd00:77::1]:40006"
    ) in texts(WEB, node=NODE_6)


def test_a_service_port_without_proxy_port_has_no_rules() -> None:
    nameless = replace(WEB, name=ServicePortName("prod", "late"))

    rules = render([nameless, GAME], PORTS, NODE)

    assert list(rules.rules) == [GAME.name]


def test_a_service_port_without_address_in_the_family_has_no_rules() -> None:
    assert texts(replace(GAME, cluster_ips=("fd00::1",))) == []


def test_an_address_named_twice_has_one_rule() -> None:
    once = replace(GAME, external_ips=("203.0.113.7",))

    assert texts(once) == texts(replace(once, external_ips=("203.0.113.7", "203.0.113.7")))


@BOTH_STYLES
def test_external_traffic_goes_to_a_proxy_port_of_its_own_where_the_policy_is_local(style: Style) -> None:
    local = replace(WEB, external_endpoints=(Endpoint("10.244.1.11", 8080),), external_ips=("192.168.77.1",))
    internal, external = proxy_port_keys(local, IPFamily.IPV4)
    rules = render([local], {internal: 40001, external: 40009}, NODE, style)
    node = Kernel(rules, NODE.local_addresses)

    assert external.scope is Scope.EXTERNAL
    assert node.from_elsewhere(Packet(POD, "10.96.0.5", 80)).port == 40001
    for destination, port in (("192.168.77.5", 30080), ("198.51.100.9", 80), ("192.168.77.1", 80)):
        assert node.from_elsewhere(Packet(CLIENT, destination, port)).port == 40009
        assert node.lets_in(Packet(CLIENT, destination, 40009, redirected=True))


def test_a_service_port_with_one_policy_needs_one_proxy_port() -> None:
    assert proxy_port_keys(WEB, IPFamily.IPV6) == (ProxyPortKey(WEB.name, IPFamily.IPV6),)


RANGES = replace(WEB, load_balancer_source_ranges=(ip_network("192.168.77.0/24"), ip_network("fd00::/8")))


@BOTH_STYLES
def test_source_ranges_decide_who_reaches_a_load_balancer_ip(style: Style) -> None:
    node = kernel(RANGES, style=style)
    refused = Packet(POD, "198.51.100.9", 80)

    assert node.from_elsewhere(Packet(CLIENT, "198.51.100.9", 80)).port == 40001
    assert node.from_host(Packet(HOST, "198.51.100.9", 80)).port == 40001
    assert node.from_elsewhere(refused) == refused
    assert not node.lets_in(refused, policy=Verdict.ACCEPT)
    assert node.from_elsewhere(Packet(POD, "10.96.0.5", 80)).port == 40001


def test_a_source_range_that_allows_all_is_written_without_source() -> None:
    open_to_all = replace(WEB, load_balancer_source_ranges=(ip_network("0.0.0.0/0"),))

    assert not any(" -s " in text for text in texts(open_to_all))
    assert any(" -s 192.168.77.0/24 -d 198.51.100.9/32 " in text for text in texts(RANGES))


def test_source_ranges_without_a_known_load_balancer_address_are_reported() -> None:
    nowhere = replace(RANGES, load_balancer_ips=())

    assert render([nowhere], PORTS, NODE).unenforced == (WEB.name,)
    assert render([RANGES], PORTS, NODE).unenforced == ()


@pytest.mark.parametrize(
    ("name", "comment"),
    [
        ("prod/web:http", "prod/web:http"),
        ('a/"b"\\\n', "a/_b___"),
        ("!a/b", "_a/b"),
        ("a/" + "b" * 300, "a/" + "b" * 198),
    ],
)
def test_a_comment_survives_every_iptables(name: str, comment: str) -> None:
    assert comment_text(name) == comment


def test_a_plain_comment_is_printed_without_quotes() -> None:
    plain = replace(FIRST_JUMPS[0], matches=(Comment("plain"),))

    assert plain.text.startswith("-A INPUT -m comment --comment plain -j")


def test_rules_name_the_kernel_matches_that_some_kernels_lack() -> None:
    needed = {match for rule in render([WEB], PORTS, NODE) for match in rule.kernel_matches}

    assert needed == {"physdev", "addrtype", "state"}


def test_a_node_port_is_held_on_the_wildcard_and_a_portal_on_its_local_address() -> None:
    node = replace(NODE, local_addresses=NODE.local_addresses | {"198.51.100.9", "10.96.0.5"})

    assert held_ports(WEB, node) == {
        HeldPort("0.0.0.0", 30080, L4Protocol.TCP): Scope.EXTERNAL,
        HeldPort("198.51.100.9", 80, L4Protocol.TCP): Scope.EXTERNAL,
        HeldPort("10.96.0.5", 80, L4Protocol.TCP): Scope.INTERNAL,
    }
    assert held_ports(GAME, node) == {}


def test_node_port_addresses_decide_where_a_node_port_is_held() -> None:
    node = replace(NODE, node_port_networks=(ip_network("192.168.77.0/24"),))
    mixed = replace(node, local_addresses=node.local_addresses | {"fd00:77::1"})

    assert sorted(held.address for held in held_ports(WEB, mixed)) == ["192.168.77.1", "192.168.77.5"]
