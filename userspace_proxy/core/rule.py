"""One kernel rule, as data, and its text.

A `Rule` has several readers, which all see the same thing: iptables-restore, python-iptables and the packet tracer of
the tests.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never

from userspace_proxy.core.model import L4Protocol, host_port

MAX_COMMENT_LENGTH = 200
_NOT_FOR_COMMENTS = re.compile(r"""[^ -~]|["'\\]|^!""")


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
