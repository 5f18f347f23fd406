"""Which endpoints a service port has, and which of them are used: slices are merged first, then chosen from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from userspace_proxy.core.addresses import canonical_address
from userspace_proxy.core.model import Endpoint, family_of
from userspace_proxy.core.objects import EndpointPort, Endpoints, EndpointSlice, SliceEndpoint

PortKey = tuple[str, str]
"""What a port of a slice must share with the service port: its name and its protocol."""

Merged = dict[Endpoint, SliceEndpoint]
"""The endpoints of one service port, each with what is known about it."""

Skip = Callable[[str], None]
"""Told of everything that is left out, in words for the user."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Where this proxy runs. Without a name, traffic policies and topology hints do not apply."""

    name: str = ""
    zone: str = ""


def merge_slices(slices: Iterable[EndpointSlice], wanted: Iterable[PortKey], skip: Skip) -> dict[PortKey, Merged]:
    """Return the endpoints of each wanted port over all slices, whatever their state.

    An address that two slices have on the same port counts once, by the better copy: a pod that terminates may share
    its address for a while with the pod that follows it.
    """
    merged: dict[PortKey, Merged] = {key: {} for key in wanted}
    for each in slices:
        label = f"EndpointSlice {each.key.name}"
        ports = list(_usable_ports(each.ports, merged, label, skip))
        for address, endpoint in _usable_endpoints(each, label, skip):
            for key, number in ports:
                _keep_better(merged[key], Endpoint(address, number), endpoint)
    return merged


def merge_subsets(endpoints: Endpoints, wanted: Iterable[PortKey], skip: Skip) -> dict[PortKey, Merged]:
    """Return the endpoints of each wanted port as an Endpoints object has them: the ready ones only."""
    merged: dict[PortKey, Merged] = {key: {} for key in wanted}
    for subset in endpoints.subsets or ():
        ports = list(_usable_ports(subset.ports, merged, "Endpoints", skip))
        for each in subset.addresses or ():
            address = _usable_address(each.ip, "Endpoints", skip)
            if address is not None:
                ready = SliceEndpoint(addresses=(address,), node_name=each.node_name)
                for key, number in ports:
                    _keep_better(merged[key], Endpoint(address, number), ready)
    return merged


def choose(merged: Mapping[Endpoint, SliceEndpoint], node: NodeFacts, *, only_local: bool) -> tuple[Endpoint, ...]:
    """Return the endpoints to use, sorted: the ready ones, else those that still serve while they terminate.

    `only_local` is the traffic policy `Local`. Topology hints count only without it.
    Source: kube-proxy, `CategorizeEndpoints`.
    """
    if only_local and node.name:
        merged = {endpoint: facts for endpoint, facts in merged.items() if facts.node_name == node.name}
    chosen = {endpoint: facts for endpoint, facts in merged.items() if facts.is_ready}
    if not chosen:
        chosen = {endpoint: facts for endpoint, facts in merged.items() if facts.is_serving and facts.is_terminating}
    elif not only_local and node.name:
        chosen = _prefer_close(chosen, node)
    return tuple(sorted(chosen, key=attrgetter("address", "port")))


def _usable_ports(
    ports: Iterable[EndpointPort] | None, wanted: Mapping[PortKey, object], label: str, skip: Skip
) -> Iterator[tuple[PortKey, int]]:
    for port in ports or ():
        key = (port.name or "", port.protocol or "TCP")
        if key not in wanted:
            continue
        if port.port is not None and 1 <= port.port <= 65535:
            yield key, port.port
        else:
            skip(f"{label}: port {key[0]!r} has the number {port.port}, which cannot be dialled: skipped")


def _usable_endpoints(each: EndpointSlice, label: str, skip: Skip) -> Iterator[tuple[str, SliceEndpoint]]:
    if each.address_type not in ("IPv4", "IPv6"):
        skip(f"{label}: address type {each.address_type!r} is not supported: ignored")
        return
    for endpoint in each.endpoints or ():
        address = _usable_address(endpoint.addresses[0] if endpoint.addresses else None, label, skip)
        if address is None:
            continue
        if family_of(address).name == each.address_type.upper():
            yield address, endpoint
        else:
            skip(f"{label}: {address} is no {each.address_type} address: skipped")


def _usable_address(text: str | None, label: str, skip: Skip) -> str | None:
    if not text:
        skip(f"{label}: an endpoint without address: skipped")
        return None
    try:
        return canonical_address(text)
    except ValueError:
        skip(f"{label}: {text!r} is no IP address: skipped")
        return None


def _keep_better(merged: Merged, endpoint: Endpoint, facts: SliceEndpoint) -> None:
    known = merged.get(endpoint)
    if known is None or _rank(facts) > _rank(known):
        merged[endpoint] = facts


def _rank(facts: SliceEndpoint) -> tuple[bool, bool, bool]:
    return not facts.is_terminating, facts.is_ready, facts.is_serving


def _prefer_close(ready: Merged, node: NodeFacts) -> Merged:
    """Return the endpoints hinted for this node, else for its zone, else all. One without a hint voids all hints."""
    for place, hinted in ((node.name, _hinted_nodes), (node.zone, _hinted_zones)):
        if place and all(map(hinted, ready.values())):
            close = {endpoint: facts for endpoint, facts in ready.items() if place in hinted(facts)}
            if close:
                return close
    return ready


def _hinted_nodes(facts: SliceEndpoint) -> set[str | None]:
    return {each.name for each in (facts.hints.for_nodes if facts.hints else None) or ()}


def _hinted_zones(facts: SliceEndpoint) -> set[str | None]:
    return {each.name for each in (facts.hints.for_zones if facts.hints else None) or ()}
