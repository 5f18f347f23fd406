"""What the API knows of the node that this proxy runs on: addresses, zone, and whether it is about to go away."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

import msgspec

from userspace_proxy.core.addresses import canonical_address
from userspace_proxy.core.endpoints import NodeFacts
from userspace_proxy.core.errors import ConfigError, ProxyError, StreamBroken
from userspace_proxy.core.model import family_of
from userspace_proxy.core.objects import Node
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.pace import Sleep

ZONE_LABEL = "topology.kubernetes.io/zone"
TO_BE_DELETED_TAINT = "ToBeDeletedByClusterAutoscaler"
_TRIES = 6
_SILENCE_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThisNode:
    """The node as last heard of. `ips` are its IP addresses, one of each family at most, the preferred one first."""

    name: str
    ips: tuple[str, ...] = ()
    zone: str = ""
    is_deleted: bool = False
    is_to_be_deleted: bool = False

    @property
    def is_eligible(self) -> bool:
        """Whether load balancers should send traffic here: not while the node is going away."""
        return not (self.is_deleted or self.is_to_be_deleted)

    @property
    def facts(self) -> NodeFacts:
        return NodeFacts(self.name, self.zone)

    def deleted(self) -> ThisNode:
        return replace(self, is_deleted=True)


def node_name(override: str = "", hostname: str | None = None) -> str:
    """Return the name of this node's object: the override or the host name, trimmed and in lower case.

    Raises ConfigError when nothing is left.
    """
    name = (override.strip() or (socket.gethostname() if hostname is None else hostname).strip()).lower()
    if not name:
        raise ConfigError("the host name is empty", where="--hostname-override")
    return name


def observe(node: Node) -> ThisNode:
    """Return what matters about a node object."""
    return ThisNode(
        node.metadata.name or "",
        ips=_first_of_each_family(_addresses(node)),
        zone=node.label(ZONE_LABEL) or "",
        is_deleted=node.metadata.deletion_timestamp is not None,
        is_to_be_deleted=any(taint.key == TO_BE_DELETED_TAINT for taint in node.spec.taints or ()),
    )


async def wait_for_node(connection: ApiConnection, name: str, *, sleep: Sleep = asyncio.sleep) -> ThisNode | None:
    """Return this node once it has an IP address; None when six tries, one to sixteen seconds apart, did not show any.

    Source: kube-proxy, `getNodeIPs`.
    """
    for attempt in range(_TRIES):
        if attempt:
            await sleep(2.0 ** (attempt - 1))
        try:
            node = await _get(connection, name)
        except ProxyError as failure:
            _log.warning("this node's addresses are not known yet: %s", failure)
            continue
        if node.ips:
            _log.info("this node is %s with the addresses %s", name, ", ".join(node.ips))
            return node
        _log.warning("this node's addresses are not known yet: the node %s has no IP address in its status", name)
    _log.error("this node's addresses stay unknown: no node %s with an IP address after %d tries", name, _TRIES)
    return None


async def _get(connection: ApiConnection, name: str) -> ThisNode:
    path = f"/api/v1/nodes/{quote(name, safe='')}"
    async with connection.request("get", f"nodes {name}", path, silence_s=_SILENCE_S) as response:
        body = await response.read()
    try:
        return observe(msgspec.json.decode(body, type=Node))
    except msgspec.DecodeError as error:
        raise StreamBroken("get", f"nodes {name}", str(error)) from error


def _addresses(node: Node) -> Iterator[str]:
    """Yield internal addresses, then external ones. What is no IP address is passed over."""
    known = (node.status.addresses if node.status else None) or ()
    for kind in ("InternalIP", "ExternalIP"):
        for each in known:
            if each.type == kind and each.address:
                try:
                    yield canonical_address(each.address)
                except ValueError:
                    _log.warning(
                        "the node %s has the %s %r, which is no IP address", node.metadata.name, kind, each.address
                    )


def _first_of_each_family(addresses: Iterator[str]) -> tuple[str, ...]:
    found: dict[object, str] = {}
    for address in addresses:
        found.setdefault(family_of(address), address)
    return tuple(found.values())
