from __future__ import annotations

import pytest

from userspace_proxy import (
    ConfigError,
    Counters,
    Endpoint,
    EndpointCounters,
    L4Protocol,
    ListenAddress,
    ListenFailed,
    ProxyError,
    ServicePort,
    ServicePortName,
    Snapshot,
)
from userspace_proxy.core.addresses import canonical_client
from userspace_proxy.core.model import IPFamily, family_of, host_port


@pytest.mark.parametrize(
    ("address", "family", "text"),
    [("10.0.0.1", IPFamily.IPV4, "10.0.0.1:53"), ("fd00::1", IPFamily.IPV6, "[fd00::1]:53")],
)
def test_an_address_has_a_family_and_a_text(address: str, family: IPFamily, text: str) -> None:
    assert family_of(address) is family
    assert host_port(address, 53) == text
    for address_and_port in (Endpoint(address, 53), ListenAddress(address, 53)):
        assert address_and_port.family is family
        assert str(address_and_port) == text


@pytest.mark.parametrize(
    ("address", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fd00:0::1", "fd00::1"),
        ("fe80::1%eth0", "fe80::1"),
    ],
)
def test_a_client_is_known_by_one_text(address: str, canonical: str) -> None:
    assert canonical_client(address) == canonical


def test_a_service_port_is_named_as_kube_proxy_names_it() -> None:
    assert str(ServicePortName("default", "dns", "udp", L4Protocol.UDP)) == "default/dns:udp"
    assert str(ServicePortName("default", "dns")) == "default/dns"
    assert ServicePortName("default", "dns", "udp").service_name == "default/dns"
    assert ServicePort(ServicePortName("default", "dns", "", L4Protocol.UDP), 53).protocol is L4Protocol.UDP


def test_a_snapshot_holds_each_service_port_once() -> None:
    tcp, udp = (ServicePort(ServicePortName("default", "dns", "", protocol), 53) for protocol in L4Protocol)
    assert set(Snapshot.of(tcp, udp).service_ports) == {tcp.name, udp.name}
    assert Snapshot().service_ports == {}
    with pytest.raises(ValueError, match="same name"):
        Snapshot.of(tcp, tcp)


def test_errors_say_where_what_and_why() -> None:
    error = ConfigError("must be a number", where="web.yaml:3", subject="default/web", field="port")
    assert str(error) == "web.yaml:3: default/web: port: must be a number"
    assert str(ConfigError("is empty", where="-f")) == "-f: is empty"
    assert isinstance(error, ProxyError)
    refused = ListenFailed("127.0.0.1:80", "permission denied", "EACCES")
    assert str(refused) == "cannot listen on 127.0.0.1:80: permission denied"
    assert (refused.address, refused.reason, refused.errno_name) == ("127.0.0.1:80", "permission denied", "EACCES")


def test_counters_begin_at_zero() -> None:
    counters = Counters(endpoints={ServicePortName("default", "dns"): {Endpoint("10.0.0.1", 53): EndpointCounters()}})
    assert counters.open_connections == counters.open_sessions == counters.dropped_datagrams == 0


@pytest.mark.parametrize(("kind", "lowest_port"), [(Endpoint, 1), (ListenAddress, 0)])
def test_only_what_a_socket_can_take_is_an_address(
    kind: type[Endpoint] | type[ListenAddress], lowest_port: int
) -> None:
    for address, port in (("localhost", 80), ("", 80), ("10.0.0.1", lowest_port - 1), ("10.0.0.1", 65536)):
        with pytest.raises(ValueError, match="is no"):
            kind(address, port)
    for address, port in (("::1", lowest_port), ("fe80::1%lo", 80), ("127.0.0.1", 65535)):
        assert kind(address, port).address == address


@pytest.mark.parametrize(
    ("one", "other", "excludes"),
    [
        (("10.0.0.1", 80), ("10.0.0.1", 80), True),
        (("0.0.0.0", 80), ("10.0.0.1", 80), True),
        (("10.0.0.1", 80), ("0.0.0.0", 80), True),
        (("10.0.0.1", 80), ("10.0.0.2", 80), False),
        (("10.0.0.1", 80), ("10.0.0.1", 81), False),
        (("::", 80), ("10.0.0.1", 80), False),
    ],
)
def test_a_wildcard_has_all_addresses_of_its_family(
    one: tuple[str, int], other: tuple[str, int], excludes: bool
) -> None:
    assert ListenAddress(*one).excludes(ListenAddress(*other)) is excludes


@pytest.mark.parametrize(
    ("wakes_on_connect", "endpoints", "external_endpoints", "is_idled"),
    [
        (True, (), None, True),
        (True, (), (), True),
        (False, (), None, False),
        (True, (Endpoint("10.0.0.1", 80),), None, False),
        (True, (), (Endpoint("10.0.0.1", 80),), False),
    ],
)
def test_a_service_port_is_idled_while_it_has_no_endpoint_and_is_to_be_woken(
    wakes_on_connect: bool,
    endpoints: tuple[Endpoint, ...],
    external_endpoints: tuple[Endpoint, ...] | None,
    is_idled: bool,
) -> None:
    service_port = ServicePort(
        ServicePortName("default", "web"),
        80,
        endpoints,
        external_endpoints=external_endpoints,
        wakes_on_connect=wakes_on_connect,
    )

    assert service_port.is_idled is is_idled
