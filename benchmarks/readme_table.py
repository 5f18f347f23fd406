"""Prints the README's table from a result of benchmarks/scenarios/compare.yaml.

    python benchmarks/readme_table.py benchmarks/results/compare.json

HAProxy has no configuration that is best everywhere, so the better of its two is taken for each row. Ratios are paired
by round; one whose interval contains 1 is no difference. Numbers in brackets are invalid, see docs/benchmarking.md.
"""

from __future__ import annotations

import sys

from userspace_proxy.bench.analysis.comparison import compare_targets
from userspace_proxy.bench.analysis.metrics import METRICS, Metric
from userspace_proxy.bench.analysis.summary import Cell, cell_of
from userspace_proxy.bench.output.files import read_report
from userspace_proxy.bench.results import Report

ROWS = [
    ("connections", "rate"), ("connections", "cpu per request"), ("requests 1", "rate"), ("requests 16", "rate"),
    ("requests 16", "cpu per request"), ("requests 256", "rate"), ("fixed rate", "p50"), ("fixed rate", "p99"),
    ("download 1", "throughput"), ("download 1", "cpu per gb"), ("download 16", "throughput"),
    ("upload 16", "throughput"), ("udp", "rate"), ("udp", "cpu per request"), ("idle", "memory per connection"),
    ("idle", "descriptors per connection"),
]  # fmt: skip
OURS, NGINX, HAPROXIES = "proxy", "nginx", ("haproxy", "haproxy splice")


def main() -> None:
    report = read_report(sys.argv[1])
    print("| test | this proxy | HAProxy, best | nginx | ÷ HAProxy | ÷ nginx |")
    print("|---|---|---|---|---|---|")
    for test, name in ROWS:
        print(row(report, test, METRICS[name]))
    machine = report.environment
    versions = "; ".join(dict.fromkeys(t.version for t in report.targets if t.version and t.kind != "proxy"))
    print(f"\n{machine.cpu}, {machine.cpus} CPUs, {machine.kernel}; {versions}. {report.started[:10]}, load average "
          f"{machine.load_average:.1f} at the start.")  # fmt: skip


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
