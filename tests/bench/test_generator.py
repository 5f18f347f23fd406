"""The generator: what it measures is what happened, and when it was due."""

from __future__ import annotations

import math

import pytest

from tests.bench.conftest import Outcome
from userspace_proxy.bench.analysis.metrics import metric_called
from userspace_proxy.bench.results import RunResult

pytestmark = pytest.mark.timeout(240)  # the first test waits for its scenario


def value(run: RunResult, name: str) -> float:
    metric = metric_called(name)
    assert metric is not None
    measured = metric.of([run])
    assert measured is not None
    return measured


def test_a_stall_counts_for_all_requests_that_were_due_in_it(stall: Outcome) -> None:
    """100 requests a second for 10 s, the target frozen for 2 s: case 92, no coordinated omission."""
    (run,) = stall.report.runs
    assert run.load.sent == 1000
    assert run.load.completed == 1000
    assert value(run, "p50") < 0.05
    assert value(run, "max") == pytest.approx(2.0, abs=0.3)
    assert value(run, "p90") >= 0.9
    assert run.load.stalls.slow + run.load.stalls.unseen == pytest.approx(190, abs=30)


def test_every_load_meets_no_error_where_nothing_is_in_between(direct: Outcome) -> None:
    assert direct.faults("direct") == {}
    assert [run.load.failed for run in direct.report.runs] == [0] * 12


def test_every_load_has_done_something(direct: Outcome) -> None:
    for run in direct.report.runs:
        assert run.load.completed or run.load.moved_bytes, run.test


def test_open_loops_send_what_was_asked_for(direct: Outcome) -> None:
    sent = {run.test: run.load.sent for run in direct.report.runs}
    assert sent["hold"] == 250
    assert sent["udp rate"] == 250
    assert sent["poisson"] == pytest.approx(150, abs=6 * math.sqrt(150))


def test_each_stream_is_counted(direct: Outcome) -> None:
    for test in ("download", "upload"):
        (run,) = direct.report.of("direct", test)
        assert len(run.load.streams) == 3
        assert min(run.load.streams) > 0


def test_endings_are_seen_from_both_sides(direct: Outcome) -> None:
    (run,) = direct.report.of("direct", "endings")
    assert {probe: (ending.tried, ending.faithful) for probe, ending in run.load.endings.items()} == {
        "client half-closes": (2, 2), "backend half-closes": (2, 2), "client resets": (2, 2),
        "backend resets": (2, 2), "every byte": (2, 2),
    }  # fmt: skip
