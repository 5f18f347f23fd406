"""What a Service asks for: which are proxied, and each field of their service ports."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from userspace_proxy.core.model import L4Protocol, ServicePort
from userspace_proxy.core.objects import Service
from userspace_proxy.core.services import is_proxied, service_ports

from .kubernetes_objects import HTTP, service


def only_port(each: Service) -> ServicePort:
    """Return the one port of a service, about which there is nothing to say."""
    skipped = list[str]()
    (port,) = service_ports(each, skipped.append)
    assert skipped == []
    return port


def skipped_in(each: Service) -> tuple[list[ServicePort], list[str]]:
    skipped = list[str]()
    return list(service_ports(each, skipped.append)), skipped


@pytest.mark.parametrize("spec", [{"clusterIP": "None"}, {"clusterIPs": ["None"]}, {"type": "ExternalName"}])
@pytest.mark.parametrize("waived", [False, True])
def test_headless_and_external_name_services_are_never_proxied(spec: dict[str, Any], waived: bool) -> None:
    assert not is_proxied(service(**spec), serve_without_cluster_ip=waived)


@pytest.mark.parametrize("cluster_ip", ["", None])
def test_a_service_without_cluster_ip_is_proxied_only_where_that_is_waived(cluster_ip: str | None) -> None:
    assert not is_proxied(service(clusterIP=cluster_ip), serve_without_cluster_ip=False)
    assert is_proxied(service(clusterIP=cluster_ip), serve_without_cluster_ip=True)


def test_a_plain_service_has_its_port_and_cluster_ip() -> None:
    port = only_port(service())
    assert (str(port.name), port.port, port.protocol) == ("default/web:http", 80, L4Protocol.TCP)
    assert port.cluster_ips == ("10.96.0.1",)
    assert (port.endpoints, port.external_endpoints, port.session_affinity_s, port.node_port) == ((), None, None, 0)


def test_cluster_ips_of_both_families_replace_the_single_one() -> None:
    assert only_port(service(clusterIPs=["10.96.0.1", "FD00::1"])).cluster_ips == ("10.96.0.1", "fd00::1")


@pytest.mark.parametrize(
    ("config", "timeout_s"),
    [
        (None, 10800),
        ({}, 10800),
        ({"clientIP": {}}, 10800),
        ({"clientIP": {"timeoutSeconds": 60}}, 60),
        ({"clientIP": {"timeoutSeconds": 0}}, 10800),
    ],
)
def test_client_ip_affinity_lasts_three_hours_unless_said_otherwise(config: Any, timeout_s: float) -> None:
    assert only_port(service(sessionAffinity="ClientIP", sessionAffinityConfig=config)).session_affinity_s == timeout_s
    assert only_port(service(sessionAffinity="None", sessionAffinityConfig=config)).session_affinity_s is None


def test_ingress_counts_by_ip_unless_the_balancer_is_a_proxy() -> None:
    ingress = [{"ip": "198.51.100.9"}, {"hostname": "lb.example.org"}, {"ip": "198.51.100.10", "ipMode": "Proxy"}]
    ingress.append({"ip": "198.51.100.11", "ipMode": "VIP"})
    port = only_port(service(status={"loadBalancer": {"ingress": ingress}}))
    assert port.load_balancer_ips == ("198.51.100.9", "198.51.100.11")


def test_external_ips_count_once_each_in_canonical_form() -> None:
    port = only_port(service(externalIPs=["203.0.113.7", "::ffff:203.0.113.7", "2001:DB8::1"]))
    assert port.external_ips == ("203.0.113.7", "2001:db8::1")


def test_node_ports_are_kept_and_health_is_asked_for_only_where_it_can_be() -> None:
    spec = {"ports": [{**HTTP, "nodePort": 30080}], "healthCheckNodePort": 30081, "externalTrafficPolicy": "Local"}
    assert only_port(service(type="LoadBalancer", **spec)).health_check_node_port == 30081
    assert only_port(service(type="NodePort", **spec)).health_check_node_port == 0
    assert only_port(service(type="NodePort", **spec)).node_port == 30080


def test_source_ranges_are_stripped_and_a_bad_one_is_skipped() -> None:
    status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.9"}]}}
    (port,), skipped = skipped_in(
        service(status=status, loadBalancerSourceRanges=[" 10.0.0.0/8 ", "ten/8", "10.0.0.0/8"])
    )
    assert port.load_balancer_source_ranges == (ip_network("10.0.0.0/8"),)
    assert port.load_balancer_ips == ("198.51.100.9",)
    assert skipped == ["load-balancer source range 'ten/8' is no network: skipped"]


def test_source_ranges_that_are_all_bad_let_nobody_in_rather_than_everybody() -> None:
    status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.9"}]}}
    (port,), skipped = skipped_in(service(status=status, loadBalancerSourceRanges=["ten/8"]))
    assert port.load_balancer_ips == ()
    assert "nobody may reach the load-balancer IPs" in skipped[-1]


def test_a_bad_address_is_skipped_and_the_others_work() -> None:
    (port,), skipped = skipped_in(service(externalIPs=["web", "203.0.113.7"]))
    assert port.external_ips == ("203.0.113.7",)
    assert skipped == ["external IP 'web' is no IP address: skipped"]


def test_an_sctp_port_is_skipped_and_the_others_work() -> None:
    ports, skipped = skipped_in(service(ports=[{"name": "s", "port": 9, "protocol": "SCTP"}, HTTP]))
    assert [port.name.port for port in ports] == ["http"]
    assert skipped == ["port s: SCTP is not proxied: skipped"]


@pytest.mark.parametrize("number", [None, 0, -1, 65536])
def test_a_service_port_that_is_no_port_number_is_skipped(number: int | None) -> None:
    assert skipped_in(service(ports=[{"port": number}])) == (
        [],
        [f"port {number}: {number} is no port number: skipped"],
    )


def test_one_name_serves_both_protocols_but_each_once() -> None:
    udp = {"name": "dns", "port": 53, "protocol": "UDP"}
    ports, skipped = skipped_in(service("dns", ports=[udp, {"name": "dns", "port": 53}, {**udp, "port": 54}]))
    assert [(port.protocol.value, port.port) for port in ports] == [("UDP", 53), ("TCP", 53)]
    assert skipped == ["port dns: its name and protocol are taken by an earlier port: skipped"]
