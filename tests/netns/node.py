"""The proxy on the node of the topology: the real data path, the real rules, wired as the daemon does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from tests.netns.topology import ADDRESSES, Topology
from userspace_proxy.core.model import WILDCARD, IPFamily, ListenAddress, ServicePort, Snapshot
from userspace_proxy.core.portals import HeldPort, NodeFacts, ProxyPortKey, held_ports
from userspace_proxy.core.rules import Style
from userspace_proxy.proxy import Proxy
from userspace_proxy.redirect import conntrack
from userspace_proxy.redirect.keeper import RuleKeeper, SyncReport
from userspace_proxy.redirect.opening import BackendChoice, open_redirectors

LOCAL = frozenset(
    address
    for of_family in ADDRESSES.values()
    for address in (of_family.node, of_family.second, of_family.bridge, of_family.loopback)
)


class Node:
    """Serves service ports in the node's namespace. Held ports are listened on beside the proxy ports."""

    def __init__(self, topology: Topology, proxy: Proxy, keeper: RuleKeeper, facts: dict[IPFamily, NodeFacts]) -> None:
        self.topology = topology
        self.proxy = proxy
        self.keeper = keeper
        self.facts = facts
        self.ports: dict[ProxyPortKey, int] = {}

    async def serve(self, *service_ports: ServicePort) -> SyncReport:
        """Open listeners first, then program the rules: make before break."""
        listening = [replace(each, listen=self._listen(each)) for each in service_ports]
        failures = await self.proxy.apply(Snapshot.of(*listening))
        assert not failures
        held = {address for each in listening for address in each.listen if address.port}
        self.ports = {
            ProxyPortKey(each.name, address.family): address.port
            for each in listening
            for address in self.proxy.addresses(each.name)
            if address not in held
        }
        return await self.keeper.apply(service_ports, self.ports, self.facts)

    def _listen(self, service_port: ServicePort) -> tuple[ListenAddress, ...]:
        ports: Iterable[HeldPort] = {port for node in self.facts.values() for port in held_ports(service_port, node)}
        proxy_ports = (ListenAddress(WILDCARD[family], 0) for family in self.facts)
        return (*proxy_ports, *(ListenAddress(held.address, held.port) for held in ports))


@asynccontextmanager
async def proxied(
    topology: Topology, choice: BackendChoice, style: Style = Style.FAITHFUL, *, watches: bool = False
) -> AsyncIterator[Node]:
    """Run the proxy. The process must be in the node's namespace."""
    async with AsyncExitStack() as stack:
        opened = await open_redirectors(choice)
        assert not opened.warnings
        keeper = RuleKeeper(opened.redirectors, style=style, conntrack=conntrack.available())
        stack.push_async_callback(keeper.close)
        proxy = await stack.enter_async_context(Proxy())
        facts = {family: NodeFacts(ADDRESSES[family].node, local_addresses=LOCAL) for family in IPFamily}
        if watches:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(tasks.create_task(keeper.run()).cancel)
        yield Node(topology, proxy, keeper, facts)
