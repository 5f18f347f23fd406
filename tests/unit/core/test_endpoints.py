"""Merging slices and choosing among their endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from userspace_proxy.core.endpoints import NodeFacts, choose, merge_slices, merge_subsets
from userspace_proxy.core.objects import Endpoints, EndpointSlice

from .kubernetes_objects import endpoint, endpoints_of, slice_of

HERE = NodeFacts("here", "zone-a")


def chosen(*slices: EndpointSlice, node: NodeFacts = HERE, only_local: bool = False, port: str = "http") -> list[str]:
    """Return the endpoints that are used of these slices, as text."""
    merged = merge_slices(slices, [(port, "TCP")], skip=lambda _: None)
    return [str(each) for each in choose(merged[port, "TCP"], node, only_local=only_local)]


def skipped(*slices: EndpointSlice) -> list[str]:
    texts = list[str]()
    merge_slices(slices, [("http", "TCP")], texts.append)
    return texts


def test_ready_endpoints_are_used_and_those_not_ready_are_not() -> None:
    assert chosen(slice_of("web", endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=False))) == [
        "10.0.0.1:8080"
    ]


def test_terminating_endpoints_that_still_serve_are_used_when_none_is_ready() -> None:
    ready = endpoint("10.0.0.1")
    terminating = endpoint("10.0.0.2", ready=False, serving=True, terminating=True)
    stopped = endpoint("10.0.0.2", ready=False, serving=False, terminating=True)
    assert chosen(slice_of("web", ready, terminating)) == ["10.0.0.1:8080"]
    assert chosen(slice_of("web", terminating)) == ["10.0.0.2:8080"]
    assert chosen(slice_of("web", stopped)) == []


def test_an_endpoint_that_is_not_ready_and_does_not_terminate_is_no_fallback() -> None:
    assert chosen(slice_of("web", endpoint("10.0.0.1", ready=False, serving=True))) == []


def test_an_endpoint_in_two_slices_counts_once() -> None:
    assert chosen(slice_of("web", "10.0.0.1", name="a"), slice_of("web", "10.0.0.1", "10.0.0.2", name="b")) == [
        "10.0.0.1:8080",
        "10.0.0.2:8080",
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_copies_the_one_that_does_not_terminate_wins(order: int) -> None:
    terminating = slice_of("web", endpoint("10.0.0.1", ready=False, serving=True, terminating=True), name="a")
    assert chosen(*[terminating, slice_of("web", "10.0.0.1", name="b")][::order]) == ["10.0.0.1:8080"]
    starting = slice_of("web", endpoint("10.0.0.1", ready=False), name="b")
    assert chosen(*[terminating, starting][::order]) == []


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_living_copies_the_ready_one_wins(order: int) -> None:
    copies = [slice_of("web", "10.0.0.1", name="a"), slice_of("web", endpoint("10.0.0.1", ready=False), name="b")]
    assert chosen(*copies[::order]) == ["10.0.0.1:8080"]


def test_each_slice_keeps_its_own_number_for_a_port_name() -> None:
    slices = slice_of("web", "10.0.0.1", port=8080), slice_of("web", "10.0.0.2", port=9090, name="b")
    assert chosen(*slices) == ["10.0.0.1:8080", "10.0.0.2:9090"]


@pytest.mark.parametrize(
    ("slice_port", "found"),
    [
        ({"name": "http", "port": 1}, True),
        ({"name": "http", "port": 1, "protocol": "TCP"}, True),
        ({"name": "http", "port": 1, "protocol": "UDP"}, False),
        ({"name": "https", "port": 1}, False),
        ({"port": 1}, False),
    ],
)
def test_a_slice_port_matches_by_name_and_protocol(slice_port: Any, found: bool) -> None:
    assert bool(chosen(slice_of("web", "10.0.0.1", ports=[slice_port]))) is found


@pytest.mark.parametrize("slice_port", [{"port": 1}, {"name": None, "port": 1}, {"name": "", "port": 1}])
def test_a_port_name_that_is_null_is_the_empty_one(slice_port: Any) -> None:
    assert chosen(slice_of("web", "10.0.0.1", ports=[slice_port]), port="") == ["10.0.0.1:1"]


@pytest.mark.parametrize("number", [None, 0, 65536])
def test_a_slice_port_without_usable_number_is_skipped(number: int | None) -> None:
    (text,) = skipped(slice_of("web", "10.0.0.1", port=number))
    assert text == f"EndpointSlice web-a: port 'http' has the number {number}, which cannot be dialled: skipped"


@pytest.mark.parametrize("addresses", [None, [], [""]])
def test_an_endpoint_without_address_is_skipped(addresses: list[str] | None) -> None:
    each = slice_of("web", {"addresses": addresses}, "10.0.0.2")
    assert chosen(each) == ["10.0.0.2:8080"]
    assert skipped(each) == ["EndpointSlice web-a: an endpoint without address: skipped"]


def test_only_the_first_address_of_an_endpoint_counts() -> None:
    assert chosen(slice_of("web", {"addresses": ["10.0.0.1", "10.0.0.2"]})) == ["10.0.0.1:8080"]


@pytest.mark.parametrize(
    ("family", "address"), [("IPv4", "fd00::1"), ("IPv6", "10.0.0.1"), ("IPv6", "::ffff:10.0.0.1")]
)
def test_an_address_of_the_wrong_family_is_skipped(family: str, address: str) -> None:
    (text,) = skipped(slice_of("web", address, family=family))
    assert text.endswith(f"is no {family} address: skipped")


def test_addresses_are_compared_in_canonical_form_and_garbage_is_skipped() -> None:
    each = slice_of("web", "::ffff:10.0.0.1", "10.0.0.1", "ten")
    assert chosen(each) == ["10.0.0.1:8080"]
    assert skipped(each) == ["EndpointSlice web-a: 'ten' is no IP address: skipped"]


@pytest.mark.parametrize("family", ["FQDN", "IP", None])
def test_a_slice_of_another_address_type_is_ignored(family: str | None) -> None:
    each = slice_of("web", "web.example.org", family=family)
    assert chosen(each) == []
    assert skipped(each) == [f"EndpointSlice web-a: address type {family!r} is not supported: ignored"]


def test_both_families_are_kept() -> None:
    assert chosen(slice_of("web", "fd00::1", family="IPv6", name="6"), slice_of("web", "10.0.0.1")) == [
        "10.0.0.1:8080",
        "[fd00::1]:8080",
    ]


def test_the_local_policy_keeps_this_nodes_endpoints() -> None:
    each = slice_of("web", endpoint("10.0.0.1", node="here"), endpoint("10.0.0.2", node="there"), "10.0.0.3")
    assert chosen(each, only_local=True) == ["10.0.0.1:8080"]
    assert chosen(each, only_local=True, node=NodeFacts("elsewhere")) == []


def test_the_local_policy_falls_back_to_terminating_endpoints_of_this_node() -> None:
    leaving = endpoint("10.0.0.1", node="here", ready=False, serving=True, terminating=True)
    assert chosen(slice_of("web", leaving, endpoint("10.0.0.2", node="there")), only_local=True) == ["10.0.0.1:8080"]


def test_without_a_node_name_neither_policy_nor_hints_apply() -> None:
    each = slice_of("web", endpoint("10.0.0.1", node="here", zones="zone-a"), endpoint("10.0.0.2", zones="zone-b"))
    nowhere = NodeFacts("", "zone-a")
    assert len(chosen(each, only_local=True, node=nowhere)) == len(chosen(each, node=nowhere)) == 2


@pytest.mark.parametrize(
    ("first", "second", "used"),
    [
        ({"zones": "zone-a"}, {"zones": "zone-b"}, "1"),
        ({"zones": "zone-a zone-b"}, {"zones": "zone-b zone-a"}, "12"),
        ({"zones": "zone-a"}, {}, "12"),
        ({"zones": "zone-b"}, {"zones": "zone-c"}, "12"),
        ({"nodes": "here"}, {"nodes": "there"}, "1"),
        ({"nodes": "here"}, {}, "12"),
        ({"nodes": "there"}, {"nodes": "over-there"}, "12"),
        ({"nodes": "there", "zones": "zone-a"}, {"nodes": "here", "zones": "zone-b"}, "2"),
        ({"nodes": "there", "zones": "zone-a"}, {"nodes": "there", "zones": "zone-b"}, "1"),
        ({"nodes": "here", "zones": "zone-b"}, {"zones": "zone-a"}, "2"),
        ({"zones": "zone-b"}, {"zones": "zone-a", "ready": False}, "1"),
        ({"zones": "zone-a"}, {"ready": False}, "1"),
    ],
)
def test_hints_choose_this_node_then_its_zone_when_every_ready_endpoint_has_one(
    first: dict[str, Any], second: dict[str, Any], used: str
) -> None:
    each = slice_of("web", endpoint("10.0.0.1", **first), endpoint("10.0.0.2", **second))
    assert chosen(each) == [f"10.0.0.{last}:8080" for last in used]


def test_hints_for_zones_need_a_zone_and_do_not_touch_local_traffic() -> None:
    each = slice_of("web", endpoint("10.0.0.1", node="here", zones="zone-b"), endpoint("10.0.0.2", zones="zone-a"))
    assert len(chosen(each, node=NodeFacts("here"))) == 2
    assert chosen(each, only_local=True) == ["10.0.0.1:8080"]


def subsets(each: Endpoints) -> tuple[list[str], list[str]]:
    texts = list[str]()
    merged = merge_subsets(each, [("http", "TCP")], texts.append)
    return [str(one) for one in choose(merged["http", "TCP"], HERE, only_local=False)], texts


def test_endpoints_objects_give_their_ready_addresses_on_each_port() -> None:
    ports = [{"name": "http", "port": 8080}, {"name": "http", "port": 8081}, {"name": "other", "port": 1}]
    each = endpoints_of(
        "web",
        {"addresses": [{"ip": "10.0.0.1"}, {"ip": None}], "notReadyAddresses": [{"ip": "10.0.0.9"}], "ports": ports},
        {"addresses": None, "ports": None},
    )
    assert subsets(each) == (
        ["10.0.0.1:8080", "10.0.0.1:8081"],
        ["Endpoints: an endpoint without address: skipped"],
    )
