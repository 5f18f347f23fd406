"""Makes the tables of one family hold the rules that are wanted, whatever the way into the kernel.

A backend is the mechanism, this is the policy: small changes as they are, everything anew after an error or a large
change, nothing written where nothing differs, and no service that suffers from another's rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from userspace_proxy.core.errors import KernelRefused, RedirectFailed, RuleNotUnderstood
from userspace_proxy.core.model import IPFamily, ServicePortName
from userspace_proxy.core.rule import OWN_CHAINS, Chain, Rule, Table
from userspace_proxy.core.rules import USUAL_JUMPS, Jumps, RuleSet
from userspace_proxy.redirect.backend import Backend
from userspace_proxy.redirect.cleanup import Owns, of_userspace_mode, removals
from userspace_proxy.redirect.tables import (
    Difference,
    TableChange,
    Tables,
    Wanted,
    compare_chain,
    compare_jumps,
    small_block,
    whole_block,
)

MAX_DELETED_ONE_BY_ONE = 100
MAX_ADDED_ONE_BY_ONE = 2000
MAX_NOT_UNDERSTOOD = 50
_OPTIONAL_MATCHES = ("physdev", "addrtype", "state", "conntrack")

_Rules = dict[ServicePortName, tuple[Rule, ...]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sync did to the rules in chains of ours, as text, and whom it could not serve.

    `refused` gives the reason by service port. `lacking` are kernel matches that the rules do without.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: Mapping[ServicePortName, str] = field(default_factory=lambda: MappingProxyType({}))
    lacking: frozenset[str] = frozenset()
    was_written: bool = False


class Redirector:
    """Keeps the rules of one address family.

    Its methods may be called at any time; they run one after another. Redirectors that write to the same kernel share
    one `turn`, as each would else take what another is just writing for the work of a stranger.
    """

    def __init__(self, backend: Backend, turn: asyncio.Lock | None = None, *, jumps: Jumps = USUAL_JUMPS) -> None:
        self._backend = backend
        self._turn = turn or asyncio.Lock()
        self._jumps = jumps
        self._desired = RuleSet(backend.family)
        self._installed: _Rules | None = None
        self._refused: dict[ServicePortName, tuple[tuple[Rule, ...], str]] = {}
        self._lacking: frozenset[str] = frozenset()
        self._fingerprint: int | None = None

    @property
    def family(self) -> IPFamily:
        return self._backend.family

    @property
    def backend_name(self) -> str:
        return self._backend.name

    async def replace(self, desired: RuleSet) -> Outcome:
        """Make these the rules of ours in the kernel. Raises RedirectFailed when no rule could be written at all."""
        async with self._turn:
            self._desired = desired
            self._refused = {
                name: refusal for name, refusal in self._refused.items() if desired.rules.get(name) == refusal[0]
            }
            if self._installed is None or self._seems_changed():
                return await self._converge()
            found = self._changes_since(self._installed)
            if len(found.surplus) > MAX_DELETED_ONE_BY_ONE or len(found.missing) > MAX_ADDED_ONE_BY_ONE:
                return await self._converge()
            if not found:
                return self._outcome(found, was_written=False)
            try:
                await self._write(_by_table(found))
            except (KernelRefused, RuleNotUnderstood):
                return await self._converge()
            self._installed = self._writable()
            return self._outcome(found, was_written=True)

    async def repair(self) -> Outcome:
        """Put right what others have changed, and try again what was refused. Raises RedirectFailed as `replace`."""
        async with self._turn:
            outcome = await self._converge()
            if self._refused:
                again, self._refused = list(self._refused), {}
                await self._install(again)
                await self._remove_rest()
                self._installed = self._writable()
            return Outcome(outcome.added, outcome.removed, self._reasons(), self._lacking, outcome.was_written)

    async def remove(self, owns: Owns) -> tuple[str, ...]:
        """Remove chains that others left in these tables, and return their names. Raises RedirectFailed."""
        async with self._turn:
            changes = removals(await self._backend.read(), owns)
            await self._write(changes)
            return tuple(chain for change in changes for chain in change.remove)

    async def withdraw(self) -> Outcome:
        """Remove all chains of ours and the jumps to them. `replace` makes them anew. Raises RedirectFailed."""
        async with self._turn:
            self._installed = None
            tables = await self._backend.read()
            changes = removals(tables, of_userspace_mode)
            await self._write(changes)
            ours = (tables[change.table][chain] for change in changes for chain in change.remove)
            return Outcome(removed=tuple(line for lines in ours for line in lines), was_written=bool(changes))

    async def has_changed(self) -> bool:
        """Return whether somebody else has written since, as far as that can be told for a few microseconds."""
        async with self._turn:
            return self._installed is not None and self._seems_changed()

    async def close(self) -> None:
        """Give back what the backend holds. The rules stay, so that a restart is short."""
        await self._backend.close()

    def _seems_changed(self) -> bool:
        now = self._backend.fingerprint()
        return now is not None and now != self._fingerprint

    async def _converge(self) -> Outcome:
        """Read what is there and write all of ours anew unless it is right. The state is unknown if this fails."""
        self._installed = None
        first: Difference | None = None
        refusals = not_understood = 0
        while True:
            found = await self._read_and_compare()
            first = first or _sum(found)
            if not any(found.values()):
                break
            try:
                await self._write(self._whole_blocks(found))
                break
            except RuleNotUnderstood as error:
                not_understood += 1
                if not_understood > MAX_NOT_UNDERSTOOD:
                    raise
                self._leave_out(error)
            except KernelRefused:
                refusals += 1
                if refusals == 2:
                    await self._do_without(found)
                    break
        self._installed = self._writable()
        return self._outcome(first, was_written=bool(first))

    async def _do_without(self, found: Mapping[Table, Difference]) -> None:
        """Find out what the kernel refuses, a match or the rules of single services, and install the rest."""
        used = [match for match in _OPTIONAL_MATCHES if any(match in rule.kernel_matches for rule in self._desired)]
        before = self._lacking
        for lacking in (*({match} for match in used), set(used)):
            self._lacking = before | lacking
            try:
                await self._write(self._whole_blocks(await self._read_and_compare()))
                return
            except KernelRefused:
                continue
        self._lacking = before
        found = await self._read_and_compare()
        for difference in found.values():
            difference.missing = []
        await self._write([small_block(table, found[table]) for table in Table])
        await self._install(list(self._writable()))
        await self._remove_rest()

    async def _install(self, names: Collection[ServicePortName]) -> None:
        """Add the missing rules of these service ports; where they are refused, by halves, down to the culprits."""
        found = await self._read_and_compare()
        theirs = {rule.text for name in names for rule in self._desired.rules[name]}
        additions = [
            TableChange(table, append=tuple(rule for rule in found[table].missing if rule.text in theirs))
            for table in Table
        ]
        try:
            await self._write(additions)
        except (KernelRefused, RuleNotUnderstood) as error:
            if len(names) == 1:
                self._refuse(names, error)
                return
            halves = list(names)
            await self._install(halves[: len(halves) // 2])
            await self._install(halves[len(halves) // 2 :])

    async def _remove_rest(self) -> None:
        """Remove what a refused service left in the table that took its rules."""
        found = await self._read_and_compare()
        await self._write([small_block(table, found[table]) for table in Table])

    async def _read_and_compare(self) -> dict[Table, Difference]:
        fingerprint = self._backend.fingerprint()
        tables: Tables = await self._backend.read()
        self._fingerprint = fingerprint
        wanted = self._wanted()
        found = {}
        for table in Table:
            chains, found[table] = tables.get(table.value, {}), Difference()
            for chain in OWN_CHAINS[table]:
                await asyncio.sleep(0)  # with thousands of services this takes milliseconds: let others have a turn
                compare_chain(chains, wanted, chain, found[table])
            compare_jumps(chains, table, self._jumps, self._lacking, found[table])
        return found

    async def _write(self, changes: Iterable[TableChange]) -> None:
        """Write what there is to write, without losing sight of what others write meanwhile."""
        to_write = [change for change in changes if change]
        if not to_write:
            return
        await self._backend.write(to_write)
        if not self._backend.fingerprint_skips_own_writes:
            self._fingerprint = self._backend.fingerprint()

    def _whole_blocks(self, found: Mapping[Table, Difference]) -> list[TableChange]:
        wanted = self._wanted()
        return [whole_block(table, wanted, found[table]) for table in Table if found[table]]

    def _writable(self) -> _Rules:
        """Return the desired rules without those that were refused or that need what the kernel lacks."""
        rules = {name: of_this for name, of_this in self._desired.rules.items() if name not in self._refused}
        if not self._lacking:
            return rules
        return {
            name: tuple(rule for rule in of_this if self._lacking.isdisjoint(rule.kernel_matches))
            for name, of_this in rules.items()
        }

    def _wanted(self) -> Wanted:
        wanted: dict[Chain, dict[str, Rule]] = {chain: {} for chains in OWN_CHAINS.values() for chain in chains}
        for rules in self._writable().values():
            for rule in rules:
                wanted[rule.chain][rule.text] = rule
        return wanted

    def _changes_since(self, installed: _Rules) -> Difference:
        found, wanted = Difference(), self._writable()
        for name, rules in wanted.items():
            before = installed.get(name, ())
            if before is not rules and before != rules:
                found.missing += [rule for rule in rules if rule not in before]
                found.surplus += [rule.text for rule in before if rule not in rules]
        for name in installed.keys() - wanted.keys():
            found.surplus += [rule.text for rule in installed[name]]
        return found

    def _leave_out(self, error: RuleNotUnderstood) -> None:
        """Learn from a rule that was not understood. Raises it again when it is not a service's."""
        for match in _OPTIONAL_MATCHES:
            if f"match `{match}'" in error.stderr or f"match {match}" in error.stderr:
                self._lacking |= {match}
                return
        for name, rules in self._desired.rules.items():
            if any(rule.text == error.line for rule in rules):
                self._refuse([name], error)
                return
        raise error

    def _refuse(self, names: Iterable[ServicePortName], error: RedirectFailed) -> None:
        for name in names:
            self._refused[name] = (self._desired.rules[name], str(error))

    def _reasons(self) -> Mapping[ServicePortName, str]:
        return MappingProxyType({name: reason for name, (_, reason) in self._refused.items()})

    def _outcome(self, found: Difference, *, was_written: bool) -> Outcome:
        added = tuple(rule.text for rule in found.missing)
        return Outcome(added, tuple(found.surplus), self._reasons(), self._lacking, was_written)


def _sum(found: Mapping[Table, Difference]) -> Difference:
    """Return what differs in all tables together."""
    total = Difference()
    for each in found.values():
        total.missing_chains += each.missing_chains
        total.missing += each.missing
        total.surplus += each.surplus
        total.first_jumps += each.first_jumps
        total.last_jumps += each.last_jumps
    return total


def _by_table(found: Difference) -> list[TableChange]:
    """Return changes of rules in chains of ours, table by table."""
    return [
        TableChange(
            table,
            delete=tuple(line for line in found.surplus if line.split(" ", 2)[1] in OWN_CHAINS[table]),
            append=tuple(rule for rule in found.missing if rule.chain.table is table),
        )
        for table in Table
    ]
