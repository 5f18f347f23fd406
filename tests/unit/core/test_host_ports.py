"""`IP:port` and port ranges."""

from __future__ import annotations

import pytest

from userspace_proxy.core.addresses import canonical_address
from userspace_proxy.core.host_ports import (
    family_of_cidr,
    is_address,
    parse_port_range,
    split_host_port,
    with_port,
)
from userspace_proxy.core.model import IPFamily


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", None),
        ("0", None),
        ("0-0", None),
        ("0-100", None),
        ("30", range(30, 31)),
        ("300-302", range(300, 303)),
        ("300-300", range(300, 301)),
        ("300+2", range(300, 303)),
        ("300+0", range(300, 301)),
        (" 300-302 ", range(300, 303)),
        ("65535", range(65535, 65536)),
        ("1-65535", range(1, 65536)),
    ],
)
def test_a_port_range_has_both_its_ends(text: str, ports: range | None) -> None:
    assert parse_port_range(text) == ports


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("302-300", "end port cannot be less than start port"),
        ("65536", "cannot be greater than 65535"),
        ("65000+1000", "cannot be greater than 65535"),
        ("1-99999999999", "cannot be greater than 65535"),
        ("a", "unable to parse port range"),
        ("1-", "unable to parse port range"),
        ("-1", "unable to parse port range"),
        ("1-2-3", "unable to parse port range"),
        ("1+2-3", "unable to parse port range"),
        ("١-٢", "unable to parse port range"),
    ],
)
def test_what_is_no_port_range_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_port_range(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[fd00::1]:80", ("fd00::1", 80)), ("0.0.0.0:65535", ("0.0.0.0", 65535))],
)
def test_an_address_and_its_port_are_parted(text: str, parts: tuple[str, int]) -> None:
    assert split_host_port(text) == parts


@pytest.mark.parametrize(
    ("text", "detail", "part"),
    [
        ("0.0.0.0", "must be IP:port", "0.0.0.0"),
        ("::1", "must be IP:port", "::1"),
        (":80", "must be a valid IP", ""),
        ("localhost:80", "must be a valid IP", "localhost"),
        ("[fe80::1%eth0]:80", "must be a valid IP", "fe80::1%eth0"),
        ("10.0.0.1:http", "must be a valid port", "http"),
        ("10.0.0.1:0", "must be a valid port", "0"),
        ("10.0.0.1:65536", "must be a valid port", "65536"),
        ("10.0.0.1:", "must be a valid port", ""),
    ],
)
def test_what_is_no_address_with_a_port_is_refused_with_the_wrong_part(text: str, detail: str, part: str) -> None:
    with pytest.raises(ValueError, match=detail) as caught:
        split_host_port(text)
    assert caught.value.args == (detail, part)


def test_a_port_is_added_to_a_bare_address_only() -> None:
    assert with_port("10.0.0.1", 1) == "10.0.0.1:1"
    assert with_port("fd00::1", 1) == "[fd00::1]:1"
    assert with_port("10.0.0.1:2", 1) == "10.0.0.1:2"
    assert with_port("localhost", 1) == "localhost"


def test_the_family_of_a_network_is_known_from_its_text() -> None:
    assert family_of_cidr("10.0.0.7/8") is IPFamily.IPV4
    assert family_of_cidr("fd00::/8") is IPFamily.IPV6
    assert [family_of_cidr(text) for text in ("10.0.0.0", "10.0.0.0/33", " 10.0.0.0/8", "primary")] == [None] * 4


def test_only_a_plain_address_is_one() -> None:
    assert [is_address(text) for text in ("10.0.0.1", "::", "", "10.0.0.1:1", "fe80::1%eth0")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_an_address_has_one_canonical_form() -> None:
    assert canonical_address("10.0.0.1") == canonical_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert canonical_address("FD00:0::1") == "fd00::1"
    with pytest.raises(ValueError, match="scope"):
        canonical_address("fe80::1%eth0")
