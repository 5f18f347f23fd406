"""Where a service port listens, and which of its listeners are proxy ports."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network

from userspace_proxy.core.model import Endpoint, IPFamily, ListenAddress, Scope, ServicePort, ServicePortName
from userspace_proxy.core.portals import NodeFacts, ProxyPortKey, listen_addresses, proxy_ports

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
NODES = {
    V4: NodeFacts("192.168.77.1", local_addresses=frozenset({"192.168.77.1", "127.0.0.1", "fd00:77::1"})),
    V6: NodeFacts("fd00:77::1", local_addresses=frozenset({"192.168.77.1", "127.0.0.1", "fd00:77::1"})),
}
WEB = ServicePort(ServicePortName("shop", "web"), 80, cluster_ips=("10.96.0.1",), node_port=30080)


def test_a_service_listens_in_the_families_in_which_it_has_a_cluster_ip() -> None:
    proxy_port, node_port = ListenAddress("0.0.0.0", 0), ListenAddress("0.0.0.0", 30080, Scope.EXTERNAL, is_held=True)
    assert listen_addresses(WEB, NODES) == (proxy_port, node_port)

    assert listen_addresses(WEB, NODES, holds_ports=False) == (proxy_port,)

    dual = listen_addresses(replace(WEB, cluster_ips=("10.96.0.1", "fd00:96::1")), NODES)
    assert {each.address for each in dual} == {"0.0.0.0", "::"}
    assert listen_addresses(replace(WEB, cluster_ips=("fd00:96::1",)), {V4: NODES[V4]}) == ()


def test_traffic_from_outside_has_a_proxy_port_of_its_own_where_it_differs() -> None:
    differs = replace(WEB, endpoints=(Endpoint("10.0.0.1", 80),), external_endpoints=(), node_port=0)
    assert [each.scope for each in listen_addresses(differs, NODES)] == [Scope.INTERNAL, Scope.EXTERNAL]


def test_a_bind_address_is_where_proxy_ports_listen() -> None:
    bound = {V4: replace(NODES[V4], bind_address="192.168.77.1")}
    assert [str(each) for each in listen_addresses(WEB, bound)] == ["192.168.77.1:0", "0.0.0.0:30080"]


def test_a_portal_at_an_address_of_the_node_is_held_and_node_ports_stay_in_their_networks() -> None:
    node = {V4: replace(NODES[V4], node_port_networks=(ip_network("192.168.77.0/24"),))}
    found = listen_addresses(replace(WEB, external_ips=("192.168.77.1", "203.0.113.1")), node)
    assert [str(each) for each in found if each.is_held] == ["192.168.77.1:80", "192.168.77.1:30080"]


def test_proxy_ports_are_those_listeners_that_are_not_held() -> None:
    inside, outside, held = listen_addresses(replace(WEB, external_endpoints=()), NODES)
    bound = {
        (WEB.name, inside): ListenAddress("0.0.0.0", 40001),
        (WEB.name, outside): ListenAddress("0.0.0.0", 40002, Scope.EXTERNAL),
        (WEB.name, held): held,
    }
    assert proxy_ports(bound) == {
        ProxyPortKey(WEB.name, V4): 40001,
        ProxyPortKey(WEB.name, V4, Scope.EXTERNAL): 40002,
    }
