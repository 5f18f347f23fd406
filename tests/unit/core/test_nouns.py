"""The nouns of the proxy and its errors, as people and other modules read them."""

from __future__ import annotations

import pytest

from userspace_proxy.core.addresses import canonical_client
from userspace_proxy.core.errors import ConfigError, ListenFailed
from userspace_proxy.core.model import (
    Endpoint,
    IPFamily,
    L4Protocol,
    ListenAddress,
    ServicePort,
    ServicePortName,
    Snapshot,
)


def test_a_service_port_is_named_as_in_kube_proxy() -> None:
    assert str(ServicePortName("default", "web", "http")) == "default/web:http"
    assert str(ServicePortName("default", "web")) == "default/web"
    assert ServicePortName("default", "web", "http").service_name == "default/web"


def test_an_address_with_colons_is_written_in_brackets() -> None:
    assert str(Endpoint("fd00::1", 80)) == "[fd00::1]:80"
    assert str(ListenAddress("127.0.0.1", 80)) == "127.0.0.1:80"
    assert (Endpoint("fd00::1", 80).family, ListenAddress("127.0.0.1", 80).family) == (IPFamily.IPV6, IPFamily.IPV4)


@pytest.mark.parametrize(
    ("address", "client"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("fd00::0", "fd00::")],
)
def test_a_client_is_its_address_without_scope_and_mapping(address: str, client: str) -> None:
    assert canonical_client(address) == client


def test_a_snapshot_refuses_two_service_ports_of_one_name() -> None:
    tcp = ServicePort(ServicePortName("default", "dns"), 53)
    udp = ServicePort(ServicePortName("default", "dns", protocol=L4Protocol.UDP), 53)
    assert Snapshot.of(tcp, udp).service_ports[udp.name].protocol is L4Protocol.UDP
    assert Snapshot().service_ports == {}
    with pytest.raises(ValueError, match="same name"):
        Snapshot.of(tcp, tcp)


def test_an_error_names_the_place_and_the_reason() -> None:
    error = ConfigError(
        "99999 is not in 1..65535", where="a.yaml:3", subject="Service default/web", field="spec.ports[0].port"
    )
    assert str(error) == "a.yaml:3: Service default/web: spec.ports[0].port: 99999 is not in 1..65535"
    assert str(ConfigError("bad")) == "bad"
    assert str(ListenFailed("127.0.0.1:80", "in use", "EADDRINUSE")) == "cannot listen on 127.0.0.1:80: in use"
