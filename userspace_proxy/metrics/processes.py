"""The processes that the daemon consists of: their memory, how often they died, and whether data still moves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from userspace_proxy.metrics.exposition import header, label_set

_PREFIX = "userspace_proxy_process_"


@dataclass(frozen=True, slots=True)
class Processes:
    """Process numbers by what they are for, how often each was started again, and whether the data process is stuck."""

    pids: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    is_data_stuck: bool = False


ReadProcesses = Callable[[], Processes]


def just_this_one() -> Processes:
    """Return this process as the only one."""
    return Processes({"control": os.getpid()})


def processes_pieces(processes: Processes, proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield the metrics as text. A process that is being started again has no memory."""
    memory = {name: resident_bytes(pid, proc) for name, pid in processes.pids.items() if pid}
    yield _metric("resident_memory_bytes", "gauge", "Resident memory of each process of this proxy.", memory)
    yield _metric("restarts_total", "counter", "How often a process died and was started again.", processes.restarts)
    name = "userspace_proxy_data_process_is_stuck"
    yield f"{header(name, 'gauge', 'Whether the data process does not get to its work.')}"
    yield f"{name} {int(processes.is_data_stuck)}\n"


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the resident memory of a process; 0 where there is no such process, or no `/proc`."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _metric(name: str, kind: str, documentation: str, values: Mapping[str, int]) -> str:
    name = _PREFIX + name
    samples = (f"{name}{label_set({'process': process})} {value}\n" for process, value in values.items())
    return header(name, kind, documentation) + "".join(samples)
