"""The metrics of the processes that a daemon consists of."""

from __future__ import annotations

import os
from pathlib import Path

from userspace_proxy.metrics.processes import Processes, just_this_one, processes_pieces


def lines(processes: Processes, proc: Path = Path("/proc")) -> list[str]:
    return [line for line in "".join(processes_pieces(processes, proc)).splitlines() if not line.startswith("#")]


def test_each_process_has_its_memory_and_its_restarts(tmp_path: Path) -> None:
    for pid, pages in ((11, 100), (12, 200)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "statm").write_text(f"1000 {pages} 30 1 0 50 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    pids = {"supervisor": 11, "control": 12, "data": 0}  # data is being started again
    assert lines(Processes(pids, {"control": 0, "data": 3}, is_data_stuck=True), tmp_path) == [
        f'userspace_proxy_process_resident_memory_bytes{{process="supervisor"}} {100 * page}',
        f'userspace_proxy_process_resident_memory_bytes{{process="control"}} {200 * page}',
        'userspace_proxy_process_restarts_total{process="control"} 0',
        'userspace_proxy_process_restarts_total{process="data"} 3',
        "userspace_proxy_data_process_is_stuck 1",
    ]


def test_a_process_that_has_just_died_has_no_memory(tmp_path: Path) -> None:
    first = lines(Processes({"data": 77}), tmp_path)[0]
    assert first == 'userspace_proxy_process_resident_memory_bytes{process="data"} 0'


def test_alone_it_is_the_control_process() -> None:
    assert lines(just_this_one())[0].startswith('userspace_proxy_process_resident_memory_bytes{process="control"} ')
