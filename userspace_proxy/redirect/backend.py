"""What a redirector needs of a way into the kernel's tables, and a way that leads into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Protocol

from userspace_proxy.core.errors import KernelRefused
from userspace_proxy.core.model import IPFamily
from userspace_proxy.core.rule import Rule
from userspace_proxy.redirect.tables import TableChange, Tables, meaning_of


class Backend(Protocol):
    """Reads and writes the tables of one address family. One call at a time."""

    @property
    def name(self) -> str:
        """What people call it: nft, legacy, libiptc or fake."""

    @property
    def family(self) -> IPFamily: ...

    @property
    def fingerprint_skips_own_writes(self) -> bool:
        """Whether `write` leaves the fingerprint as it is, so that it tells of others' changes alone."""

    async def read(self) -> Tables:
        """Return the tables as they are. A table that does not exist is left out, and is not created by looking.

        Raises RedirectFailed.
        """

    async def write(self, changes: Sequence[TableChange]) -> None:
        """Make the changes in their order; each table's together or not at all.

        Waits for whoever holds the lock. Raises RuleNotUnderstood or KernelRefused, after which the tables before
        the one at fault have been changed; RedirectFailed for anything else.
        """

    def fingerprint(self) -> int | None:
        """Return a number that differs once somebody has changed the tables; None where there is none to be had.

        Costs microseconds, so it may be asked often.
        """

    async def close(self) -> None:
        """Give back what it holds. The rules stay."""


class FakeBackend:
    """Tables in memory that behave as the kernel's. `refuses` decides which rules such a kernel does not take."""

    name = "fake"
    fingerprint_skips_own_writes = True

    def __init__(
        self, family: IPFamily = IPFamily.IPV4, *, refuses: Callable[[Rule], bool] = lambda rule: False
    ) -> None:
        self.family = family
        self.refuses = refuses
        self.writes = 0
        self.foreign_changes = 0
        self.tables: Tables = {
            "filter": {"INPUT": [], "FORWARD": [], "OUTPUT": []},
            "nat": {"PREROUTING": [], "INPUT": [], "OUTPUT": [], "POSTROUTING": []},
        }

    async def read(self) -> Tables:
        return deepcopy(self.tables)

    async def write(self, changes: Sequence[TableChange]) -> None:
        self.writes += 1
        for change in changes:
            changed = deepcopy(self.tables.setdefault(change.table, {}))
            self._apply(change, changed)
            self.tables[change.table] = changed

    def fingerprint(self) -> int | None:
        return self.foreign_changes

    async def close(self) -> None:
        pass

    def _apply(self, change: TableChange, chains: dict[str, list[str]]) -> None:
        for chain in change.declare:
            chains[chain] = []
        for line in change.delete:
            _delete(line, chains)
        for rule in (*change.insert, *change.append):
            if self.refuses(rule) or rule.chain.value not in chains:
                raise KernelRefused("fake", f"refused: {rule.text}")
        for rule in change.insert:
            chains[rule.chain.value].insert(0, rule.text)
        for rule in change.append:
            chains[rule.chain.value].append(rule.text)
        for name in change.remove:
            if chains[name] or any(f"-j {name}" in line for lines in chains.values() for line in lines):
                raise KernelRefused("fake", f"chain {name} is in use")
            del chains[name]


def _delete(line: str, chains: dict[str, list[str]]) -> None:
    rules = chains.get(line.split(" ", 2)[1], [])
    for index, rule in enumerate(rules):
        if meaning_of(rule) == meaning_of(line):
            del rules[index]
            return
    raise KernelRefused("fake", f"no such rule: {line}")
