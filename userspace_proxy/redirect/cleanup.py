"""Removes what this program or kube-proxy left in the tables, and nothing else.

Owned are the chains of the userspace mode and of kube-proxy's iptables mode. A chain of the iptables mode that a
foreign chain still jumps to is kept, with all that it jumps to in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect.backend import Backend
from userspace_proxy.redirect.libiptc import LibiptcBackend, is_installed
from userspace_proxy.redirect.programs import Variant, find_programs, legacy_tables
from userspace_proxy.redirect.restore import RestoreBackend
from userspace_proxy.redirect.tables import OWN_CHAIN_NAMES, Chains, TableChange, Tables, target_of

Owns = Callable[[str, str], bool]
"""Says whether a chain is ours to remove, by table and name."""

BUILT_IN_CHAINS = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})
_IPTABLES_MODE = frozenset(
    {
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-POSTROUTING",
        "KUBE-MARK-MASQ",
        "KUBE-MARK-DROP",
        "KUBE-FORWARD",
        "KUBE-PROXY-FIREWALL",
        "KUBE-PROXY-CANARY",
    }
)
_LEGACY_WAYS = ("legacy", "libiptc")
_IPTABLES_MODE_NAT = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-", "KUBE-XLB-")


def of_iptables_mode(table: str, chain: str) -> bool:
    """Return whether a chain is one of kube-proxy's iptables mode."""
    return chain in _IPTABLES_MODE or (table == "nat" and chain.startswith(_IPTABLES_MODE_NAT))


def of_userspace_mode(table: str, chain: str) -> bool:
    """Return whether a chain is one of ours."""
    return chain in OWN_CHAIN_NAMES


def of_any_mode(table: str, chain: str) -> bool:
    """Return whether a chain is one of the userspace or the iptables mode."""
    return of_userspace_mode(table, chain) or of_iptables_mode(table, chain)


def removal(table: str, chains: Chains, owns: Owns) -> TableChange:
    """Return the change that removes the owned chains of a table and the jumps to them."""
    jumps = {name: [(line, target_of(line)) for line in lines if "KUBE-" in line] for name, lines in chains.items()}
    owned = {name for name in chains if owns(table, name)}
    kept = _kept(owned, jumps)
    leading_in = [
        line for name, lines in jumps.items() if name in BUILT_IN_CHAINS for line, target in lines if target in owned
    ]
    going = tuple(sorted(owned - kept))
    return TableChange(table, declare=going, delete=tuple(leading_in), remove=going)


def removals(tables: Tables, owns: Owns) -> list[TableChange]:
    """Return the changes that remove the owned chains of all tables."""
    return [change for name, chains in tables.items() if (change := removal(name, chains, owns))]


def _kept(owned: set[str], jumps: dict[str, list[tuple[str, str]]]) -> set[str]:
    foreign = [lines for name, lines in jumps.items() if name not in owned and name not in BUILT_IN_CHAINS]
    waiting = [target for lines in foreign for _, target in lines if target in owned]
    kept: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            waiting += [target for _, target in jumps[name] if target in owned]
    return kept


@dataclass(frozen=True, slots=True)
class CleanUpResult:
    """What a clean-up removed, as `variant family table chain`, and what went wrong."""

    removed: tuple[str, ...] = ()
    errors: tuple[RedirectFailed, ...] = ()


async def clean_up(families: Iterable[IPFamily] = tuple(IPFamily), owns: Owns = of_any_mode) -> CleanUpResult:
    """Remove the rules of both modes, in each variant that this host has. A second call finds nothing to do.

    Needs no API server. Never raises: an error in one place does not stop the others, and is in the result.
    """
    ways: list[Backend] = []
    unreached: list[RedirectFailed] = []
    for family in families:
        ways += (found := await _ways_in(family))
        if legacy_tables(family) and not any(way.name in _LEGACY_WAYS for way in found):
            unreached.append(RedirectFailed(f"{family.name} legacy tables", "nothing here reaches them"))
    result = await remove(ways, owns)
    return CleanUpResult(result.removed, (*unreached, *result.errors))


async def remove(backends: Iterable[Backend], owns: Owns) -> CleanUpResult:
    """Remove owned chains through these backends, which are closed afterwards. Never raises RedirectFailed."""
    removed: list[str] = []
    errors: list[RedirectFailed] = []
    for backend in backends:
        try:
            removed += await _remove(backend, owns)
        except RedirectFailed as error:
            errors.append(error)
        finally:
            await backend.close()
    return CleanUpResult(tuple(removed), tuple(errors))


async def _remove(backend: Backend, owns: Owns) -> list[str]:
    changes = removals(await backend.read(), owns)
    if changes:
        await backend.write(changes)
    return [
        f"{backend.name} {backend.family.name} {change.table} {chain}" for change in changes for chain in change.remove
    ]


async def _ways_in(family: IPFamily) -> list[Backend]:
    """Return a backend for each variant. The legacy tables are left alone where there are none."""
    found = await find_programs(family)
    ways: list[Backend] = [
        RestoreBackend(programs)
        for variant, programs in found.items()
        if variant is Variant.NFT or legacy_tables(family)
    ]
    if Variant.LEGACY not in found and legacy_tables(family) and is_installed():
        ways.append(LibiptcBackend(family))
    return ways


async def other_ways_in(family: IPFamily, name: str) -> list[Backend]:
    """Return backends for the variants other than the one that a backend of this name writes to."""
    used = _LEGACY_WAYS if name in _LEGACY_WAYS else (name,)
    ways = await _ways_in(family)
    for way in ways:
        if way.name in used:
            await way.close()
    return [way for way in ways if way.name not in used]
