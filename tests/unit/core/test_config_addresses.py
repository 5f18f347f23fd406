"""The node's addresses, and what in the configuration does not fit them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from userspace_proxy.core.config import DEFAULTS, Config, with_field
from userspace_proxy.core.config_addresses import (
    check_addresses,
    node_addresses,
    node_port_networks,
    refuse_localhost,
)
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.model import IPFamily

V4, V6 = IPFamily.IPV4, IPFamily.IPV6


def config(**fields: object) -> Config:
    document = with_field(DEFAULTS, "nodePortAddresses", ("primary",))
    for path, value in fields.items():
        document = with_field(document, path, value)
    return Config(document=document)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
def test_a_proxy_on_loopback_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot proxy on localhost"):
        refuse_localhost(address)


def test_any_other_bind_address_is_taken() -> None:
    for address in ("0.0.0.0", "::", "10.0.0.1"):
        refuse_localhost(address)


@pytest.mark.parametrize(
    ("bind_address", "node_ips", "primary", "addresses"),
    [
        ("0.0.0.0", ["10.0.0.1"], V4, {V4: "10.0.0.1", V6: "::1"}),
        ("0.0.0.0", ["fd00::1"], V6, {V4: "127.0.0.1", V6: "fd00::1"}),
        ("0.0.0.0", ["fd00::1", "10.0.0.1"], V6, {V4: "10.0.0.1", V6: "fd00::1"}),
        ("::", ["10.0.0.1", "fd00::1"], V4, {V4: "10.0.0.1", V6: "fd00::1"}),
        ("10.0.0.9", ["fd00::1", "10.0.0.1"], V4, {V4: "10.0.0.9", V6: "fd00::1"}),
        ("fd00::9", [], V6, {V4: "127.0.0.1", V6: "fd00::9"}),
    ],
)
def test_a_specific_bind_address_comes_before_the_nodes_own(
    bind_address: str, node_ips: list[str], primary: IPFamily, addresses: dict[IPFamily, str]
) -> None:
    node = node_addresses(bind_address, node_ips)
    assert (node.primary_family, node.by_family, node.warning) == (primary, addresses, "")
    assert node.primary == addresses[primary]


def test_loopback_stands_in_for_an_unknown_node_with_a_warning() -> None:
    node = node_addresses("::", [])
    assert node.primary == "127.0.0.1"
    assert "--bind-address" in node.warning


@pytest.mark.parametrize(
    ("addresses", "node_ips", "networks"),
    [
        ((), ["10.0.0.1"], {V4: None, V6: None}),
        (("10.0.0.0/8",), ["10.0.0.1"], {V4: ("10.0.0.0/8",), V6: None}),
        (("10.0.0.0/8", "fd00::/8"), ["10.0.0.1"], {V4: ("10.0.0.0/8",), V6: ("fd00::/8",)}),
        (("primary",), ["10.0.0.1", "fd00::1"], {V4: ("10.0.0.1/32",), V6: ("fd00::1/128",)}),
        (("primary",), ["10.0.0.1"], {V4: ("10.0.0.1/32",), V6: ()}),
        (("primary",), [], {V4: None, V6: ()}),
    ],
)
def test_node_ports_are_served_where_node_port_addresses_says(
    addresses: tuple[str, ...], node_ips: list[str], networks: dict[IPFamily, tuple[str, ...] | None]
) -> None:
    found = node_port_networks(config(nodePortAddresses=addresses), node_addresses("0.0.0.0", node_ips))
    assert found == {
        family: None if texts is None else tuple(map(ip_network, texts)) for family, texts in networks.items()
    }


def test_a_configuration_that_fits_has_nothing_to_report() -> None:
    report = check_addresses(config(clusterCIDR="10.0.0.0/8"), V4, has_both_families=False, pod_cidrs=["10.1.0.0/24"])
    assert (report.warnings, report.fatal) == ((), ())


@pytest.mark.parametrize(
    ("fields", "primary", "text"),
    [
        ({"nodePortAddresses": ()}, V4, "nodePortAddresses is unset"),
        (
            {"nodePortAddresses": ("10.0.0.0/8",), "clusterCIDR": "10.0.0.0/8,fd00::/8"},
            V4,
            "has IPv4 networks only, so node ports are served on all IPv6 addresses of this node",
        ),
        (
            {"nodePortAddresses": ("fd00::/8",)},
            V4,
            "primary family is IPv4, so node ports are served on all IPv4 addresses of this node",
        ),
        ({"clusterCIDR": "fd00::/8"}, V4, "this node is IPv4-primary, but clusterCIDR has IPv6 networks only"),
        (
            {"clusterCIDR": "10.0.0.0/8", "detectLocalMode": "ClusterCIDR"},
            V6,
            "this node is IPv6-primary, but clusterCIDR has IPv4 networks only",
        ),
    ],
)
def test_what_does_not_fit_a_node_of_both_families_is_a_warning(
    fields: dict[str, object], primary: IPFamily, text: str
) -> None:
    report = check_addresses(config(**fields), primary, has_both_families=True)
    (warning,) = report.warnings
    assert text in warning
    assert report.fatal == ()


@pytest.mark.parametrize("addresses", [("10.0.0.0/8",), ("10.0.0.0/8", "fd00::/8")])
def test_node_port_addresses_of_the_families_in_use_are_no_reason_to_warn(addresses: tuple[str, ...]) -> None:
    assert check_addresses(config(nodePortAddresses=addresses), V4, has_both_families=True).warnings == ()


@pytest.mark.parametrize("field", ["healthzBindAddress", "metricsBindAddress"])
def test_a_server_on_the_wrong_family_is_a_warning_on_a_node_of_one_family(field: str) -> None:
    wrong = config(**{field: "[fd00::1]:1"})
    (warning,) = check_addresses(wrong, V4, has_both_families=False).warnings
    assert warning == f"this node is IPv4-only, but {field} is an IPv6 address"
    assert check_addresses(wrong, V4, has_both_families=True).warnings == ()
    for fine in ("[::]:1", "", "10.0.0.1:1"):
        assert check_addresses(config(**{field: fine}), V4, has_both_families=False).warnings == ()


def test_networks_of_the_wrong_family_are_fatal_only_where_kube_proxy_refuses_them() -> None:
    cluster = config(clusterCIDR="fd00::/8", detectLocalMode="ClusterCIDR")
    assert check_addresses(cluster, V4, has_both_families=False).fatal == (
        "this node is IPv4-only, but clusterCIDR has IPv6 networks only",
    )
    node = config(detectLocalMode="NodeCIDR")
    assert check_addresses(node, V4, has_both_families=True, pod_cidrs=["fd00::/64"]).fatal == (
        "this node is IPv4-primary, but its spec.podCIDRs has IPv6 networks only",
    )
    assert check_addresses(config(), V4, has_both_families=True, pod_cidrs=["fd00::/64"]).fatal == ()
