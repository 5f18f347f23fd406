"""Keeps the kernel's rules equal to what is wanted, in all address families: programs, watches, repairs, reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily, ServicePort, ServicePortName
from userspace_proxy.core.portals import NodeFacts, ProxyPorts, proxy_port_keys
from userspace_proxy.core.rule import Rule, Table
from userspace_proxy.core.rules import RuleSet, Style, render, rule_set, rules_of
from userspace_proxy.garbage import collections_put_off
from userspace_proxy.redirect.cleanup import Owns, of_any_mode, of_userspace_mode, other_ways_in, remove
from userspace_proxy.redirect.conntrack import Conntrack, UdpFlows, flows_of
from userspace_proxy.redirect.redirector import Outcome, Redirector
from userspace_proxy.redirect.watch import Watch

SHORTEST_PAUSE_S = 0.5
PAUSE_PER_CHECK = 10.0
_WORK_AT_ONCE, _COST_OF_RENDERING = 500, 10  # in service ports that did not change: about a millisecond

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How a sync went. `failures` are families without new rules; `refused` are service ports without rules.

    `rule_counts` are the rules that are wanted in each table, of all families together.
    A family that this node has no address of, as where the kernel lacks IPv6, is no failure.
    """

    failures: Mapping[IPFamily, RedirectFailed] = field(default_factory=lambda: MappingProxyType({}))
    refused: Mapping[tuple[ServicePortName, IPFamily], str] = field(default_factory=lambda: MappingProxyType({}))
    was_written: bool = False
    rule_counts: Mapping[Table, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_complete(self) -> bool:
        return not self.failures and not self.refused


_Rendered = tuple[ServicePort, tuple[int | None, ...], tuple[Rule, ...]]


class Rendering:
    """The rules of one family, rendered anew only for service ports that changed. `counts` has how many, by table."""

    def __init__(self, style: Style) -> None:
        self.counts: Counter[Table] = Counter()
        self._style = style
        self._node: NodeFacts | None = None
        self._known: dict[ServicePortName, _Rendered] = {}

    async def rules(self, service_ports: Iterable[ServicePort], ports: ProxyPorts, node: NodeFacts) -> RuleSet:
        """Return the rules of these service ports. Lets others have the event loop between portions."""
        if node != self._node:
            self._node, self._known = node, {}
            self.counts.clear()
        known, self._known = self._known, {}
        work = 0
        for service_port in service_ports:
            name = service_port.name
            numbers = tuple(ports.get(key) for key in proxy_port_keys(service_port, node.family))
            entry = known.get(name)
            work += 1
            if entry is None or entry[1] != numbers or (entry[0] is not service_port and entry[0] != service_port):
                self._uncount(entry)
                entry = (service_port, numbers, rules_of(service_port, ports, node, self._style))
                self.counts.update(rule.chain.table for rule in entry[2])
                work += _COST_OF_RENDERING
            self._known[name] = entry
            if work > _WORK_AT_ONCE:
                work = 0
                await asyncio.sleep(0)
        for name in known.keys() - self._known.keys():
            self._uncount(known[name])
        return rule_set(node.family, ((known_port, rules) for known_port, _, rules in self._known.values()))

    def _uncount(self, entry: _Rendered | None) -> None:
        if entry is not None:
            self.counts.subtract(rule.chain.table for rule in entry[2])

    def clear(self) -> None:
        """Forget all rules: this family is not served."""
        self._node, self._known = None, {}
        self.counts.clear()


class RuleKeeper:
    """The kernel rules of this node.

    Nothing is touched before the first `apply`. After the first that succeeds in a family, `leftovers` are removed:
    chains of other modes, and in other variants ours, too. Rules stay when it is closed, unless `withdraw` is called.
    """

    def __init__(
        self,
        redirectors: Iterable[Redirector],
        *,
        style: Style = Style.FAITHFUL,
        conntrack: Conntrack | None = None,
        leftovers: Owns | None = of_any_mode,
    ) -> None:
        self._redirectors = {redirector.family: redirector for redirector in redirectors}
        self._renderings = {family: Rendering(style) for family in self._redirectors}
        self._conntrack = conntrack
        self._style = style
        self._leftovers = leftovers
        self._with_leftovers = set(self._redirectors) if leftovers else set[IPFamily]()
        self._stale_flows = {family: set[UdpFlows]() for family in self._redirectors}
        self._waking_flows: dict[IPFamily, set[UdpFlows]] = {}
        self._last_failures: dict[IPFamily, str] = {}
        self._turn = asyncio.Lock()
        self._nodes: Mapping[IPFamily, NodeFacts] = {}
        self._warned: set[str] = set()
        self._watch = Watch(self._redirectors.values())
        if conntrack is None:
            self._warn_once(
                "neither the conntrack program nor pyroute2 is installed: UDP clients may be stuck for 30 s"
            )

    async def apply(
        self,
        service_ports: Collection[ServicePort],
        ports: ProxyPorts,
        nodes: Mapping[IPFamily, NodeFacts],
        *,
        waking: Collection[ServicePort] = (),
    ) -> SyncReport:
        """Lead traffic to these proxy ports. A family without node facts gets no rules of ours.

        Those `waking` have no rules any more, but their UDP flows go on until they are waking no more.
        Failures are logged and in the report; `run` tries again. Never raises RedirectFailed.
        """

        async def replace(redirector: Redirector) -> Outcome:
            family = redirector.family
            if family not in nodes:
                self._renderings[family].clear()
                return await redirector.replace(RuleSet(family))
            rules = await self._renderings[family].rules(service_ports, ports, nodes[family])
            for name in rules.unenforced:
                self._warn_once(f"{name}: loadBalancerSourceRanges has no effect here: no load-balancer IP is known")
            return await redirector.replace(rules)

        async with self._turn:
            self._nodes = nodes
            self._waking_flows = {
                family: flows_of(
                    (rule.text for rule in render(waking, ports, node, self._style)), family, node.local_addresses
                )
                for family, node in nodes.items()
                if waking
            }
            with collections_put_off():
                return await self._sync(replace)

    async def check(self) -> SyncReport:
        """Put right what others changed and try again what failed. Never raises RedirectFailed."""
        async with self._turn:
            with collections_put_off():
                return await self._sync(Redirector.repair)

    async def withdraw(self) -> SyncReport:
        """Remove all rules and chains of ours, for good unless `run` goes on. Never raises RedirectFailed."""
        async with self._turn:
            self._waking_flows = {}
            return await self._sync(Redirector.withdraw)

    @property
    def backend_names(self) -> frozenset[str]:
        """The ways into the kernel that are in use."""
        return frozenset(redirector.backend_name for redirector in self._redirectors.values())

    async def run(self, sync_period_s: Callable[[], float] = lambda: 30.0) -> None:
        """Check whenever somebody else changed rules, and at least every `sync_period_s` seconds, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(sync_period_s()):
                    await self._watch.changed()
            began = loop.time()
            if (await self.check()).was_written:
                _log.warning("another program had changed our kernel rules; they are right again")
            # Others may change rules of their own many times a second: looking costs at most a tenth of the time.
            await asyncio.sleep(max(SHORTEST_PAUSE_S, PAUSE_PER_CHECK * (loop.time() - began)))

    async def close(self) -> None:
        """Give back sockets and processes. The rules stay."""
        self._watch.close()
        for redirector in self._redirectors.values():
            await redirector.close()

    async def _sync(self, step: Callable[[Redirector], Awaitable[Outcome]]) -> SyncReport:
        failures: dict[IPFamily, RedirectFailed] = {}
        refused: dict[tuple[ServicePortName, IPFamily], str] = {}
        was_written = False
        for family, redirector in self._redirectors.items():
            try:
                outcome = await step(redirector)
            except RedirectFailed as error:
                failures[family] = error
                if self._last_failures.get(family) != str(error):
                    _log.error("%s rules could not be programmed: %s; trying again", family.name, error)
                continue
            was_written |= outcome.was_written
            refused |= {(name, family): reason for name, reason in outcome.refused.items()}
            self._warn(outcome, family)
            await self._forget_flows(outcome, family)
        self._last_failures = {family: str(error) for family, error in failures.items()}
        for family in sorted(self._with_leftovers - failures.keys()):
            await self._remove_leftovers(family)
        served = {family: error for family, error in failures.items() if family in self._nodes}
        counts = {table: sum(each.counts[table] for each in self._renderings.values()) for table in Table}
        return SyncReport(served, refused, was_written, MappingProxyType(counts))

    def _warn(self, outcome: Outcome, family: IPFamily) -> None:
        for match in sorted(outcome.lacking):
            self._warn_once(f"this kernel has no {match} match for {family.name}: rules that need it are left out")
        for name, reason in outcome.refused.items():
            self._warn_once(f"{name}: its rules were refused: {reason}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    async def _forget_flows(self, outcome: Outcome, family: IPFamily) -> None:
        """Make UDP clients find the rules that stand now; those of what is waking, once that is over."""
        stale = self._stale_flows[family]
        if outcome.was_written:
            node = self._nodes.get(family)
            local = node.local_addresses if node else ()
            stale |= flows_of((*outcome.added, *outcome.removed), family, local)
        due = stale - self._waking_flows.get(family, set())
        stale -= due
        if self._conntrack is None or not due:
            return
        try:
            await self._conntrack.forget(due)
        except RedirectFailed as error:
            self._warn_once(f"UDP flows could not be deleted: {error}")

    async def _remove_leftovers(self, family: IPFamily) -> None:
        """Remove what others left beside ours, and in other variants ours, too. Tried until it succeeds."""
        owns = self._leftovers
        assert owns is not None
        redirector = self._redirectors[family]
        elsewhere = await remove(await other_ways_in(family, redirector.backend_name), owns)
        removed, errors = [*elsewhere.removed], [*elsewhere.errors]
        try:
            removed += await redirector.remove(
                lambda table, chain: owns(table, chain) and not of_userspace_mode(table, chain)
            )
        except RedirectFailed as error:
            errors.append(error)
        for failure in errors:
            self._warn_once(f"what another mode left could not be removed: {failure}")
        if removed:
            _log.info("removed %d %s chains that another mode or variant had left", len(removed), family.name)
        if not errors:
            self._with_leftovers.discard(family)
