"""The proxy of a node: the services of a cluster on its listeners, and kernel rules that lead to these."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from itertools import zip_longest
from types import MappingProxyType

from userspace_proxy.core.config import Config
from userspace_proxy.core.config_addresses import NodeAddresses, node_port_networks
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.health import ProxyHealth
from userspace_proxy.core.hybrid import Ownership
from userspace_proxy.core.model import WILDCARD, IPFamily, ListenAddress, Scope, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import Listening
from userspace_proxy.core.portals import NodeFacts, Nodes, listen_addresses, proxy_ports
from userspace_proxy.dataplane.interface import MakeDataPath
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.garbage import keep_out_of_collections
from userspace_proxy.metrics import Metrics
from userspace_proxy.node.addresses import local_addresses
from userspace_proxy.node.limits import usable_cpus
from userspace_proxy.proxy import Proxy, in_this_process
from userspace_proxy.reconciler import Failures
from userspace_proxy.redirect.keeper import RuleKeeper, SyncReport
from userspace_proxy.sources.pace import RateLimit

OnNodePortFailure = Callable[[ServicePortName, ListenFailed], None]

_BURST = 2
_RETRY_S = 5.0

_log = logging.getLogger(__name__)


def data_plane_settings(config: Config) -> DataPlaneSettings:
    """Return the settings of the data path that a configuration asks for."""
    own = config.document.userspace_proxy
    return DataPlaneSettings(
        udp_idle_timeout_s=config.document.udp_idle_timeout,
        max_sessions=own.max_udp_sessions or None,
        dial_ladder_s=own.dial_ladder,
        half_close_timeout_s=own.half_close_timeout,
        tcp_idle_timeout_s=own.tcp_idle_timeout,
        tcp_user_timeout_s=own.tcp_user_timeout,
        max_connections=own.max_connections,
        max_connections_per_service_port=own.max_connections_per_service_port,
        listen_backlog=own.listen_backlog,
        unidling=own.unidling != "off",
        hold_timeout_s=own.unidling_hold_timeout,
        max_held=own.unidling_max_connections,
        cross_family=False,
        proxy_ports=config.proxy_ports,
        workers=usable_cpus() if own.workers == "auto" else own.workers,
    )


def node_facts(config: Config, node: NodeAddresses, local: Sequence[str]) -> Nodes:
    """Return this node as each of its address families sees it. A family without an address of the node is none."""
    document = config.document
    networks = node_port_networks(config, node)
    is_specific = not ip_address(document.bind_address).is_unspecified
    return {
        family: NodeFacts(
            node_ip=node.by_family[family],
            bind_address=document.bind_address if is_specific and family is node.primary_family else WILDCARD[family],
            node_port_networks=networks[family],
            local_addresses=frozenset(local),
        )
        for family in served_families(node)
    }


def served_families(node: NodeAddresses) -> tuple[IPFamily, ...]:
    """Return the address families that are served: the primary one, and the other where the node has an address."""
    return tuple(
        family
        for family, address in node.by_family.items()
        if family is node.primary_family or not ip_address(address).is_loopback
    )


class NodeProxy:
    """Brings listeners and rules to the latest snapshot, at most every `minSyncPeriod` and at least every `syncPeriod`.

    A service that wakes does not wait for `minSyncPeriod`, as its clients have waited. Nothing is touched before the
    first snapshot. The rules stay when it is left. In hybrid mode all this is about those service ports alone that are
    idled or waking.
    """

    def __init__(
        self,
        config: Config,
        node: NodeAddresses,
        keeper: RuleKeeper,
        health: ProxyHealth,
        metrics: Metrics,
        on_node_port_failure: OnNodePortFailure = lambda name, failure: None,
        needs_pods: Callable[[ServicePortName], None] = lambda name: None,
        *,
        make_data_path: MakeDataPath = in_this_process,
    ) -> None:
        self._config = config
        self._node = node
        self._keeper = keeper
        self._health = health
        self._metrics = metrics
        self._on_node_port_failure = on_node_port_failure
        self._proxy = Proxy(
            data_plane_settings(config),
            needs_pods=needs_pods,
            redirect=self._redirect,
            on_failures=self._note_failures,
            data_path=make_data_path,
        )
        self._pace = self._new_pace()
        self._nodes: Nodes = {}
        self._ownership = Ownership() if config.is_hybrid else None
        self._wanted: Snapshot | None = None
        self._wanted_at = 0.0
        self._placed: dict[ServicePortName, tuple[ServicePort, ServicePort]] = {}
        self._placed_for: Nodes = {}
        self._failing: frozenset[ServicePortName] = frozenset()
        self._is_due = asyncio.Event()
        self._has_woken = asyncio.Event()
        self._report = SyncReport()
        self._has_applied = False
        self._triggered_at: list[float] = []

    async def run(self) -> None:
        """Sync until cancelled."""
        async with self._proxy, asyncio.TaskGroup() as tasks:
            self._metrics.read_counters = self._proxy.live_counters
            keeping: asyncio.Task[None] | None = None
            while True:
                await self._pace.wait()  # before the change comes, so that it is applied at once when it does
                await self._wait_until_due(self._pause_s())
                if self._wanted is None:
                    continue
                await self._try_sync(self._wanted)
                if keeping is None and self._has_applied:
                    keep_out_of_collections()
                    keeping = tasks.create_task(self._keeper.run(self._sync_period_s))

    def want(self, snapshot: Snapshot, triggered_at: Iterable[float] = ()) -> None:
        """Bring everything to this snapshot soon. `triggered_at` is when pods changed, in seconds since the epoch."""
        self._triggered_at += triggered_at
        self._wanted_at = now = time.monotonic()
        for family in self._nodes or (self._node.primary_family,):
            self._health.queued(family, now=now)
        self._note_changes(self._wanted or Snapshot(), snapshot)
        self._metrics.kube_proxy.sync_proxy_rules_last_queued_timestamp_seconds.set(time.time())
        self._wanted = snapshot
        self._is_due.set()

    def reconfigure(self, config: Config) -> None:
        """Use what can change while it runs: time-outs and limits of the data path, periods, node port addresses."""
        self._config = config
        self._pace = self._new_pace()
        self._health.reconfigure(self._sync_period_s())
        self._proxy.reconfigure(data_plane_settings(config))
        self._is_due.set()

    def _sync_period_s(self) -> float:
        return self._config.document.iptables.sync_period

    def _pause_s(self) -> float:
        """Return how long nothing has to be done by itself."""
        if self._ownership is None:
            return self._sync_period_s()
        return min(self._sync_period_s(), self._ownership.changes_at - time.monotonic())

    def _new_pace(self) -> RateLimit:
        min_sync_period_s = self._config.document.iptables.min_sync_period
        return RateLimit(1.0 / min_sync_period_s if min_sync_period_s else 0.0, _BURST, sleep=self._rest)

    async def _rest(self, rest_s: float) -> None:
        """Let time pass between syncs, unless a service wakes."""
        if await _is_set_within(rest_s, self._has_woken):
            self._pace = self._new_pace()  # so that what comes next does not rest for longer

    async def _wait_until_due(self, at_most_s: float) -> None:
        await _is_set_within(at_most_s, self._is_due)
        self._is_due.clear()
        self._has_woken.clear()

    async def _try_sync(self, snapshot: Snapshot) -> None:
        """Sync. Whatever goes wrong is counted, and tried again soon."""
        try:
            await self._sync(snapshot)
            if not self._report.failures:
                return
        except Exception:
            _log.exception("a sync has failed; trying again")
        self._metrics.failures.sync_errors_total.inc()
        asyncio.get_running_loop().call_later(_RETRY_S, self._is_due.set)

    async def _sync(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        triggered_at, self._triggered_at = self._triggered_at, []
        local = [each.address for each in await local_addresses() if not each.is_link_local]
        self._nodes = node_facts(self._config, self._node, local)
        placed = self._place(self._owned(snapshot))
        await asyncio.sleep(0)  # with thousands of services each step takes milliseconds: let others have a turn
        await self._proxy.apply(placed)
        self._note_sync(snapshot, began, triggered_at)

    def _note_sync(self, snapshot: Snapshot, began: float, triggered_at: list[float]) -> None:
        now, wall_now, counted = time.monotonic(), time.time(), self._metrics.kube_proxy
        is_latest = snapshot is self._wanted
        for family in self._nodes.keys() - self._report.failures.keys():
            self._health.updated(family, now=now)
            if not is_latest:
                self._health.queued(family, now=self._wanted_at)
        if is_latest:
            counted.nothing_pending()
        if self._report.failures:
            self._triggered_at += triggered_at
            counted.sync_proxy_rules_iptables_restore_failures_total.inc(len(self._report.failures))
            return
        counted.synced(now - began, wall_now=wall_now)
        for moment in triggered_at:
            counted.network_programming_duration_seconds.observe(max(0.0, wall_now - moment))

    def _owned(self, snapshot: Snapshot) -> Snapshot:
        """Return what is served here: everything, or in hybrid mode what this proxy owns."""
        if self._ownership is None:
            return snapshot
        self._ownership = self._ownership.after(snapshot, now=time.monotonic())
        return self._ownership.served(snapshot)

    async def _redirect(self, snapshot: Snapshot, bound: Mapping[Listening, ListenAddress]) -> None:
        led: Collection[ServicePort] = snapshot.service_ports.values()
        waking: Collection[ServicePort] = ()
        if self._ownership is not None:
            waking = [each for each in led if each.name in self._ownership.waking]
            led = [each for each in led if each.name in self._ownership.idled]
        self._report = await self._keeper.apply(led, proxy_ports(bound), self._nodes, waking=waking)
        self._has_applied = True  # before, the keeper would take an empty set of rules for what is wanted
        self._metrics.failures.fail_now("rules", {name for name, _ in self._report.refused})
        for table, count in self._report.rule_counts.items():
            self._metrics.kube_proxy.programmed(table.value, count)

    def _note_failures(self, failures: Failures) -> None:
        """Count what cannot be listened on, and tell of node ports that another program has."""
        self._metrics.failures.fail_now("listen", failures.keys())
        fresh, self._failing = failures.keys() - self._failing, frozenset(failures)
        for name in fresh:
            wanted = self._placed.get(name)
            for failure in failures[name] if wanted else ():
                if wanted and wanted[0].node_port and failure.address.endswith(f":{wanted[0].node_port}"):
                    self._on_node_port_failure(name, failure)
                    break

    def _place(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with listen addresses; what has not changed stays the same object."""
        known = self._placed if self._placed_for == self._nodes else {}
        holds_ports = self._ownership is None  # else the other proxy may hold them
        self._placed, self._placed_for = {}, self._nodes
        for name, service_port in snapshot.service_ports.items():
            entry = known.get(name)
            if entry is None or entry[0] is not service_port:
                listen = listen_addresses(service_port, self._nodes, holds_ports=holds_ports)
                entry = service_port, replace(service_port, listen=listen)
            self._placed[name] = entry
        return Snapshot(MappingProxyType({name: placed for name, (_, placed) in self._placed.items()}))

    def _note_changes(self, before: Snapshot, after: Snapshot) -> None:
        """Count what has changed, and see to it that nobody waits for longer at a service that wakes."""
        endpoints = services = 0
        for old, new in _changed(before, after):
            if old is not None and new is not None and old.is_idled and not new.is_idled:
                self._has_woken.set()
            endpoints += old is None or new is None or old.endpoints != new.endpoints
            services += old is None or new is None or replace(old, endpoints=new.endpoints) != new
        self._metrics.kube_proxy.changed(services=services, endpoints=endpoints)
        local = [each for each in after.service_ports.values() if each.local_scopes]
        for scope in Scope:
            lacking = {each.name.service_name for each in local if each.lacks_local_endpoints(scope)}
            self._metrics.kube_proxy.sync_proxy_rules_no_local_endpoints_total.labels(scope.value).set(len(lacking))


def _changed(before: Snapshot, after: Snapshot) -> Iterator[tuple[ServicePort | None, ServicePort | None]]:
    """Yield what each service port that differs was and is."""
    old, new = before.service_ports, after.service_ports
    # What did not change is mostly the same object at the same place, which is far cheaper to see than to look up.
    pairs = [pair for pair in zip_longest(old.values(), new.values()) if pair[0] is not pair[1]]
    names = dict.fromkeys(each.name for pair in pairs for each in pair if each is not None)
    for name in names:
        was, is_now = old.get(name), new.get(name)
        if was is not is_now:
            yield was, is_now


async def _is_set_within(timeout_s: float, event: asyncio.Event) -> bool:
    """Wait for the event, at most so long. Return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
