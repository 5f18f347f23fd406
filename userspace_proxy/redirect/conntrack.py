"""UDP flows that the kernel remembers by rules that have changed since. They must be forgotten, and no others.

A flow that was seen before its rule existed never gets to the service while its client keeps sending, and one that was
seen by a former rule goes on to a proxy port that is gone.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Protocol

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily, family_of
from userspace_proxy.redirect.programs import run, which

MAX_DELETED_ONE_BY_ONE = 8
_RULE = re.compile(r"-A KUBE-(?:PORTALS|NODEPORT)-(?:HOST|CONTAINER)(?: -s \S+)?(?: -d (\S+))? -p udp .*--dport (\d+) ")
_ENTRY = re.compile(r"^udp .*?\bdst=(\S+) .*?\bdport=(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class UdpFlows:
    """All UDP flows that were sent to an address and port, before any translation."""

    address: str
    port: int

    @property
    def family(self) -> IPFamily:
        return family_of(self.address)


def flows_of(rules: Iterable[str], family: IPFamily, local_addresses: Collection[str]) -> set[UdpFlows]:
    """Return the flows that rules of ours in the nat table decide about. Those of node ports are sent to this node."""
    return set(_flows_of(rules, family, local_addresses))


def _flows_of(rules: Iterable[str], family: IPFamily, local_addresses: Collection[str]) -> Iterator[UdpFlows]:
    for rule in rules:
        found = _RULE.match(rule)
        if not found:
            continue
        network = ip_network(found[1] or ("0.0.0.0/0" if family is IPFamily.IPV4 else "::/0"))
        if network.num_addresses == 1:
            yield UdpFlows(str(network.network_address), int(found[2]))
            continue
        for address in local_addresses:
            if family_of(address) is family and ip_address(address) in network:
                yield UdpFlows(address, int(found[2]))


class Conntrack(Protocol):
    """The kernel's memory of flows."""

    async def forget(self, flows: Collection[UdpFlows]) -> None:
        """Delete the entries of these flows; it is no error if there are none. Raises RedirectFailed."""


class ConntrackProgram:
    """Deletes entries with the `conntrack` program at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def forget(self, flows: Collection[UdpFlows]) -> None:
        for family in IPFamily:
            of_family = {flow for flow in flows if flow.family is family}
            if len(of_family) > MAX_DELETED_ONE_BY_ONE:
                of_family &= await self._present(family)
            for flow in sorted(of_family):
                await self._forget(flow)

    async def _forget(self, flow: UdpFlows) -> None:
        arguments = ("-D", "-f", flow.family.name.lower(), "-p", "udp", "--orig-dst", flow.address)
        command = (self._path, *arguments, "--orig-port-dst", str(flow.port))
        finished = await run(*command)
        if finished.code and "0 flow entries" not in finished.stderr:
            raise RedirectFailed(" ".join(command), finished.stderr)

    async def _present(self, family: IPFamily) -> set[UdpFlows]:
        command = (self._path, "-L", "-f", family.name.lower(), "-p", "udp")
        finished = await run(*command)
        if finished.code:
            raise RedirectFailed(" ".join(command), finished.stderr)
        found = map(_ENTRY.match, finished.stdout.decode(errors="replace").splitlines())
        return {UdpFlows(entry[1], int(entry[2])) for entry in found if entry}


class ConntrackNetlink:
    """Deletes entries through pyroute2, which takes a hundred times as long as the program does."""

    async def forget(self, flows: Collection[UdpFlows]) -> None:
        if not flows:
            return
        try:
            await asyncio.to_thread(_forget_by_netlink, frozenset(flows))
        except Exception as error:  # pyroute2's errors have no common class of their own
            raise RedirectFailed("conntrack by netlink", str(error)) from error


def _forget_by_netlink(flows: Collection[UdpFlows]) -> None:
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

    for family in {flow.family for flow in flows}:
        number = socket.AF_INET if family is IPFamily.IPV4 else socket.AF_INET6
        with NFCTSocket(nfgen_family=number) as kernel:
            originals = [entry.get_attr("CTA_TUPLE_ORIG") for entry in list(kernel.dump())]
            for entry in (NFCTAttrTuple.from_netlink(number, original) for original in originals):
                if entry.proto == socket.IPPROTO_UDP and UdpFlows(entry.daddr, entry.dport) in flows:
                    kernel.entry("del", tuple_orig=entry)


def available() -> Conntrack | None:
    """Return the fastest way to the entries that this host has; None if it has none."""
    if path := which("conntrack"):
        return ConntrackProgram(path)
    try:
        import pyroute2.netlink.nfnetlink.nfctsocket  # noqa: F401
    except ImportError:
        return None
    return ConntrackNetlink()
