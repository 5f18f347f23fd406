"""The kernel rules that lead traffic from portals to proxy ports, as data.

A `Rule` has several readers, which all see one rendering: iptables-restore, python-iptables and the packet tracer of
the tests.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never

from userspace_proxy.core.model import IPFamily, IPNetwork, L4Protocol, ServicePort, ServicePortName, host_port
from userspace_proxy.core.portals import NodeFacts, Portal, PortalKind, ProxyPorts, Scope, portals, proxy_port_of

MAX_COMMENT_LENGTH = 200
_NOT_FOR_COMMENTS = re.compile(r"""[^ -~]|["'\\]|^!""")


class Style(enum.StrEnum):
    """How rules are written. `FAITHFUL` is the text of kube-proxy 1.25; `DNAT` also works where that one fails.

    Those are pods on routed links without an address, bridge netfilter, and an INPUT chain that drops.
    """

    FAITHFUL = "faithful"
    DNAT = "dnat"


class Table(enum.StrEnum):
    """The tables with rules of ours, in the order of writing: what accepts a packet stands before what sends it."""

    FILTER = "filter"
    NAT = "nat"


class Chain(enum.StrEnum):
    """The chains with rules of ours: kube-proxy's five of the userspace mode, and those that jump to them."""

    PREROUTING = "PREROUTING"
    INPUT = "INPUT"
    OUTPUT = "OUTPUT"
    NODEPORT_NON_LOCAL = "KUBE-NODEPORT-NON-LOCAL"
    NODEPORT_CONTAINER = "KUBE-NODEPORT-CONTAINER"
    NODEPORT_HOST = "KUBE-NODEPORT-HOST"
    PORTALS_CONTAINER = "KUBE-PORTALS-CONTAINER"
    PORTALS_HOST = "KUBE-PORTALS-HOST"

    @property
    def table(self) -> Table:
        """The table of a chain of ours, and of a built-in one that jumps to it."""
        return Table.FILTER if self in (Chain.INPUT, Chain.NODEPORT_NON_LOCAL) else Table.NAT


OWN_CHAINS: Mapping[Table, tuple[Chain, ...]] = MappingProxyType(
    {
        Table.FILTER: (Chain.NODEPORT_NON_LOCAL,),
        Table.NAT: (Chain.NODEPORT_CONTAINER, Chain.NODEPORT_HOST, Chain.PORTALS_CONTAINER, Chain.PORTALS_HOST),
    }
)


class Condition(enum.StrEnum):
    """A match without argument of ours. Its value is its text; its second word is the kernel match that it needs."""

    NOT_FROM_BRIDGE_PORT = "-m physdev ! --physdev-is-in"
    DESTINATION_IS_LOCAL = "-m addrtype --dst-type LOCAL"
    IS_NEW = "-m state --state NEW"
    WAS_REDIRECTED = "-m conntrack --ctstate DNAT"

    @property
    def kernel_match(self) -> str:
        return self.value.split()[1]


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment that has been through `comment_text`."""

    text: str


@dataclass(frozen=True, slots=True)
class DestinationPort:
    protocol: L4Protocol
    port: int


Match = Condition | Comment | DestinationPort


class Verdict(enum.StrEnum):
    ACCEPT = "ACCEPT"
    DROP = "DROP"


@dataclass(frozen=True, slots=True)
class Jump:
    chain: Chain


@dataclass(frozen=True, slots=True)
class Redirect:
    """To a port at the first address of the interface that the packet came in by."""

    port: int


@dataclass(frozen=True, slots=True)
class Dnat:
    address: str
    port: int


Target = Verdict | Jump | Redirect | Dnat


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `source` and `destination` are networks as text, empty for any.

    `text` is the rule as `iptables-save` prints it, without the line's end. It says all, so rules compare by it.
    """

    chain: Chain = field(compare=False)
    matches: tuple[Match, ...] = field(compare=False)
    target: Target = field(compare=False)
    protocol: L4Protocol | None = field(default=None, compare=False)
    source: str = field(default="", compare=False)
    destination: str = field(default="", compare=False)
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _rule_text(self))

    @property
    def kernel_matches(self) -> Iterator[str]:
        """The kernel matches that this rule needs and that some kernels lack."""
        return (match.kernel_match for match in self.matches if isinstance(match, Condition))


def _rule_text(rule: Rule) -> str:
    parts = ["-A", rule.chain.value]
    if rule.source:
        parts += ("-s", rule.source)
    if rule.destination:
        parts += ("-d", rule.destination)
    if rule.protocol:
        parts += ("-p", rule.protocol.lower())
    parts += (_match_text(match) for match in rule.matches)
    parts += ("-j", _target_text(rule.target))
    return " ".join(parts)


def _match_text(match: Match) -> str:
    match match:
        case Condition():
            return match.value
        case Comment(text):
            return f"-m comment --comment {text}" if _is_plain(text) else f'-m comment --comment "{text}"'
        case DestinationPort(protocol, port):
            return f"-m {protocol.lower()} --dport {port}"
        case _:
            assert_never(match)


def _target_text(target: Target) -> str:
    match target:
        case Verdict():
            return target.value
        case Jump(chain):
            return chain.value
        case Redirect(port):
            return f"REDIRECT --to-ports {port}"
        case Dnat(address, port):
            return f"DNAT --to-destination {host_port(address, port)}"
        case _:
            assert_never(target)


def _is_plain(text: str) -> bool:
    return text.replace("-", "").replace("_", "").isalnum()


def comment_text(name: str) -> str:
    """Return `name` as a comment that every iptables reads back as it was written: cut, and odd characters as `_`."""
    return _NOT_FOR_COMMENTS.sub("_", name)[:MAX_COMMENT_LENGTH]


_PORTALS_FIRST = Comment("handle ClusterIPs; NOTE: this must be before the NodePort rules")
_NODE_PORTS_LAST = Comment("handle service NodePorts; NOTE: this must be the last rule in the chain")
_LET_NODE_PORTS_IN = Comment("Ensure that non-local NodePort traffic can flow")

FIRST_JUMPS = (
    Rule(Chain.INPUT, (_LET_NODE_PORTS_IN,), Jump(Chain.NODEPORT_NON_LOCAL)),
    Rule(Chain.PREROUTING, (_PORTALS_FIRST,), Jump(Chain.PORTALS_CONTAINER)),
    Rule(Chain.OUTPUT, (_PORTALS_FIRST,), Jump(Chain.PORTALS_HOST)),
)
"""The jumps that stand first in their chain."""

LAST_JUMPS = tuple(
    Rule(chain, (Condition.DESTINATION_IS_LOCAL, _NODE_PORTS_LAST), Jump(own))
    for chain, own in ((Chain.PREROUTING, Chain.NODEPORT_CONTAINER), (Chain.OUTPUT, Chain.NODEPORT_HOST))
)
"""The jumps that stand last in their chain."""


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
    rules, unenforced = {}, []
    for service_port in service_ports:
        if of_this := rules_of(service_port, proxy_ports, node, style):
            rules[service_port.name] = of_this
        if is_unenforced(service_port):
            unenforced.append(service_port.name)
    return RuleSet(node.family, MappingProxyType(rules), tuple(unenforced))


def is_unenforced(service_port: ServicePort) -> bool:
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
