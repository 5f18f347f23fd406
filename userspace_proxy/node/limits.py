"""Limits of this process."""

from __future__ import annotations

import resource

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
