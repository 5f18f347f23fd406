"""Limits of this process and its network."""

from __future__ import annotations

import os
import resource
from pathlib import Path

WANTED_DESCRIPTORS = 64_000
"""Source: kube-proxy 1.25, userspace mode."""


def raise_descriptor_limit(wanted: int = WANTED_DESCRIPTORS) -> str | None:
    """Raise the soft limit on open files to min(`wanted`, hard limit). Return a warning when that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    if reachable > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable >= wanted:
        return None
    return (
        f"at most {reachable} files can be open, so about {reachable // 2} connections; "
        f"raise the hard limit (ulimit -Hn) to {wanted} for more"
    )


def backlog_warning(wanted: int, proc: Path = Path("/proc")) -> str | None:
    """Return a warning where the kernel cuts a listening socket's backlog short. None also where that is not known."""
    try:
        greatest = int((proc / "sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return None
    if greatest >= wanted:
        return None
    return (
        f"at most {greatest} connections can wait to be accepted by a listener, not {wanted} (listenBacklog); "
        f"raise net.core.somaxconn for more"
    )


def usable_cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
