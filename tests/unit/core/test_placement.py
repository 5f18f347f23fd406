"""Which service ports are served on this machine, on which ports, with which endpoints by hand."""

from __future__ import annotations

import pytest

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.model import Endpoint, L4Protocol, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.placement import (
    HostPort,
    PortReference,
    parse_port,
    parse_service,
    place,
    select,
    unmatched,
    with_endpoints,
    with_services,
)

WEB = ServicePort(ServicePortName("shop", "web", "http"), 80)
METRICS = ServicePort(ServicePortName("shop", "web", "metrics"), 9090)
DNS_UDP = ServicePort(ServicePortName("kube-system", "dns", "dns", L4Protocol.UDP), 53)
DNS_TCP = ServicePort(ServicePortName("kube-system", "dns", "dns-tcp", L4Protocol.TCP), 53)
ALL = Snapshot.of(WEB, METRICS, DNS_UDP, DNS_TCP)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("shop/web:http", PortReference("shop", "web", "http")),
        ("shop/web:80", PortReference("shop", "web", "80")),
        ("shop/web", PortReference("shop", "web")),
        ("web:80", PortReference("default", "web", "80")),
        ("kube-system/dns:53/udp", PortReference("kube-system", "dns", "53", L4Protocol.UDP)),
        ("kube-system/dns:53/TCP", PortReference("kube-system", "dns", "53", L4Protocol.TCP)),
    ],
)
def test_a_port_reference_is_read(text: str, expected: PortReference) -> None:
    assert PortReference.parse(text) == expected


@pytest.mark.parametrize("text", ["", ":80", "/web:80", "a/b/c:80", "shop/:80"])
def test_what_is_no_port_reference_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAMESPACE/SERVICE"):
        PortReference.parse(text)


def test_a_protocol_that_is_not_proxied_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sctp"):
        PortReference.parse("shop/web:80/sctp")


def test_a_reference_is_printed_as_it_is_read() -> None:
    for text in ("shop/web", "shop/web:http", "kube-system/dns:53/udp"):
        assert str(PortReference.parse(text)) == text


def test_the_reference_to_a_service_port_points_at_it_alone() -> None:
    for port in ALL.service_ports.values():
        reference = PortReference.parse(str(PortReference.to(port)))
        assert [other for other in ALL.service_ports.values() if reference.matches(other)] == [port]


def test_a_port_without_a_name_is_referred_to_by_number() -> None:
    unnamed = ServicePort(ServicePortName("shop", "db", "", L4Protocol.UDP), 5432)
    assert str(PortReference.to(unnamed)) == "shop/db:5432/udp"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:80", HostPort("10.0.0.1", 80)),
        ("[fd00:0::1]:80", HostPort("fd00::1", 80)),
        ("localhost:8080", HostPort("localhost", 8080)),
    ],
)
def test_a_host_and_port_is_read(text: str, expected: HostPort) -> None:
    assert HostPort.parse(text) == expected
    assert HostPort.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:0", "host:65536", "ho st:80", "[nonsense]:80", "a/b:1"]
)
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|port number"):
        HostPort.parse(text)


def test_an_ipv6_address_without_brackets_is_told_about_them() -> None:
    with pytest.raises(ConfigError, match="brackets"):
        HostPort.parse("fd00::1:80")


def test_a_host_is_an_address_or_a_name() -> None:
    assert HostPort("10.0.0.1", 80).is_address
    assert not HostPort("example.org", 80).is_address


def test_a_port_number_has_only_digits_and_is_in_range() -> None:
    assert parse_port("65535") == 65535
    for text in ("0", "65536", "-1", "http", "٣", "99999999999999999999"):
        with pytest.raises(ConfigError):
            parse_port(text)


def test_a_service_is_described_by_name_and_port() -> None:
    assert parse_service("web:8080") == ServicePort(ServicePortName("default", "web"), 8080)
    assert parse_service("shop/dns:53/udp").protocol is L4Protocol.UDP
    with pytest.raises(ConfigError, match="port number"):
        parse_service("web")


def test_namespaces_and_services_are_selected() -> None:
    assert list(select(ALL).service_ports) == [DNS_UDP.name, DNS_TCP.name, WEB.name, METRICS.name]
    assert set(select(ALL, namespaces=["shop"]).service_ports) == {WEB.name, METRICS.name}
    assert set(select(ALL, only=["kube-system/dns"]).service_ports) == {DNS_UDP.name, DNS_TCP.name}


def test_services_are_added_and_replace_their_like() -> None:
    other_web = ServicePort(WEB.name, 81)
    assert with_services(Snapshot.of(WEB), [other_web, DNS_UDP]) == Snapshot.of(other_web, DNS_UDP)


def test_endpoints_by_hand_replace_those_of_the_ports_pointed_at() -> None:
    endpoint = Endpoint("10.0.0.1", 80)
    replaced = with_endpoints(ALL, {PortReference.parse("shop/web:http"): [endpoint]})
    assert replaced.service_ports[WEB.name].endpoints == (endpoint,)
    assert replaced.service_ports[METRICS.name] is METRICS


def test_a_service_port_listens_at_its_own_number_on_all_addresses() -> None:
    placed = place(ALL, listen_addresses=["127.0.0.1", "::1"], port_map={}, chosen_ports={})
    assert placed.service_ports[WEB.name].listen == (ListenAddress("127.0.0.1", 80), ListenAddress("::1", 80))


def test_the_port_map_moves_ports_by_name_or_number() -> None:
    port_map = {PortReference.parse("shop/web:http"): 8080, PortReference.parse("kube-system/dns:53/udp"): 5353}
    placed = place(ALL, listen_addresses=["127.0.0.1"], port_map=port_map, chosen_ports={}).service_ports
    assert [placed[port.name].listen[0].port for port in (WEB, METRICS, DNS_UDP, DNS_TCP)] == [8080, 9090, 5353, 53]


def test_a_chosen_port_wins_over_the_port_map() -> None:
    port_map = {PortReference.parse("shop/web:http"): 8080}
    placed = place(ALL, listen_addresses=["127.0.0.1"], port_map=port_map, chosen_ports={WEB.name: 8081})
    assert placed.service_ports[WEB.name].listen == (ListenAddress("127.0.0.1", 8081),)


def test_references_that_fit_nothing_or_too_much_are_named_with_the_reason() -> None:
    references = [PortReference.parse(text) for text in ("shop/api:80", "shop/web:https", "shop/web", "shop/web:80")]
    assert [(str(reference), reason) for reference, reason in unmatched(ALL, references)] == [
        ("shop/api:80", "there is no such service"),
        ("shop/web:https", "its ports are http, metrics"),
        ("shop/web", "it has several ports, say which: http, metrics"),
    ]


def test_one_number_with_two_protocols_is_one_port() -> None:
    assert unmatched(ALL, [PortReference.parse("kube-system/dns")]) == []
