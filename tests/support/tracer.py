"""A packet tracer: says where rules send a packet, so that tests speak of traffic and not of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from typing import assert_never

from userspace_proxy.core.model import L4Protocol
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
    Verdict,
)
from userspace_proxy.core.rules import FIRST_JUMPS, LAST_JUMPS, RuleSet


@dataclass(frozen=True)
class Packet:
    """The first packet of a connection. `from_bridge_port` is what the physdev match sees."""

    source: str
    destination: str
    port: int
    protocol: L4Protocol = L4Protocol.TCP
    from_bridge_port: bool = False
    redirected: bool = False


@dataclass(frozen=True)
class Kernel:
    """Rules and the addresses of the node that they are on. `interface` is the address that REDIRECT leads to."""

    rules: RuleSet
    local: frozenset[str]
    interface: str = ""

    def from_elsewhere(self, packet: Packet) -> Packet:
        """Return the packet after PREROUTING."""
        return self._translate(Chain.PREROUTING, packet)

    def from_host(self, packet: Packet) -> Packet:
        """Return the packet after OUTPUT."""
        return self._translate(Chain.OUTPUT, packet)

    def lets_in(self, packet: Packet, policy: Verdict = Verdict.DROP) -> bool:
        """Return whether INPUT accepts the packet."""
        return (self._walk(Chain.INPUT, packet) or policy) is Verdict.ACCEPT

    def _translate(self, chain: Chain, packet: Packet) -> Packet:
        target = self._walk(chain, packet)
        match target:
            case None:
                return packet
            case Dnat(address, port):
                return replace(packet, destination=address, port=port, redirected=True)
            case Redirect(port):
                return replace(packet, destination=self.interface, port=port, redirected=True)
            case _:
                raise AssertionError(f"{target} is not for the nat table")

    def _walk(self, chain: Chain, packet: Packet) -> Verdict | Redirect | Dnat | None:
        for rule in self._chain(chain):
            if not self._applies(rule, packet):
                continue
            target = self._walk(rule.target.chain, packet) if isinstance(rule.target, Jump) else rule.target
            if target is not None:
                return target
        return None

    def _chain(self, chain: Chain) -> Iterable[Rule]:
        return (rule for rule in (*FIRST_JUMPS, *self.rules, *LAST_JUMPS) if rule.chain is chain)

    def _applies(self, rule: Rule, packet: Packet) -> bool:
        return (
            (not rule.source or ip_address(packet.source) in ip_network(rule.source))
            and (not rule.destination or ip_address(packet.destination) in ip_network(rule.destination))
            and (rule.protocol is None or rule.protocol is packet.protocol)
            and all(self._matches(match, packet) for match in rule.matches)
        )

    def _matches(self, match: Match, packet: Packet) -> bool:
        match match:
            case Comment() | Condition.IS_NEW:
                return True
            case DestinationPort(protocol, port):
                return packet.protocol is protocol and packet.port == port
            case Condition.NOT_FROM_BRIDGE_PORT:
                return not packet.from_bridge_port
            case Condition.DESTINATION_IS_LOCAL:
                return packet.destination in self.local
            case Condition.WAS_REDIRECTED:
                return packet.redirected
            case _:
                assert_never(match)
