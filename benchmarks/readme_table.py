"""Writes the README's table of speed from a result of benchmarks/scenarios/compare.yaml, between its two markers.

    python benchmarks/readme_table.py benchmarks/results/compare.json

HAProxy has no configuration that is best everywhere, so the better of its two is taken for each row. Ratios are paired
by round; one whose interval contains 1 is no difference. Numbers in brackets are invalid, see docs/benchmarking.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from userspace_proxy.bench.analysis.comparison import compare_targets
from userspace_proxy.bench.analysis.metrics import METRICS, Metric
from userspace_proxy.bench.analysis.summary import Cell, cell_of
from userspace_proxy.bench.output.files import read_report
from userspace_proxy.bench.results import Report

ROWS = [
    ("connections", "rate"), ("connections", "cpu per request"), ("requests 1", "rate"), ("requests 16", "rate"),
    ("requests 16", "cpu per request"), ("requests 256", "rate"), ("requests 256", "cpu per request"),
    ("fixed rate", "p50"), ("fixed rate", "p99"),
    ("download 1", "throughput"), ("download 1", "cpu per gb"), ("download 16", "throughput"),
    ("upload 16", "throughput"), ("udp", "rate"), ("udp", "cpu per request"), ("idle", "memory per connection"),
    ("idle", "descriptors per connection"),
]  # fmt: skip
OURS, NGINX, HAPROXIES = "proxy", "nginx", ("haproxy", "haproxy splice")


README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- make bench-compare writes what follows -->\n", "<!-- until here -->\n"


def main() -> None:
    table = "\n".join(lines(read_report(sys.argv[1]))) + "\n"
    print(table)
    before, after = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + table + END + after.partition(END)[2])


def lines(report: Report) -> Iterator[str]:
    yield "| test | this proxy | HAProxy, best | nginx | ÷ HAProxy | ÷ nginx |"
    yield "|---|---|---|---|---|---|"
    for test, name in ROWS:
        yield row(report, test, METRICS[name])
    machine = report.environment
    versions = dict.fromkeys(numbered(t.version) for t in report.targets if t.version and t.kind != "proxy")
    rounds = 1 + max(run.repetition for run in report.runs)
    yield ""
    yield f"{machine.cpu}, {machine.cpus} CPUs, {machine.kernel}; {', '.join(versions)}; {report.started[:10]};"
    yield f"medians of {rounds} interleaved rounds. In brackets: the harness or the machine was the limit."


def numbered(version: str) -> str:
    """Return `HAProxy 2.6.12` of `HAProxy version 2.6.12-1+deb12u4 2026/10/17 - https://haproxy.org/`."""
    found = re.search(r"(\w+) version:?\s+(?:\w+/)?([\d.]+)", version)
    return f"{found[1]} {found[2]}" if found else version


def row(report: Report, test: str, metric: Metric) -> str:
    """Return a line of the table."""
    cells = {t.name: cell_of(metric, runs, report) for t in report.targets if (runs := report.of(t.name, test))}
    haproxies = {name: cells[name] for name in HAPROXIES if name in cells and cells[name].value is not None}
    best = max(haproxies, key=lambda name: goodness(metric, haproxies[name]), default="")
    ratios = {
        comparison.theirs: f"{comparison.ratio.value:.2f} ({comparison.verdict})"
        if comparison.ratio
        else comparison.verdict
        for comparison in compare_targets(report)
        if comparison.test == test and comparison.metric.name == metric.name
    }
    shown = [cells[name].text(metric, with_interval=False) if name in cells else "–" for name in (OURS, best, NGINX)]
    return f"| {test}, {metric.label} | {' | '.join(shown)} | {ratios.get(best, '–')} | {ratios.get(NGINX, '–')} |"


def goodness(metric: Metric, cell: Cell) -> float:
    value = cell.value or 0.0
    return value if metric.better == "higher" else -value


if __name__ == "__main__":
    main()
