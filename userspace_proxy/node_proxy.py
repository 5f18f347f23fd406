"""The proxy of a node: the services of a cluster on its listeners, and kernel rules that lead to these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from types import MappingProxyType

from userspace_proxy.core.config import Config
from userspace_proxy.core.config_addresses import NodeAddresses, node_port_networks
from userspace_proxy.core.health import ProxyHealth
from userspace_proxy.core.model import IPFamily, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import Listening
from userspace_proxy.core.portals import WILDCARD, NodeFacts, Nodes, listen_addresses, proxy_ports
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.metrics import Metrics
from userspace_proxy.node.addresses import local_addresses
from userspace_proxy.proxy import Proxy
from userspace_proxy.redirect.keeper import RuleKeeper, SyncReport
from userspace_proxy.sources.pace import RateLimit

_BURST = 2


def data_plane_settings(config: Config) -> DataPlaneSettings:
    """Return the settings of the data path that a configuration asks for."""
    own = config.document.userspace_proxy
    return DataPlaneSettings(
        udp_idle_timeout_s=config.document.udp_idle_timeout,
        max_sessions=own.max_udp_sessions or None,
        dial_ladder_s=own.dial_ladder,
        half_close_timeout_s=own.half_close_timeout,
        cross_family=False,
        proxy_ports=config.proxy_ports,
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

    Nothing is touched before the first snapshot. The rules stay when it is left.
    """

    def __init__(
        self, config: Config, node: NodeAddresses, keeper: RuleKeeper, health: ProxyHealth, metrics: Metrics
    ) -> None:
        self._config = config
        self._node = node
        self._keeper = keeper
        self._health = health
        self._metrics = metrics
        self._proxy = Proxy(data_plane_settings(config), redirect=self._redirect)
        self._nodes: Nodes = {}
        self._wanted: Snapshot | None = None
        self._placed: dict[ServicePortName, tuple[ServicePort, ServicePort]] = {}
        self._placed_for: Nodes = {}
        self._is_due = asyncio.Event()
        self._report = SyncReport()

    async def run(self) -> None:
        """Sync until cancelled."""
        min_sync_period_s = self._config.document.iptables.min_sync_period
        pace = RateLimit(1.0 / min_sync_period_s if min_sync_period_s else 0.0, _BURST)
        async with self._proxy, asyncio.TaskGroup() as tasks:
            self._metrics.read_counters = self._proxy.live_counters
            keeping: asyncio.Task[None] | None = None
            while True:
                await pace.wait()  # before the change comes, so that it is applied at once when it does
                await self._wait_until_due(self._config.document.iptables.sync_period)
                if self._wanted is not None:
                    await self._sync(self._wanted)
                    keeping = keeping or tasks.create_task(self._keeper.run(self._config.document.iptables.sync_period))

    def want(self, snapshot: Snapshot) -> None:
        """Bring everything to this snapshot soon."""
        now = time.monotonic()
        for family in self._nodes or (self._node.primary_family,):
            self._health.queued(family, now=now)
        self._count_changes(self._wanted or Snapshot(), snapshot)
        self._metrics.kube_proxy.sync_proxy_rules_last_queued_timestamp_seconds.set(time.time())
        self._wanted = snapshot
        self._is_due.set()

    def reconfigure(self, config: Config) -> None:
        """Use what can change while it runs: time-outs and limits of the data path, periods, node port addresses."""
        self._config = config
        self._proxy.reconfigure(data_plane_settings(config))
        self._is_due.set()

    async def _wait_until_due(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._is_due.wait()
        except TimeoutError:
            pass
        self._is_due.clear()

    async def _sync(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        local = [each.address for each in await local_addresses() if not each.is_link_local]
        self._nodes = node_facts(self._config, self._node, local)
        await self._proxy.apply(self._place(snapshot), quiet=False)
        now = time.monotonic()
        for family in self._nodes:
            if family not in self._report.failures:
                self._health.updated(family, now=now)
        if self._report.failures:
            self._metrics.kube_proxy.sync_proxy_rules_iptables_restore_failures_total.inc(len(self._report.failures))
        else:
            self._metrics.kube_proxy.synced(now - began, wall_now=time.time())

    async def _redirect(self, snapshot: Snapshot, bound: Mapping[Listening, ListenAddress]) -> None:
        self._report = await self._keeper.apply(snapshot.service_ports.values(), proxy_ports(bound), self._nodes)

    def _place(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with listen addresses; what has not changed stays the same object."""
        known = self._placed if self._placed_for == self._nodes else {}
        self._placed, self._placed_for = {}, self._nodes
        for name, service_port in snapshot.service_ports.items():
            entry = known.get(name)
            if entry is None or entry[0] is not service_port:
                entry = service_port, replace(service_port, listen=listen_addresses(service_port, self._nodes))
            self._placed[name] = entry
        return Snapshot(MappingProxyType({name: placed for name, (_, placed) in self._placed.items()}))

    def _count_changes(self, before: Snapshot, after: Snapshot) -> None:
        endpoints = services = 0
        for name in before.service_ports.keys() | after.service_ports.keys():
            old, new = before.service_ports.get(name), after.service_ports.get(name)
            if old is new:
                continue
            endpoints += old is None or new is None or old.endpoints != new.endpoints
            services += old is None or new is None or replace(old, endpoints=new.endpoints) != new
        self._metrics.kube_proxy.sync_proxy_rules_endpoint_changes_total.inc(endpoints)
        self._metrics.kube_proxy.sync_proxy_rules_service_changes_total.inc(services)
