"""The metrics `process_*` that all programs have.

The usual collector lists every open descriptor, which takes 10 ms when there are 30,000. Since Linux 6.2 the kernel
tells their number; before, they are counted in pieces.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from userspace_proxy.metrics.exposition import header, number

_COUNTED_PER_PIECE = 256


class ProcessMetrics:
    """This process, as `/proc` shows it. Where there is no `/proc`, there are no metrics."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._self = proc / "self"
        self._boot_time_s = _boot_time(proc)
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    def pieces(self) -> Iterator[str]:
        """Yield the metrics as text, and empty pieces while descriptors are counted."""
        try:
            facts = (self._self / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        user, system, start, virtual, resident = (int(facts[place]) for place in (11, 12, 19, 20, 21))
        yield _metric(
            "cpu_seconds_total", "counter", "User and system CPU time spent.", (user + system) / self._ticks_per_s
        )
        if self._boot_time_s is not None:
            started_at = self._boot_time_s + start / self._ticks_per_s
            yield _metric("start_time_seconds", "gauge", "Start time of the process since the epoch.", started_at)
        yield _metric("virtual_memory_bytes", "gauge", "Virtual memory size.", virtual)
        yield _metric("resident_memory_bytes", "gauge", "Resident memory size.", resident * resource.getpagesize())
        yield _metric("max_fds", "gauge", "Maximum number of open files.", _descriptor_limit())
        count = told_count(self._self / "fd")
        if not count:
            for _ in os.scandir(self._self / "fd"):
                count += 1
                if count % _COUNTED_PER_PIECE == 0:
                    yield ""
        yield _metric("open_fds", "gauge", "Number of open files.", count)


def told_count(folder: Path) -> int:
    """Return how many open files the kernel says there are, or 0 where it says nothing."""
    return folder.stat().st_size


def _metric(name: str, kind: str, documentation: str, value: float) -> str:
    return header(f"process_{name}", kind, documentation) + f"process_{name} {number(value)}\n"


def _descriptor_limit() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _boot_time(proc: Path) -> int | None:
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("btime ")), None)
