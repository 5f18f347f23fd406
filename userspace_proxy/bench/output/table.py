"""The terminal's view of a report: numbers, then what is wrong, then whether the thresholds were met."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from userspace_proxy.bench.analysis.comparison import Comparison
from userspace_proxy.bench.analysis.metrics import format_value
from userspace_proxy.bench.analysis.summary import TestSummary, summarise
from userspace_proxy.bench.analysis.thresholds import Threshold
from userspace_proxy.bench.results import Finding, Report, ThresholdOutcome

_MARKS = {
    "fault": ("✗", "bold red"), "suspect": ("?", "yellow"), "good": ("✓", "green"), "unknown": ("·", "dim"),
    "missed": ("✗", "bold red"), "invalid": ("!", "yellow"), "met": ("✓", "green"),
}  # fmt: skip
_WITH_INTERVALS = 3  # with more targets than that a terminal has no room for intervals
_ANYTHING = 100.0  # an interval that reaches further excludes nothing
_VERDICT_STYLE = {"better": "green", "worse": "red", "no difference": "dim", "invalid": "yellow", "unknown": "dim"}


def make_console() -> Console:
    """Return a console that leaves text alone, and does not fold it where no terminal sets a width."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 240
    return console


def print_report(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print all that a report says."""
    for summary in summarise(report):
        title = Text.assemble((summary.test.name, "bold"), ("  " + summary.test.description, "dim"))
        console.print(title, soft_wrap=True)
        console.print(_test_table(summary))
        for name, reason in summary.test.skipped.items():
            console.print(Text(f"  {name} took no part: {reason}", style="dim"))
        console.print()
    _print_limits(report, console)
    _print_findings(report.findings, console, verbose=verbose)
    _print_thresholds(report.thresholds, console, verbose=verbose)
    if report.partial:
        console.print(Text("Ended early: these results are partial.", style="bold yellow"))


def print_comparisons(comparisons: Sequence[Comparison], confidence: float, console: Console) -> None:
    """Print how the targets of one report differ from those of another."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("TEST", "TARGET", "METRIC", "AFTER ÷ BEFORE", "VERDICT"):
        table.add_column(column)
    for comparison in comparisons:
        style = _VERDICT_STYLE.get(comparison.verdict, "")
        table.add_row(
            comparison.test, comparison.ours, comparison.metric.label, ratio_text(comparison),
            Text(comparison.verdict, style=style),
        )  # fmt: skip
    console.print(table)
    console.print(Text(f"Intervals hold for all rows together with {confidence:.0%} confidence.", style="dim"))


def ratio_text(comparison: Comparison) -> str:
    """Return the ratio with its interval."""
    ratio = comparison.ratio
    if ratio is None:
        return "–"
    high = f"{ratio.high:.2f}" if ratio.high < _ANYTHING else "∞"
    return f"{ratio.value:.2f}× [{ratio.low:.2f} – {high}]"


def _test_table(summary: TestSummary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", style="dim", min_width=24)
    for name in summary.targets:
        table.add_column(name, justify="right")
    others = list(dict.fromkeys(c.theirs for row in summary.rows for c in row.comparisons))
    subject = next((c.ours for row in summary.rows for c in row.comparisons), "")
    for other in others:
        table.add_column(f"{subject} ÷ {other}")
    is_wide = len(summary.targets) > _WITH_INTERVALS
    for row in summary.rows:
        cells = [
            Text(cell.text(row.metric, with_interval=not is_wide), style="yellow" if cell.invalid else "")
            for cell in row.cells
        ]
        by_other = {comparison.theirs: comparison for comparison in row.comparisons}
        ratios = [_ratio_cell(by_other.get(other), with_interval=not is_wide) for other in others]
        table.add_row(row.metric.label, *cells, *ratios)
    return table


def _ratio_cell(comparison: Comparison | None, *, with_interval: bool) -> Text:
    if comparison is None:
        return Text("")
    if comparison.ratio is None:
        return Text(comparison.verdict, style="dim")
    ratio = ratio_text(comparison) if with_interval else f"{comparison.ratio.value:.2f}×"
    return Text(f"{ratio} {comparison.verdict}", style=_VERDICT_STYLE.get(comparison.verdict, ""))


def _print_limits(report: Report, console: Console) -> None:
    """Say which numbers stand in brackets, and why."""
    reasons = dict.fromkeys(
        (run.test, run.target, limit.affects, limit.reason) for run in report.runs for limit in run.limits
    )
    by_place: dict[tuple[str, str, str], str] = {}
    for test, target, affects, reason in reasons:
        by_place.setdefault((test, target, affects), reason)
    if by_place:
        console.print(
            Text("Numbers in brackets are invalid, the harness or the machine was the limit:", style="yellow")
        )
        for (test, target, affects), reason in by_place.items():
            console.print(f"  {test} · {target} · {affects}: {reason}", soft_wrap=True)
        console.print()


def _print_findings(findings: Sequence[Finding], console: Console, *, verbose: bool) -> None:
    order = {"fault": 0, "suspect": 1, "unknown": 2, "good": 3}
    shown = [f for f in findings if verbose or f.status in ("fault", "suspect")]
    for finding in sorted(shown, key=lambda finding: order[finding.status]):
        mark, style = _MARKS[finding.status]
        place = " · ".join(part for part in (finding.target, finding.test, finding.check) if part)
        note = "" if finding.judged else " (not judged)"
        console.print(Text.assemble((f"{mark} ", style), (place, "bold"), f"  {finding.text}{note}"), soft_wrap=True)
    good = sum(finding.status == "good" for finding in findings)
    console.print(Text(f"✓ {good} of {len(findings)} checks found nothing wrong.", style="green" if good else "dim"))
    console.print()


def _print_thresholds(outcomes: Sequence[ThresholdOutcome], console: Console, *, verbose: bool) -> None:
    for outcome in outcomes:
        if outcome.status == "met" and not verbose:
            continue
        mark, style = _MARKS[outcome.status]
        place = f"{outcome.target} · {outcome.test}"
        note = "" if outcome.judged else " (not judged)"
        measured = format_value(outcome.measured, Threshold.parse(outcome.text).metric.unit)
        line = Text.assemble(
            (f"{mark} ", style), (place, "bold"), f"  {outcome.text}: {outcome.status}, {measured}{note}"
        )
        console.print(line, soft_wrap=True)
    met = sum(outcome.status == "met" for outcome in outcomes)
    if outcomes:
        console.print(Text(f"✓ {met} of {len(outcomes)} thresholds met.", style="green" if met else "dim"))
        console.print()
