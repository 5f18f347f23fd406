"""Chooses the way into the kernel's tables: what was asked for, or what others on this host use."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.model import IPFamily
from userspace_proxy.core.rules import USUAL_JUMPS, Jumps
from userspace_proxy.redirect import fingerprints
from userspace_proxy.redirect.backend import Backend
from userspace_proxy.redirect.libiptc import LibiptcBackend, is_installed
from userspace_proxy.redirect.programs import Programs, Variant, find_programs, variant_in_use
from userspace_proxy.redirect.redirector import Redirector
from userspace_proxy.redirect.restore import RestoreBackend


class BackendChoice(enum.StrEnum):
    """The values of `--iptables-backend`. `NONE` runs the proxy without rules."""

    AUTO = "auto"
    NFT = "nft"
    LEGACY = "legacy"
    LIBIPTC = "libiptc"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Opened:
    """The redirectors of this host, and what people should be told about them, one warning each."""

    redirectors: tuple[Redirector, ...] = ()
    warnings: tuple[str, ...] = ()


async def open_redirectors(
    choice: BackendChoice, families: Iterable[IPFamily] = tuple(IPFamily), *, jumps: Jumps = USUAL_JUMPS
) -> Opened:
    """Return a redirector for each family that can be served. Nothing in the kernel is changed.

    Raises ConfigError when what was asked for is missing on this host, RedirectFailed when no tables can be read.
    """
    families = tuple(families)
    if choice is BackendChoice.NONE or not families:
        return Opened()
    found = {family: await find_programs(family) for family in families}
    variant = await _variant(choice, found)
    generation = fingerprints.opened(True, families[0]) if variant is Variant.NFT else None
    turn = asyncio.Lock()
    backends: list[Backend] = []
    warnings: list[str] = []
    for family in families:
        if variant in found[family]:
            backends.append(RestoreBackend(found[family][variant], generation))
        elif variant is None or choice is BackendChoice.AUTO:
            if is_installed():
                backends.append(LibiptcBackend(family))
            else:
                warnings.append(f"no {family.name} rules: neither iptables-restore nor python-iptables is installed")
        else:
            warnings.append(f"no {family.name} rules: its {variant} variant of iptables-restore is not installed")
    return Opened(tuple(Redirector(backend, turn, jumps=jumps) for backend in backends), tuple(warnings))


async def _variant(choice: BackendChoice, found: Mapping[IPFamily, Mapping[Variant, Programs]]) -> Variant | None:
    """Return the variant of the programs to use; None for python-iptables."""
    match choice:
        case BackendChoice.LIBIPTC:
            if not is_installed():
                raise ConfigError("python-iptables is not installed", where="--iptables-backend", subject=choice)
            return None
        case BackendChoice.NFT | BackendChoice.LEGACY:
            variant = Variant(choice.value)
            if not any(variant in of_family for of_family in found.values()):
                raise ConfigError("there is no such iptables-restore", where="--iptables-backend", subject=choice)
            return variant
        case _:
            some = next((of_family for of_family in found.values() if of_family), {})
            return await variant_in_use(some.values())
