"""Whether the configuration fits the addresses of the node: decided from both, and told to the operator.

Source: kube-proxy 1.31, which warns about much and refuses little, as it once checked nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from userspace_proxy.core.addresses import parse_network
from userspace_proxy.core.config import Config
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.host_ports import family_of_cidr
from userspace_proxy.core.model import IPFamily, IPNetwork, ListenAddress, family_of

LOOPBACK: Final = {IPFamily.IPV4: "127.0.0.1", IPFamily.IPV6: "::1"}

_NAMES = {IPFamily.IPV4: "IPv4", IPFamily.IPV6: "IPv6"}


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """The addresses that stand for this node, one of each family, and the family that counts.

    `warning` is for the operator: nothing is known of the node, so loopback stands in.
    """

    primary_family: IPFamily
    by_family: dict[IPFamily, str]
    warning: str = ""

    @property
    def primary(self) -> str:
        return self.by_family[self.primary_family]


@dataclass(frozen=True, slots=True)
class AddressReport:
    """What does not fit. With `fatal`, the proxy must not start."""

    warnings: tuple[str, ...] = ()
    fatal: tuple[str, ...] = ()


def refuse_localhost(bind_address: str) -> None:
    """Raise ConfigError for a bind address that only this node's own processes could reach.

    Source: kube-proxy 1.25, userspace mode.
    """
    if ip_address(bind_address).is_loopback:
        raise ConfigError("cannot proxy on localhost", where="bindAddress", subject=bind_address)


def node_addresses(bind_address: str, node_ips: Sequence[str]) -> NodeAddresses:
    """Return the node's addresses: a specific bind address before `node_ips`, and these before loopback.

    `node_ips` are those that the API names, the preferred one first.
    """
    by_family = dict(LOOPBACK)
    by_family.update({family_of(address): address for address in reversed(node_ips)})
    primary_family = family_of(node_ips[0]) if node_ips else IPFamily.IPV4
    if not ip_address(bind_address).is_unspecified:
        primary_family = family_of(bind_address)
        by_family[primary_family] = bind_address
    warning = ""
    if ip_address(by_family[primary_family]).is_loopback:
        warning = (
            f"no address of this node is known, so {LOOPBACK[primary_family]} stands in for it: "
            "--bind-address says which it is"
        )
    return NodeAddresses(primary_family, by_family, warning)


def node_port_networks(config: Config, node: NodeAddresses) -> dict[IPFamily, tuple[IPNetwork, ...] | None]:
    """Return for each family the networks on whose addresses node ports are served. None: on all addresses.

    A family of which `nodePortAddresses` says nothing is served on all, as in kube-proxy. `primary` says something
    of both: none of a family that the node does not have, and all of the primary one while its address is not known.
    """
    networks: dict[IPFamily, tuple[IPNetwork, ...] | None] = dict.fromkeys(IPFamily)
    if not config.node_ports_on_primary:
        given = [parse_network(cidr) for cidr in config.document.node_port_addresses]
        return {family: tuple(each for each in given if each.version == family) or None for family in networks}
    for family, address in node.by_family.items():
        if not ip_address(address).is_loopback:
            networks[family] = (parse_network(f"{address}/{ip_address(address).max_prefixlen}"),)
        elif family is not node.primary_family:
            networks[family] = ()
    return networks


def check_addresses(
    config: Config, primary: IPFamily, *, has_both_families: bool, pod_cidrs: Sequence[str] = ()
) -> AddressReport:
    """Return what in the configuration does not fit a node of this primary family.

    `has_both_families` says whether the node can speak the other one, too; `pod_cidrs` are those of its Node object.
    """
    document = config.document
    cluster_cidrs = [cidr for cidr in document.cluster_cidr.split(",") if cidr]
    warnings = [_node_ports(config, primary, [cluster_cidrs, document.ipvs.exclude_cidrs, pod_cidrs])]
    fatal = list[str]()
    other = primary.other
    node = f"this node is {_NAMES[primary]}-{'primary' if has_both_families else 'only'}"
    if _are_all(cluster_cidrs, other):
        is_fatal = document.detect_local_mode == "ClusterCIDR" and not has_both_families
        (fatal if is_fatal else warnings).append(f"{node}, but clusterCIDR has {_NAMES[other]} networks only")
    if _are_all(pod_cidrs, other):
        is_fatal = document.detect_local_mode == "NodeCIDR"
        (fatal if is_fatal else warnings).append(f"{node}, but its spec.podCIDRs has {_NAMES[other]} networks only")
    if not has_both_families:
        for name, address in (
            ("healthzBindAddress", config.healthz_address),
            ("metricsBindAddress", config.metrics_address),
        ):
            if _cannot_listen(address, other):
                warnings.append(f"{node}, but {name} is an {_NAMES[other]} address")
    return AddressReport(tuple(filter(None, warnings)), tuple(fatal))


def _node_ports(config: Config, primary: IPFamily, elsewhere: Sequence[Sequence[str]]) -> str:
    """Return a warning where node ports are open on more addresses than the operator may think."""
    cidrs, other = config.document.node_port_addresses, primary.other
    if not cidrs:
        return (
            "nodePortAddresses is unset, so node ports are served on all addresses of this node; "
            "--nodeport-addresses=primary limits them to the node's own"
        )
    if config.node_ports_on_primary:
        return ""
    open_to_all = "so node ports are served on all {} addresses of this node"
    is_dual_stack = any({family_of_cidr(cidr) for cidr in of_one} >= set(_NAMES) for of_one in (cidrs, *elsewhere))
    if is_dual_stack and _are_all(cidrs, primary):
        return (
            f"the cluster has both address families, but nodePortAddresses has {_NAMES[primary]} networks only, "
            + open_to_all.format(_NAMES[other])
        )
    if _are_all(cidrs, other):
        return (
            f"nodePortAddresses has {_NAMES[other]} networks only, while the node's primary family is "
            f"{_NAMES[primary]}, {open_to_all.format(_NAMES[primary])}"
        )
    return ""


def _are_all(cidrs: Sequence[str], family: IPFamily) -> bool:
    return bool(cidrs) and all(family_of_cidr(cidr) is family for cidr in cidrs)


def _cannot_listen(address: ListenAddress | None, wrong: IPFamily) -> bool:
    return address is not None and address.family is wrong and not ip_address(address.address).is_unspecified
