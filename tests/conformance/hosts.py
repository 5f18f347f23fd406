"""Hosts to redirect on: memory, and namespaces of this machine with one way into the kernel each."""

from __future__ import annotations

from typing import Protocol

from tests.support.namespaces import run
from userspace_proxy.core.model import IPFamily
from userspace_proxy.core.rule import Rule
from userspace_proxy.redirect.backend import Backend, FakeBackend
from userspace_proxy.redirect.libiptc import LibiptcBackend
from userspace_proxy.redirect.programs import Variant, find_programs
from userspace_proxy.redirect.restore import RestoreBackend
from userspace_proxy.redirect.tables import Tables, read_save


class Host(Protocol):
    """What a test does on a host besides redirecting: look, and be the administrator who edits rules by hand."""

    async def backend(self) -> Backend: ...
    def tables(self) -> Tables: ...
    def insert(self, table: str, chain: str, rule: str) -> None: ...
    def flush(self, table: str, *, delete_chains: bool = False) -> None: ...


def _refused_by_kernels(rule: Rule) -> bool:
    return rule.chain.table == "filter" and "DNAT --to" in rule.text


class FakeHost:
    def __init__(self, family: IPFamily) -> None:
        self._backend = FakeBackend(family, refuses=_refused_by_kernels)

    async def backend(self) -> Backend:
        return self._backend

    def tables(self) -> Tables:
        return self._backend.tables

    def insert(self, table: str, chain: str, rule: str) -> None:
        self._backend.tables[table].setdefault(chain, []).insert(0, f"-A {chain} {rule}")
        self._backend.foreign_changes += 1

    def flush(self, table: str, *, delete_chains: bool = False) -> None:
        chains = self._backend.tables[table]
        for name in list(chains):
            chains[name] = []
            if delete_chains and name.startswith("KUBE-"):
                del chains[name]
        self._backend.foreign_changes += 1


class KernelHost:
    """A namespace, edited with the programs of one variant."""

    def __init__(self, way: str, family: IPFamily) -> None:
        self._way, self._family = way, family
        self._stem = "iptables" if family is IPFamily.IPV4 else "ip6tables"
        self._suffix = "nft" if way == "restore-nft" else "legacy"

    async def backend(self) -> Backend:
        if self._way == "libiptc":
            return LibiptcBackend(self._family)
        return RestoreBackend((await find_programs(self._family))[Variant(self._suffix)])

    def tables(self) -> Tables:
        return read_save(run(f"{self._stem}-{self._suffix}-save"))

    def insert(self, table: str, chain: str, rule: str) -> None:
        program = f"{self._stem}-{self._suffix}"
        run(f"{program}-restore", "--noflush", stdin=f"*{table}\n-I {chain} 1 {rule}\nCOMMIT\n")

    def flush(self, table: str, *, delete_chains: bool = False) -> None:
        run(f"{self._stem}-{self._suffix}", "-t", table, "-F")
        if delete_chains:
            run(f"{self._stem}-{self._suffix}", "-t", table, "-X")
