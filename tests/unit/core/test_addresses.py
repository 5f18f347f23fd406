"""Addresses and networks in canonical form."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from userspace_proxy.core.addresses import canonical_address, parse_network


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("FD00:0:0::1", "fd00::1"),
        ("::1", "::1"),
    ],
)
def test_an_address_has_one_form(text: str, canonical: str) -> None:
    assert canonical_address(text) == canonical


@pytest.mark.parametrize("text", ["", "web", "10.0.0.256", "010.0.0.1", "10.0.0.1/8", "fe80::1%eth0", " 10.0.0.1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical_address(text)


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        (" 10.1.2.3/8\n", "10.0.0.0/8"),
        ("fd00::1/64", "fd00::/64"),
        ("0.0.0.0/0", "0.0.0.0/0"),
    ],
)
def test_a_network_loses_its_blanks_and_host_bits(text: str, network: str) -> None:
    assert parse_network(text) == ip_network(network)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "10.0.0.0/-1", "10.0.0.0/²", "x/8"]
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_network(text)
