"""The kernel rules that lead traffic from portals to proxy ports: what each service port asks of the kernel."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never

from userspace_proxy.core.model import IPFamily, IPNetwork, Scope, ServicePort, ServicePortName
from userspace_proxy.core.portals import NodeFacts, Portal, PortalKind, ProxyPorts, portals, proxy_port_of
from userspace_proxy.core.rule import (
    Chain,
    Comment,
    Condition,
    DestinationPort,
    Dnat,
    Jump,
    Match,
    Redirect,
    Rule,
    Target,
    Verdict,
    comment_text,
)


class Style(enum.StrEnum):
    """How rules are written. `FAITHFUL` is the text of kube-proxy 1.25; `DNAT` also works where that one fails.

    Those are pods on routed links without an address, bridge netfilter, and an INPUT chain that drops.
    """

    FAITHFUL = "faithful"
    DNAT = "dnat"


_PORTALS_FIRST = Comment("handle ClusterIPs; NOTE: this must be before the NodePort rules")
_NODE_PORTS_LAST = Comment("handle service NodePorts; NOTE: this must be the last rule in the chain")
_NODE_PORTS_FIRST = Comment("handle NodePorts of idled services; NOTE: this must be before the rules of another proxy")
_LET_NODE_PORTS_IN = Comment("Ensure that non-local NodePort traffic can flow")

FIRST_JUMPS = (
    Rule(Chain.INPUT, (_LET_NODE_PORTS_IN,), Jump(Chain.NODEPORT_NON_LOCAL)),
    Rule(Chain.PREROUTING, (_PORTALS_FIRST,), Jump(Chain.PORTALS_CONTAINER)),
    Rule(Chain.OUTPUT, (_PORTALS_FIRST,), Jump(Chain.PORTALS_HOST)),
)
"""The jumps that stand first in their chain."""


def _to_node_ports(comment: Comment) -> tuple[Rule, ...]:
    return tuple(
        Rule(chain, (Condition.DESTINATION_IS_LOCAL, comment), Jump(own))
        for chain, own in ((Chain.PREROUTING, Chain.NODEPORT_CONTAINER), (Chain.OUTPUT, Chain.NODEPORT_HOST))
    )


LAST_JUMPS = _to_node_ports(_NODE_PORTS_LAST)
"""The jumps that stand last in their chain."""


@dataclass(frozen=True, slots=True)
class Jumps:
    """The rules that lead from built-in chains to ours: those that stand first in their chain, and last."""

    first: tuple[Rule, ...]
    last: tuple[Rule, ...]


USUAL_JUMPS = Jumps(FIRST_JUMPS, LAST_JUMPS)

JUMPS_IN_FRONT = Jumps((*FIRST_JUMPS, *_to_node_ports(_NODE_PORTS_FIRST)), ())
"""For hybrid mode: what is ours outranks another proxy's rules in every way."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All rules of ours in one address family, by the service port that each serves.

    `unenforced` names the service ports whose load-balancer source ranges these rules cannot enforce.
    """

    family: IPFamily
    rules: Mapping[ServicePortName, tuple[Rule, ...]] = field(default_factory=lambda: MappingProxyType({}))
    unenforced: tuple[ServicePortName, ...] = ()

    def __iter__(self) -> Iterator[Rule]:
        for rules in self.rules.values():
            yield from rules


def render(
    service_ports: Iterable[ServicePort], proxy_ports: ProxyPorts, node: NodeFacts, style: Style = Style.FAITHFUL
) -> RuleSet:
    """Return the rules of these service ports in the node's family. Those without proxy port or address have none."""
    return rule_set(node.family, ((each, rules_of(each, proxy_ports, node, style)) for each in service_ports))


def rule_set(family: IPFamily, rendered: Iterable[tuple[ServicePort, tuple[Rule, ...]]]) -> RuleSet:
    """Return all rules of a family, from those of each service port."""
    rules, unenforced = {}, []
    for service_port, of_this in rendered:
        if of_this:
            rules[service_port.name] = of_this
        if _is_unenforced(service_port):
            unenforced.append(service_port.name)
    return RuleSet(family, MappingProxyType(rules), tuple(unenforced))


def _is_unenforced(service_port: ServicePort) -> bool:
    """Return whether there are load-balancer source ranges but no load-balancer IP at which to enforce them."""
    return bool(service_port.load_balancer_source_ranges) and not service_port.load_balancer_ips


def rules_of(service_port: ServicePort, ports: ProxyPorts, node: NodeFacts, style: Style) -> tuple[Rule, ...]:
    """Return the rules of one service port, each once."""
    rules: dict[Rule, None] = {}
    for scope in Scope:
        proxy_port = proxy_port_of(service_port, node.family, scope, ports)
        if proxy_port is not None:
            writer = _Writer(service_port, proxy_port, node, style)
            rules.update(dict.fromkeys(writer.rules(scope)))
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the rules that lead one service port's traffic to one proxy port."""

    service_port: ServicePort
    proxy_port: int
    node: NodeFacts
    style: Style

    def rules(self, scope: Scope) -> Iterator[Rule]:
        has_rules = False
        for portal in portals(self.service_port, self.node.family):
            if portal.kind.scope is scope:
                has_rules = True
                yield from self._portal(portal)
        if scope is Scope.EXTERNAL and self.service_port.node_port:
            has_rules = True
            yield from self._node_port()
        if has_rules and self.style is Style.DNAT:
            yield self._rule(Chain.NODEPORT_NON_LOCAL, self.proxy_port, Verdict.ACCEPT, Condition.WAS_REDIRECTED)

    def _portal(self, portal: Portal) -> Iterator[Rule]:
        match portal.kind:
            case PortalKind.CLUSTER_IP:
                yield from self._plain(portal)
            case PortalKind.LOAD_BALANCER_IP if self.service_port.load_balancer_source_ranges:
                yield from self._allowed_only(portal)
            case PortalKind.LOAD_BALANCER_IP:
                yield from self._plain(portal)
            case PortalKind.EXTERNAL_IP if self.style is Style.DNAT:
                yield from self._plain(portal)
            case PortalKind.EXTERNAL_IP:
                yield self._to(portal, Chain.PORTALS_CONTAINER, Condition.NOT_FROM_BRIDGE_PORT)
                yield self._to(portal, Chain.PORTALS_CONTAINER, Condition.DESTINATION_IS_LOCAL)
                yield self._to(portal, Chain.PORTALS_HOST, Condition.DESTINATION_IS_LOCAL)
            case _:
                assert_never(portal.kind)

    def _plain(self, portal: Portal) -> Iterator[Rule]:
        yield self._to(portal, Chain.PORTALS_CONTAINER)
        yield self._to(portal, Chain.PORTALS_HOST)

    def _allowed_only(self, portal: Portal) -> Iterator[Rule]:
        """Lead the allowed sources to the proxy. What others send to this address and port on this node is dropped."""
        for chain in (Chain.PORTALS_CONTAINER, Chain.PORTALS_HOST):
            for network in self.service_port.load_balancer_source_ranges:
                if network.version == self.node.family:
                    yield self._to(portal, chain, source=network)
        port = self.service_port.port
        yield self._rule(Chain.NODEPORT_NON_LOCAL, port, Verdict.DROP, destination=self._single(portal.address))

    def _node_port(self) -> Iterator[Rule]:
        for network in self.node.node_port_destinations:
            destination = str(network or "")
            for chain in (Chain.NODEPORT_CONTAINER, Chain.NODEPORT_HOST):
                yield self._rule(chain, self.service_port.node_port, self._target(chain), destination=destination)
        if self.style is Style.FAITHFUL and self.node.node_port_destinations:
            yield self._rule(Chain.NODEPORT_NON_LOCAL, self.proxy_port, Verdict.ACCEPT, Condition.IS_NEW)

    def _to(self, portal: Portal, chain: Chain, *conditions: Condition, source: IPNetwork | None = None) -> Rule:
        address = self._single(portal.address)
        return self._rule(
            chain, self.service_port.port, self._target(chain), *conditions, destination=address, source=source
        )

    def _target(self, chain: Chain) -> Target:
        """Redirect what comes from elsewhere, if every address listens. The host's own packets have no way in."""
        is_host = chain in (Chain.PORTALS_HOST, Chain.NODEPORT_HOST)
        if self.style is Style.FAITHFUL and self.node.binds_everywhere and not is_host:
            return Redirect(self.proxy_port)
        return Dnat(self.node.proxy_address, self.proxy_port)

    def _rule(
        self,
        chain: Chain,
        port: int,
        target: Target,
        *conditions: Condition,
        destination: str = "",
        source: IPNetwork | None = None,
    ) -> Rule:
        protocol = self.service_port.protocol
        comment = Comment(comment_text(str(self.service_port.name)))
        matches: tuple[Match, ...] = (comment, DestinationPort(protocol, port), *conditions)
        network = "" if source is None or source.prefixlen == 0 else str(source)
        return Rule(chain, matches, target, protocol=protocol, source=network, destination=destination)

    def _single(self, address: str) -> str:
        return f"{address}/{32 if self.node.family is IPFamily.IPV4 else 128}"
