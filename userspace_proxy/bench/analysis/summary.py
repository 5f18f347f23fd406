"""The numbers that are shown for each test: one row per metric, one cell per target, the same in every output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from userspace_proxy.bench.analysis.comparison import Comparison, compare_targets
from userspace_proxy.bench.analysis.metrics import METRICS, Metric, format_value, valid_for
from userspace_proxy.bench.analysis.statistics import Interval, bootstrap_median
from userspace_proxy.bench.results import Report, RunResult, TestRecord

SHOWN = (
    "rate", "throughput", "p50", "p99", "p99.9", "max", "errors", "error rate", "stalls", "longest stall", "udp loss",
    "max/min", "jain",
    "round robin violations", "stickiness", "affinity violations", "recovery", "first use", "broken connections",
    "unfaithful endings", "cpu per request", "cpu per gb", "context switches per request", "memory",
    "memory per connection", "descriptors per connection",
)  # fmt: skip
_ONLY_WHEN_NOT_ZERO = frozenset({"error rate", "stalls", "longest stall", "broken connections"})
_MEASURED = ("seconds", "per second", "bits per second", "bytes")
_MIN_TAIL = {"p99": 100, "p99.9": 1000}


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric of a target. `interval` is that of the median over repetitions; `invalid` says whose limit it was."""

    value: float | None
    interval: Interval | None
    per_repetition: tuple[float, ...]
    invalid: str = ""

    def text(self, metric: Metric, *, with_interval: bool = True) -> str:
        """Return the value for people, and its interval where it is wider than what is shown."""
        if self.value is None:
            return "–"
        shown = format_value(self.value, metric.unit)
        if self.interval is not None:
            low, high = (format_value(bound, metric.unit) for bound in (self.interval.low, self.interval.high))
            shown = format_value(self.interval.value, metric.unit)
            if low != high and with_interval:
                shown += f" [{_without_unit(low, high)} – {high}]"
        return f"({shown})" if self.invalid else shown


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of a test, for each target in order."""

    metric: Metric
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class TestSummary:
    """All rows of a test."""

    test: TestRecord
    targets: tuple[str, ...]
    rows: tuple[Row, ...]


def summarise(report: Report) -> list[TestSummary]:
    """Return what is to be shown of each test that has any result."""
    comparisons = compare_targets(report)
    summaries = []
    for test in report.tests:
        of_target = {target.name: report.of(target.name, test.name) for target in report.targets}
        targets = tuple(name for name, runs in of_target.items() if runs)
        rows = []
        for name in SHOWN:
            metric = METRICS[name]
            if metric.name == "rate" and test.is_open_loop:
                continue
            cells = tuple(cell_of(metric, of_target[target], report) for target in targets)
            if not _is_worth_showing(metric, cells) or (
                metric.name == "stickiness" and "; affinity" in test.description
            ):
                continue
            found = tuple(c for c in comparisons if c.test == test.name and c.metric.name == name)
            rows.append(Row(metric, cells, found))
        if targets:
            summaries.append(TestSummary(test, targets, tuple(rows)))
    return summaries


def cell_of(metric: Metric, runs: Sequence[RunResult], report: Report) -> Cell:
    """Return a metric over the repetitions of a test on a target."""
    completed = sum(run.load.completed for run in runs)
    if completed < _MIN_TAIL.get(metric.name, 0):
        return Cell(None, None, ())  # a percentile of fewer samples is just one of them
    usable = valid_for(metric, runs)
    reasons = sorted({limit.reason for run in runs for limit in run.limits if limit.affects in ("all", metric.needs)})
    found = [metric.of([run]) for run in usable or runs]
    values = tuple(value for value in found if value is not None)
    is_measured = (
        metric.unit in ("seconds", "per second", "bits per second", "bytes") and metric.name != "longest stall"
    )
    interval = bootstrap_median(values, report.confidence, report.seed) if is_measured and len(values) > 1 else None
    if interval is not None and float("inf") in values:
        interval = None
    return Cell(metric.of(usable or runs), interval, values, "" if usable else "; ".join(reasons))


def _is_worth_showing(metric: Metric, cells: Sequence[Cell]) -> bool:
    values = [cell.value for cell in cells if cell.value is not None]
    return any(values) if metric.name in _ONLY_WHEN_NOT_ZERO else bool(values)


def _without_unit(low: str, high: str) -> str:
    """Return the lower bound without its unit where the upper one has the same."""
    number, _, unit = low.partition(" ")
    return number if unit and high.endswith(f" {unit}") else low.removesuffix("/s") if high.endswith("/s") else low
