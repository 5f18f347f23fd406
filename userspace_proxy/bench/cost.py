"""What a group of processes costs, read from /proc. Missing processes cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from userspace_proxy.bench.results import Cost

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Usage:
    """A reading. `wait_s`: threads were ready to run, but had no CPU. Counters only grow while the processes live."""

    user_s: float = 0.0
    system_s: float = 0.0
    run_s: float = 0.0
    wait_s: float = 0.0
    resident_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    voluntary_switches: int = 0
    involuntary_switches: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def usage_of(pids: Iterable[int]) -> Usage:
    """Return what all these processes have used up to now, and hold now."""
    return sum((_usage(pid) for pid in pids), Usage())


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the memory of the processes with shared pages divided among those who share them (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _usage(pid: int) -> Usage:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        run_ns = wait_ns = voluntary = involuntary = 0
        tasks = os.listdir(f"/proc/{pid}/task")
        for task in tasks:
            run, wait = _schedstat(f"/proc/{pid}/task/{task}/schedstat")
            run_ns, wait_ns = run_ns + run, wait_ns + wait
            for line in Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines()[-2:]:
                count = int(line.split()[1])
                if line.startswith("voluntary"):
                    voluntary += count
                else:
                    involuntary += count
        return Usage(
            user_s=int(fields[11]) / _TICKS_PER_S,
            system_s=int(fields[12]) / _TICKS_PER_S,
            run_s=run_ns / 1e9,
            wait_s=wait_ns / 1e9,
            resident_bytes=int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE,
            descriptors=_descriptors(pid),
            threads=len(tasks),
            voluntary_switches=voluntary,
            involuntary_switches=involuntary,
        )
    return Usage()


def _schedstat(path: str) -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        run, wait = Path(path).read_text().split()[:2]
        return int(run), int(wait)
    return 0, 0


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


class CostMeter:
    """Measures what a changing group of processes costs over a stretch of time. Make it before the load begins."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._base = self._before = self._after = usage_of(pids())
        self._threads_before = self._threads_after = _threads(pids())
        self._wall_s = 0.0
        self.stolen_s = 0.0  # for which the whole machine had to wait for its host
        self._peak_resident, self._peak_descriptors = self._before.resident_bytes, self._before.descriptors
        self._proportional = 0

    async def measure(self, from_: float, to: float) -> None:
        """Measure between two moments of the monotonic clock, and sample what has peaks."""
        await asyncio.sleep(from_ - time.monotonic())
        began = time.monotonic()
        self._before, self._threads_before = usage_of(self._pids()), _threads(self._pids())
        stolen_s = _stolen_s()
        while (left_s := to - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _SAMPLE_S))
            self._sample()
        self._threads_after = _threads(self._pids())
        self._wall_s = time.monotonic() - began
        self.stolen_s = _stolen_s() - stolen_s
        self._proportional = proportional_bytes(self._pids())

    @property
    def busy(self) -> float | None:
        """The share of the time in which the busiest thread ran or waited for a CPU; None where there is none."""
        return self._busiest(lambda run, wait: run + wait)

    @property
    def starved(self) -> float | None:
        """The share of the time in which the most starved thread waited for a CPU."""
        return self._busiest(lambda run, wait: wait)

    def cost(self) -> Cost | None:
        """Return the cost, with what the group held when the meter was made; None where there is no process."""
        if not self._pids() or self._wall_s == 0:
            return None
        before, after = self._before, self._after
        return Cost(
            user_s=after.user_s - before.user_s,
            system_s=after.system_s - before.system_s,
            run_s=after.run_s - before.run_s,
            wait_s=after.wait_s - before.wait_s,
            wall_s=self._wall_s,
            voluntary_switches=after.voluntary_switches - before.voluntary_switches,
            involuntary_switches=after.involuntary_switches - before.involuntary_switches,
            peak_resident_bytes=self._peak_resident,
            peak_descriptors=self._peak_descriptors,
            threads=after.threads,
            proportional_bytes=self._proportional,
            base_resident_bytes=self._base.resident_bytes,
            base_descriptors=self._base.descriptors,
        )

    def _sample(self) -> None:
        self._after = usage_of(self._pids())
        self._peak_resident = max(self._peak_resident, self._after.resident_bytes)
        self._peak_descriptors = max(self._peak_descriptors, self._after.descriptors)

    def _busiest(self, part: Callable[[int, int], int]) -> float | None:
        if not self._wall_s or not self._threads_after:
            return None
        shares = [0.0]
        for thread, (run, wait) in self._threads_after.items():
            run_before, wait_before = self._threads_before.get(thread, (0, 0))
            shares.append(part(run - run_before, wait - wait_before) / 1e9 / self._wall_s)
        return max(shares)


def _stolen_s() -> float:
    """Return for how long all CPUs together were wanted, but had by other guests of the same host."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / _TICKS_PER_S
    return 0.0


def _threads(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return the nanoseconds that each thread has run, and has waited for a CPU."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found[int(task)] = _schedstat(f"/proc/{pid}/task/{task}/schedstat")
    return found
