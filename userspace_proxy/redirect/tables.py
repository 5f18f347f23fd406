"""What the kernel's tables hold and how to change them, as data. Nothing here touches the kernel.

Rules that were read are text, as `iptables-save` prints it; rules to be written are `Rule`s.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from userspace_proxy.core.rule import OWN_CHAINS, Chain, Rule, Table
from userspace_proxy.core.rules import Jumps

Chains = dict[str, list[str]]
"""The rules of each chain of a table, in order."""

Tables = dict[str, Chains]
"""The chains of each table by the table's name."""

JUMPING_CHAINS = {Table.FILTER: (Chain.INPUT,), Table.NAT: (Chain.PREROUTING, Chain.OUTPUT)}
OWN_CHAIN_NAMES = frozenset(chain.value for chains in OWN_CHAINS.values() for chain in chains)


class SaveReader:
    """Reads the lines of an `iptables-save`, in as many portions as its caller likes."""

    def __init__(self) -> None:
        self.tables: Tables = {}
        self._chains: Chains = {}

    def feed(self, lines: Iterable[str]) -> None:
        """Take the next lines. Comments, counters and what is no rule are skipped."""
        for line in lines:
            if line.startswith("-A "):
                self._chains.setdefault(line.split(" ", 2)[1], []).append(line)
            elif line.startswith(":"):
                self._chains.setdefault(line[1:].split(" ", 1)[0], [])
            elif line.startswith("*"):
                self._chains = self.tables.setdefault(line[1:].strip(), {})


def read_save(text: str) -> Tables:
    """Return the tables that an `iptables-save` printed."""
    reader = SaveReader()
    reader.feed(text.splitlines())
    return reader.tables


def target_of(line: str) -> str:
    """Return the target of a rule, or the chain that it goes to; empty if it has neither. Comments do not mislead."""
    try:
        words = iter(shlex.split(line))
    except ValueError:  # a quote that some extension printed without its pair: no rule of ours has one
        words = iter(line.split())
    for word in words:
        if word == "--comment":
            next(words, "")
        elif word in ("-j", "-g"):
            return next(words, "")
    return ""


@dataclass(frozen=True, slots=True)
class TableChange:
    """Changes of one table that are made together or not at all, in the order of the fields.

    `declare` names chains that are created, or emptied where they exist. `delete` are rules as they were read, each
    present. `insert` go to the top of their chain, `append` to its end. `remove` names chains to delete.
    """

    table: str
    declare: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    insert: tuple[Rule, ...] = ()
    append: tuple[Rule, ...] = ()
    remove: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.declare or self.delete or self.insert or self.append or self.remove)

    def lines(self) -> list[str]:
        """Return the block for `iptables-restore --noflush`."""
        return [
            f"*{self.table}",
            *(f":{chain} - [0:0]" for chain in self.declare),
            *(f"-D{rule[2:]}" for rule in self.delete),
            *(_insertion(rule) for rule in self.insert),
            *(rule.text for rule in self.append),
            *(f"-X {chain}" for chain in self.remove),
            "COMMIT",
        ]


def _insertion(rule: Rule) -> str:
    chain = rule.chain.value
    return f"-I {chain} 1{rule.text.removeprefix(f'-A {chain}')}"


Wanted = Mapping[Chain, Mapping[str, Rule]]
"""The rules wanted in each chain of ours, by their text. All of our chains are keys."""


@dataclass(slots=True)
class Difference:
    """How a table differs from what is wanted. Texts of rules that are there stand in `surplus` as they were read."""

    missing_chains: list[str] = field(default_factory=list)
    missing: list[Rule] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    wrong_jumps: list[str] = field(default_factory=list)
    first_jumps: list[Rule] = field(default_factory=list)
    last_jumps: list[Rule] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing_chains or self.missing or self.surplus or self.first_jumps or self.last_jumps)


def compare_chain(chains: Chains, wanted: Wanted, chain: Chain, found: Difference) -> None:
    """Add to `found` how a chain of ours differs from what is wanted in it."""
    if chain.value not in chains:
        found.missing_chains.append(chain.value)
    missing, surplus = _compare(chains.get(chain.value, ()), wanted[chain])
    found.missing += missing
    found.surplus += surplus


def compare_jumps(chains: Chains, table: Table, jumps: Jumps, lacking: Set[str], found: Difference) -> None:
    """Add to `found` which jumps are not exactly once in their place. They must do without the matches `lacking`."""
    for chain in JUMPING_CHAINS[table]:
        _compare_jumps(chains.get(chain.value, []), chain, jumps, lacking, found)


def _compare(present: Sequence[str], wanted: Mapping[str, Rule]) -> tuple[list[Rule], list[str]]:
    """Return the rules that are missing and the lines that are too many. Each rule is wanted once, in any order."""
    count = Counter(present)
    missing = {text: rule for text, rule in wanted.items() if text not in count}
    surplus = [line for line, copies in count.items() for _ in range(copies - (line in wanted))]
    if missing and surplus:  # other versions of iptables print the same rule in another order
        by_meaning = {tuple(meaning_of(text)): text for text in missing}
        same = {line: by_meaning.pop(tuple(meaning_of(line)), "") for line in dict.fromkeys(surplus)}
        for line in filter(same.get, same):
            del missing[same[line]]
            surplus.remove(line)
    return list(missing.values()), surplus


def _compare_jumps(lines: Sequence[str], chain: Chain, jumps: Jumps, lacking: Set[str], found: Difference) -> None:
    first, last = (
        [rule for rule in wanted if rule.chain is chain and lacking.isdisjoint(rule.kernel_matches)]
        for wanted in (jumps.first, jumps.last)
    )
    ours = [(index, line) for index, line in enumerate(lines) if _leads_to_us(line)]
    right = list(enumerate(rule.text for rule in first))
    right += [(len(lines) - len(last) + index, rule.text) for index, rule in enumerate(last)]
    if [(index, meaning_of(line)) for index, line in ours] != [(index, meaning_of(text)) for index, text in right]:
        found.wrong_jumps += [line for _, line in ours]
        found.first_jumps += first
        found.last_jumps += last


def _leads_to_us(line: str) -> bool:
    return "KUBE-" in line and target_of(line) in OWN_CHAIN_NAMES


_OPTION = re.compile(r"(?<!!) (?=[!-])")
_NO_MEANING = str.maketrans("", "", '"')


def meaning_of(line: str) -> list[str]:
    """Return a form of a rule that is the same in whichever order its options are printed, with or without `/32`."""
    options = _OPTION.split(line.translate(_NO_MEANING))
    return sorted(option.removesuffix("/32").removesuffix("/128") for option in options)


def whole_block(table: Table, wanted: Wanted, found: Difference) -> TableChange:
    """Return the change that writes all chains of ours anew, and the jumps where they are not right."""
    own = OWN_CHAINS[table]
    return TableChange(
        table,
        declare=tuple(chain.value for chain in own),
        delete=tuple(found.wrong_jumps),
        insert=tuple(reversed(found.first_jumps)),  # each goes to the top
        append=(*(rule for chain in own for rule in wanted[chain].values()), *found.last_jumps),
    )


def small_block(table: Table, found: Difference) -> TableChange:
    """Return the change that puts right just what differs."""
    return TableChange(
        table,
        declare=tuple(found.missing_chains),
        delete=(*found.surplus, *found.wrong_jumps),
        insert=tuple(reversed(found.first_jumps)),  # each goes to the top
        append=(*found.missing, *found.last_jumps),
    )
