"""The process that python-iptables lives in: one request on standard input, one answer on what was standard output."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import pickle
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, assert_never

from userspace_proxy.core.errors import KernelRefused, ProxyError, RedirectFailed, RuleNotUnderstood
from userspace_proxy.core.model import IPFamily
from userspace_proxy.core.rule import (
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
)
from userspace_proxy.redirect.programs import legacy_tables
from userspace_proxy.redirect.tables import Chains, TableChange, Tables

if TYPE_CHECKING:
    import iptc

LOCK_FILE = "/run/xtables.lock"
_NEEDS_QUOTES = re.compile(r"[\s\"'\\]")

_OPTION = {
    Condition.NOT_FROM_BRIDGE_PORT: ("physdev_is_in", "!"),
    Condition.DESTINATION_IS_LOCAL: ("dst_type", "LOCAL"),
    Condition.IS_NEW: ("state", "NEW"),
    Condition.WAS_REDIRECTED: ("ctstate", "DNAT"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """Changes to make, or None to read all tables."""

    changes: tuple[TableChange, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read, or why the request failed."""

    tables: Tables | None = None
    error: ProxyError | None = None


class LegacyTables:
    """The legacy tables of one family, as python-iptables gives them."""

    def __init__(self, family: IPFamily) -> None:
        import iptc

        self._iptc = iptc
        self._family = family
        is_ipv4 = family is IPFamily.IPV4
        self._table_class: Any = iptc.Table if is_ipv4 else iptc.Table6
        self._rule_class: Any = iptc.Rule if is_ipv4 else iptc.Rule6

    def read(self) -> Tables:
        return {name: self._chains(self._opened(name)) for name in legacy_tables(self._family)}

    def change(self, changes: Iterable[TableChange]) -> None:
        """Make the changes of each table in one commit, alone among all programs that respect the lock."""
        with _lock():
            for change in changes:
                table = self._opened(change.table)
                try:
                    self._apply(change, table)
                    table.commit()
                except self._iptc.IPTCError as error:
                    raise KernelRefused("libiptc", str(error)) from error
                finally:
                    table.refresh()

    def _opened(self, name: str) -> Any:
        table = self._table_class(name)
        table.autocommit = False  # with it, errors of refresh() are swallowed
        table.refresh()
        return table

    def _apply(self, change: TableChange, table: iptc.Table) -> None:
        for name in change.declare:
            if table.is_chain(name):
                self._iptc.Chain(table, name).flush()
            else:
                table.create_chain(name)
        self._delete(change.delete, table)
        for rule in change.insert:
            self._iptc.Chain(table, rule.chain.value).insert_rule(self._built(rule))
        for rule in change.append:
            self._iptc.Chain(table, rule.chain.value).append_rule(self._built(rule))
        for name in change.remove:
            table.delete_chain(name)

    def _delete(self, lines: Iterable[str], table: iptc.Table) -> None:
        by_chain: dict[str, list[str]] = {}
        for line in lines:
            by_chain.setdefault(line.split(" ", 2)[1], []).append(line)
        for name, unwanted in by_chain.items():
            chain = self._iptc.Chain(table, name)
            for rule in chain.rules:
                if not unwanted:
                    break
                if (text := self._text(name, rule)) in unwanted:
                    unwanted.remove(text)
                    chain.delete_rule(rule)
            if unwanted:
                raise KernelRefused("libiptc", f"no such rule: {unwanted[0]}")

    def _built(self, rule: Rule) -> Any:
        built = self._rule_class()
        if rule.source:
            built.src = rule.source
        if rule.destination:
            built.dst = rule.destination
        if rule.protocol:
            built.protocol = rule.protocol.lower()
        try:
            for match in rule.matches:
                self._add_match(built, match)
            self._add_target(built, rule.target)
        except (self._iptc.XTablesError, ValueError, AttributeError) as error:
            raise RuleNotUnderstood("libiptc", str(error), rule.text) from error
        return built

    def _add_match(self, rule: Any, match: Match) -> None:
        match match:
            case Comment(text):
                rule.create_match("comment").comment = text
            case DestinationPort(protocol, port):
                rule.create_match(protocol.lower()).dport = str(port)
            case Condition():
                setattr(rule.create_match(match.kernel_match), *_OPTION[match])
            case _:
                assert_never(match)

    def _add_target(self, rule: Any, target: Target) -> None:
        match target:
            case Verdict():
                rule.create_target(target.value)
            case Jump(chain):
                rule.create_target(chain.value)
            case Redirect(port):
                rule.create_target("REDIRECT").to_ports = str(port)
            case Dnat(address, port):
                host = f"[{address}]" if self._family is IPFamily.IPV6 else address
                rule.create_target("DNAT").to_destination = f"{host}:{port}"
            case _:
                assert_never(target)

    def _chains(self, table: iptc.Table) -> Chains:
        return {chain.name: [self._text(chain.name, rule) for rule in chain.rules] for chain in table.chains}

    def _text(self, chain: str, rule: Any) -> str:
        """Return a rule as `iptables-save` prints it, for all rules of ours and most others."""
        parts = ["-A", chain]
        for flag, network in (("-s", rule.src), ("-d", rule.dst)):
            parts += _network(flag, network)
        for flag, value in (("-i", rule.in_interface), ("-o", rule.out_interface), ("-p", rule.protocol)):
            if value and value not in ("ip", "all"):
                parts += _maybe_negated(flag, value)
        for match in rule.matches:
            parts += ("-m", match.name, *_options(match))
        if rule.target is not None and rule.target.name:
            flag = "-g" if getattr(rule.target, "goto", False) else "-j"
            parts += (flag, rule.target.name, *_options(rule.target))
        return " ".join(parts)


def _network(flag: str, text: str) -> tuple[str, ...]:
    network = ipaddress.ip_network(text.removeprefix("!").strip(), strict=False)
    if network.prefixlen == 0 and not text.startswith("!"):
        return ()
    return _maybe_negated(flag, ("!" if text.startswith("!") else "") + str(network))


def _maybe_negated(flag: str, value: str) -> tuple[str, ...]:
    return ("!", flag, value[1:].strip()) if value.startswith("!") else (flag, value)


def _options(extension: Any) -> Iterator[str]:
    """Yield the options of a match or target as they are printed. Comments are quoted unless they are one word."""
    for name, values in extension.get_all_parameters().items():
        rest = list(values)
        if rest[:1] == ["!"]:
            yield rest.pop(0)
        yield f"--{name}"
        if name != "comment":
            rest = [_quoted(value) if _NEEDS_QUOTES.search(value) else value for value in rest]
        elif not rest[0].replace("-", "").replace("_", "").isalnum():
            rest = [_quoted(" ".join(rest))]
        yield from rest


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock that legacy iptables programs hold while they write."""
    try:
        descriptor = os.open(LOCK_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RedirectFailed("libiptc", f"{LOCK_FILE}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def answer(request: Request, tables: LegacyTables) -> Answer:
    """Carry out one request. Errors are part of the answer."""
    try:
        if request.changes is None:
            return Answer(tables.read())
        tables.change(request.changes)
        return Answer()
    except ProxyError as error:
        return Answer(error=error)
    except Exception as error:  # whatever the library raises is an answer, too: its errors have no common class
        return Answer(error=RedirectFailed("libiptc", f"{type(error).__name__}: {error}"))


def serve(family: IPFamily, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    tables = LegacyTables(family)
    while header := requests.read(4):
        request = pickle.loads(requests.read(*struct.unpack("!I", header)))  # a pipe from our own parent
        message = pickle.dumps(answer(request, tables))
        answers.write(struct.pack("!I", len(message)) + message)
        answers.flush()


def main() -> None:
    """Keep standard output for answers, away from the library, which writes to it."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(IPFamily(int(sys.argv[1])), sys.stdin.buffer, answers)
