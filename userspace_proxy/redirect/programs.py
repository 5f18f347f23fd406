"""The iptables programs of this host: which there are, how they are called, and which variant others use."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect.tables import SaveReader, Tables

TIME_LIMIT_S = 30.0
_LINES_AT_ONCE = 2000
_KUBELET_MARKS = frozenset({"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})
_ENVIRONMENT = {"LC_ALL": "C", "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
_LEGACY_TABLES = {
    IPFamily.IPV4: Path("/proc/net/ip_tables_names"),
    IPFamily.IPV6: Path("/proc/net/ip6_tables_names"),
}


class Variant(enum.StrEnum):
    """Which of the kernel's two packet filters a program writes to. Rules in both at once shadow each other."""

    NFT = "nft"
    LEGACY = "legacy"


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended."""

    code: int
    stdout: bytes
    stderr: str


async def run(*command: str, stdin: bytes = b"", time_limit_s: float = TIME_LIMIT_S) -> Finished:
    """Run a program to its end without a shell, while the event loop goes on.

    Its input is a file in memory, as a program that ends early would break a pipe. Raises RedirectFailed when it
    cannot be started or takes longer than `time_limit_s`; then it is killed.
    """
    with os.fdopen(os.memfd_create("stdin"), "wb") as file:
        file.write(stdin)
        file.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=file,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_ENVIRONMENT,
            )
        except OSError as error:
            raise RedirectFailed(command[0], error.strerror or str(error)) from error
    try:
        async with asyncio.timeout(time_limit_s):
            stdout, stderr = await process.communicate()
    except TimeoutError as error:
        raise RedirectFailed(command[0], f"not finished after {time_limit_s:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return Finished(process.returncode, stdout, stderr.decode(errors="replace"))


def which(program: str) -> str | None:
    """Return the path of a program, also where the search path of a daemon lacks the system's directories."""
    return shutil.which(program, path=_ENVIRONMENT["PATH"])


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs for one variant and family. `version` decides how they wait for the lock."""

    variant: Variant
    family: IPFamily
    save: str
    restore: str
    version: tuple[int, ...]

    @property
    def wait_arguments(self) -> tuple[str, ...]:
        """How `restore` is told to wait for the lock of other programs. Before 1.6.2 it could not."""
        if self.version < (1, 6, 2):
            return ()
        return ("-w", "5", "-W", "100000") if self.version < (1, 8) else ("-w", "5")

    async def read(self) -> Tables:
        """Return the tables that exist. A legacy program would create one by looking. Raises RedirectFailed."""
        if self.variant is Variant.NFT:
            return await self._save()
        return {
            name: chains for table in legacy_tables(self.family) for name, chains in (await self._save(table)).items()
        }

    async def _save(self, table: str = "") -> Tables:
        command = [self.save, *(("-t", table) if table else ())]
        finished = await run(*command)
        if finished.code:
            raise RedirectFailed(" ".join(command), finished.stderr)
        return await _read_in_portions(finished.stdout)


async def _read_in_portions(save: bytes) -> Tables:
    """Return the tables in a save, letting the event loop go on between portions."""
    reader, lines = SaveReader(), save.decode(errors="replace").splitlines()
    for begin in range(0, len(lines), _LINES_AT_ONCE):
        reader.feed(lines[begin : begin + _LINES_AT_ONCE])
        await asyncio.sleep(0)
    return reader.tables


def legacy_tables(family: IPFamily) -> tuple[str, ...]:
    """Return the legacy tables that exist in this network namespace. Empty where the kernel has no such tables."""
    try:
        return tuple(_LEGACY_TABLES[family].read_text().split())
    except OSError:
        return ()


async def find_programs(family: IPFamily) -> dict[Variant, Programs]:
    """Return the programs of this host for a family. A program without variant in its name is asked for it."""
    stem = "iptables" if family is IPFamily.IPV4 else "ip6tables"
    found: dict[Variant, Programs] = {}
    for name in (f"{stem}-nft", f"{stem}-legacy", stem):
        save, restore = which(f"{name}-save"), which(f"{name}-restore")
        if not (save and restore):
            continue
        try:
            said = (await run(restore, "--version", time_limit_s=5.0)).stdout.decode(errors="replace")
        except RedirectFailed:
            continue
        variant = Variant.NFT if "nf_tables" in said else Variant.LEGACY
        found.setdefault(variant, Programs(variant, family, save, restore, version_in(said)))
    return found


def version_in(text: str) -> tuple[int, ...]:
    """Return the version in what `--version` printed; a new one where there is none to be read."""
    found = re.search(r"v(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else (1, 8)


async def variant_in_use(found: Iterable[Programs]) -> Variant | None:
    """Return the variant that others on this host use, among those found: by the kubelet's marks, else by rules.

    A variant that the kernel does not support does not count. Raises RedirectFailed when none can be read.
    """
    tables: dict[Variant, Tables] = {}
    failure: RedirectFailed | None = None
    for programs in found:
        try:
            tables[programs.variant] = await programs.read()
        except RedirectFailed as error:
            failure = error
    if failure is not None and not tables:
        raise failure
    for variant in (Variant.NFT, Variant.LEGACY):
        if not _KUBELET_MARKS.isdisjoint(tables.get(variant, {}).get("mangle", ())):
            return variant
    return max(tables, key=lambda variant: (_rule_count(tables[variant]), variant is Variant.NFT), default=None)


def _rule_count(tables: Tables) -> int:
    return sum(len(rules) for chains in tables.values() for rules in chains.values())
