"""What this process may do, and what the ways of changing kernel rules need."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RuleBackend = Literal["nft", "legacy", "libiptc", "none"]


class Capability(enum.IntEnum):
    """The capabilities that matter here, by their number in the kernel."""

    CAP_NET_BIND_SERVICE = 10
    CAP_NET_ADMIN = 12
    CAP_NET_RAW = 13


_NEEDED: dict[RuleBackend, tuple[Capability, ...]] = {
    "nft": (Capability.CAP_NET_ADMIN,),
    "legacy": (Capability.CAP_NET_ADMIN, Capability.CAP_NET_RAW),
    "libiptc": (Capability.CAP_NET_ADMIN, Capability.CAP_NET_RAW),
    "none": (),
}


@dataclass(frozen=True, slots=True)
class Missing:
    """Capabilities that this process lacks: without `needed` no rule can be set; `wanted` is for ports below 1024."""

    needed: tuple[Capability, ...] = ()
    wanted: tuple[Capability, ...] = ()


def effective_capabilities(proc: Path = Path("/proc")) -> frozenset[Capability]:
    """Return what this process may do. Where the kernel does not tell, as on other systems, nothing."""
    try:
        lines = (proc / "self/status").read_text().splitlines()
    except OSError:
        return frozenset()
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return frozenset(each for each in Capability if mask >> each & 1)


def missing_capabilities(backend: RuleBackend, effective: Collection[Capability]) -> Missing:
    """Return what is missing for this backend."""
    wanted = (Capability.CAP_NET_BIND_SERVICE,)
    return Missing(
        tuple(each for each in _NEEDED[backend] if each not in effective),
        tuple(each for each in wanted if each not in effective),
    )
