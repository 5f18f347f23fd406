"""What this host and this process need before the proxy starts. What is not permitted is left, and said.

Source: kube-proxy, but for this: it ends when the kernel refuses a value, and this proxy goes on.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from userspace_proxy.node.limits import raise_descriptor_limit

_ROOT = Path("/")
_NETFILTER = "proc/sys/net/netfilter"
_HASH_SIZE = "sys/module/nf_conntrack/parameters/hashsize"
_ENTRIES_PER_BUCKET = 4

_log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """What became of a step."""

    DONE = "done"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    READ_ONLY = "read-only"
    """Refused because the file system is mounted read-only."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was to be set, what became of it, and the values or the reason."""

    name: str
    outcome: Outcome
    detail: str

    @property
    def is_in_force(self) -> bool:
        return self.outcome in (Outcome.DONE, Outcome.UNCHANGED)

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True, slots=True)
class ConntrackSettings:
    """What the kernel's connection tracking should have. Zero leaves a value as it is; times are seconds."""

    max_per_core: int = 32_768
    min: int = 131_072
    tcp_established_timeout_s: float = 86_400.0
    tcp_close_wait_timeout_s: float = 3_600.0
    udp_timeout_s: float = 0.0
    udp_stream_timeout_s: float = 0.0
    tcp_be_liberal: bool = False

    def max_entries(self, cores: int) -> int:
        """Return how many connections should be tracked at most; 0 where that is to be left."""
        return max(self.max_per_core * cores, self.min) if self.max_per_core > 0 else 0


def set_up_host(conntrack: ConntrackSettings, *, root: Path = _ROOT, cores: int | None = None) -> tuple[Step, ...]:
    """Set what stays when this process ends, and needs privileges: all that `--init-only` does.

    `root` is where `/proc` and `/sys` are. Returns each step; raises nothing.
    """
    return tuple(_conntrack_steps(conntrack, root, cores or os.cpu_count() or 1))


def set_up_process(oom_score_adj: int | None, *, root: Path = _ROOT) -> tuple[Step, ...]:
    """Set what belongs to this process: how soon it is killed without memory, and how many files it may open."""
    steps = []
    if oom_score_adj is not None:
        steps.append(_set(root / "proc/self/oom_score_adj", oom_score_adj))
    warning = raise_descriptor_limit()
    steps.append(
        Step("RLIMIT_NOFILE", Outcome.REFUSED, warning)
        if warning
        else Step("RLIMIT_NOFILE", Outcome.UNCHANGED, "is high enough")
    )
    return tuple(steps)


def is_sys_read_only(steps: tuple[Step, ...]) -> bool:
    """Tell whether a step failed because /sys is read-only, of which the cluster is told."""
    return any(step.name == _HASH_SIZE and step.outcome is Outcome.READ_ONLY for step in steps)


def log_steps(steps: tuple[Step, ...]) -> None:
    """Log what was changed, and warn of what could not be."""
    for step in steps:
        if step.outcome is Outcome.DONE:
            _log.info("%s", step)
        elif not step.is_in_force:
            _log.warning("%s", step)


def _conntrack_steps(wanted: ConntrackSettings, root: Path, cores: int) -> Iterator[Step]:
    netfilter = root / _NETFILTER
    entries = wanted.max_entries(cores)
    if entries:
        yield _set(netfilter / "nf_conntrack_max", entries, only_raise=True)
        yield _raise_hash_size(root, entries // _ENTRIES_PER_BUCKET)
    for name, seconds in (
        ("tcp_timeout_established", wanted.tcp_established_timeout_s),
        ("tcp_timeout_close_wait", wanted.tcp_close_wait_timeout_s),
        ("udp_timeout", wanted.udp_timeout_s),
        ("udp_timeout_stream", wanted.udp_stream_timeout_s),
    ):
        if seconds > 0:
            yield _set(netfilter / f"nf_conntrack_{name}", int(seconds))
    if wanted.tcp_be_liberal:
        yield _set(netfilter / "nf_conntrack_tcp_be_liberal", 1)


def _raise_hash_size(root: Path, wanted: int) -> Step:
    """Make the hash table larger if it is too small, which anyone can see, but only root of the first namespace set."""
    try:
        buckets = _read(root / _NETFILTER / "nf_conntrack_buckets")
    except (OSError, ValueError):
        buckets = 0
    if buckets >= wanted:
        return Step(_HASH_SIZE, Outcome.UNCHANGED, f"is {buckets}")
    return _set(root / _HASH_SIZE, wanted, only_raise=True)


def _set(path: Path, wanted: int, *, only_raise: bool = False) -> Step:
    """Write a number to one of the kernel's files, unless it is there, or a larger one with `only_raise`."""
    name = path.name if path.name != "hashsize" else _HASH_SIZE
    try:
        present = _read(path)
        if present == wanted or (only_raise and present > wanted):
            return Step(name, Outcome.UNCHANGED, f"is {present}")
        path.write_text(str(wanted))
    except FileNotFoundError:
        hint = "; the kernel module nf_conntrack may not be loaded" if "nf_conntrack" in str(path) else ""
        return Step(name, Outcome.REFUSED, f"there is no {path}{hint}")
    except OSError as error:
        outcome = Outcome.READ_ONLY if error.errno == errno.EROFS else Outcome.REFUSED
        return Step(name, outcome, f"cannot be set to {wanted}: {os.strerror(error.errno or 0).lower()}")
    except ValueError:
        return Step(name, Outcome.REFUSED, f"{path} holds no number")
    return Step(name, Outcome.DONE, f"{present} -> {wanted}")


def _read(path: Path) -> int:
    return int(path.read_text().split()[0])
