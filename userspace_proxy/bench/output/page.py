"""The HTML report: one file, no scripts, nothing loaded from anywhere. What matters comes first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from userspace_proxy.bench.analysis.comparison import Comparison, compare_targets
from userspace_proxy.bench.analysis.metrics import Metric, format_value
from userspace_proxy.bench.analysis.summary import Cell, TestSummary, summarise
from userspace_proxy.bench.analysis.thresholds import Threshold
from userspace_proxy.bench.output.plots import distribution_plot, forest_plot, latency_plot, timeline_plot
from userspace_proxy.bench.results import Finding, Report

_COLOURS = 6
_MIN_SAMPLES_OF_A_CURVE = 20


def page_of(report: Report) -> str:
    """Return the whole page."""
    colours = {t.name: f"var(--c{index % _COLOURS})" for index, t in enumerate(report.targets)}
    comparisons = compare_targets(report)
    sections = [
        _header(report),
        _differences(comparisons),
        *(_test_section(report, summary, colours) for summary in summarise(report)),
        _thresholds(report),
        _limits(report),
        _record(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)} · load balancer benchmark</title>\n<style>\n{_css()}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    names = ", ".join(target.name for target in report.targets)
    faults = [f for f in report.findings if f.status == "fault" and f.judged]
    missed = [o for o in report.thresholds if o.status == "missed" and o.judged]
    if faults or missed:
        said = [
            _count(len(faults), "fault") if faults else "",
            _count(len(missed), "threshold") + " missed" if missed else "",
        ]
        verdict = f'<p class="verdict bad">{" and ".join(filter(None, said))} on judged targets</p>'
    else:
        good = sum(f.status == "good" for f in report.findings)
        verdict = f'<p class="verdict good">No fault found on judged targets. {_count(good, "check")} passed.</p>'
    partial = '<p class="banner">This run was ended early. What stands here is partial.</p>' if report.partial else ""
    shown = [f for f in report.findings if f.status in ("fault", "suspect")]
    return (
        f"<header>\n<h1>{escape(report.name)}</h1>\n<p>{escape(names)}</p>\n"
        f'<p class="soft">{escape(report.started)} · {len(report.tests)} tests · {_count(_rounds(report), "round")} · '
        f"took {report.took_s:.0f} s · seed {report.seed}</p>\n"
        f"{verdict}{partial}\n{_findings(sorted(shown, key=lambda f: (not f.judged, f.status != 'fault')))}</header>\n"
    )


def _findings(findings: Iterable[Finding]) -> str:
    items = "".join(
        f'<li class="{f.status}"><b>{escape(" · ".join(p for p in (f.target, f.test, f.check) if p))}</b>'
        f"{escape(f.text)}{'' if f.judged else ' <span class=soft>(not judged)</span>'}</li>\n"
        for f in findings
    )
    return f'<ul class="findings">\n{items}</ul>\n' if items else ""


def _differences(comparisons: Sequence[Comparison]) -> str:
    plot = forest_plot(comparisons)
    if not plot:
        return ""
    return (
        "<h2>Differences</h2>\n"
        f'<p class="what">{escape(comparisons[0].ours)} divided by each of the others, round by round. '
        "An interval that contains 1 means: no difference was shown.</p>\n"
        f'<figure class="wide">{plot}</figure>\n'
    )


def _test_section(report: Report, summary: TestSummary, colours: Mapping[str, str]) -> str:
    by_target = {target: report.of(target, summary.test.name) for target in summary.targets}
    samples = sum(run.load.completed for runs in by_target.values() for run in runs)
    plots = [
        latency_plot(by_target, colours)
        if samples > _MIN_SAMPLES_OF_A_CURVE and summary.test.kind != "endings"
        else "",
        timeline_plot(by_target, colours) if summary.test.disturbed else "",
        distribution_plot(by_target, colours) if summary.test.kind not in ("download", "upload", "hold") else "",
    ]
    figures = "".join(f"<figure>{plot}</figure>\n" for plot in plots if plot)
    skipped = "".join(
        f'<p class="soft">{escape(name)} took no part: {escape(why)}</p>\n'
        for name, why in summary.test.skipped.items()
    )
    return (
        f'<h2>{escape(summary.test.name)}</h2>\n<p class="what">{escape(summary.test.description)}</p>\n'
        f'{_metric_table(summary, colours)}{skipped}<div class="plots">\n{figures}</div>\n'
    )


def _metric_table(summary: TestSummary, colours: Mapping[str, str]) -> str:
    heads = "".join(
        f'<th><span class="swatch" style="background:{colours[name]}"></span>{escape(name)}</th>'
        for name in summary.targets
    )
    rows = "".join(
        f"<tr><td>{escape(row.metric.label)}</td>{''.join(_cell(cell, row.metric) for cell in row.cells)}</tr>\n"
        for row in summary.rows
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'


def _cell(cell: Cell, metric: Metric) -> str:
    shown, _, interval = cell.text(metric).partition(" [")
    small = f"<small>[{escape(interval)}</small>" if interval else ""
    if cell.invalid:
        return f'<td class="invalid" title="{escape(cell.invalid)}">{escape(shown)}{small}</td>'
    return f"<td>{escape(shown)}{small}</td>"


def _thresholds(report: Report) -> str:
    if not report.thresholds:
        return ""
    rows = "".join(
        f'<tr><td>{escape(o.target)}</td><td class="left">{escape(o.test)}</td><td class="left">{escape(o.text)}</td>'
        f"<td>{escape(format_value(o.measured, Threshold.parse(o.text).metric.unit))}</td>"
        f'<td class="left {o.status}">{o.status}{"" if o.judged else " (not judged)"}</td></tr>\n'
        for o in sorted(report.thresholds, key=lambda o: (o.status == "met", not o.judged))
    )
    return (
        '<h2>Thresholds</h2>\n<div class="scroll"><table><thead><tr><th>target</th><th class="left">test</th>'
        '<th class="left">threshold</th><th>measured</th><th class="left">outcome</th></tr></thead>'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def _limits(report: Report) -> str:
    """Return what the harness saw of itself, which is what makes the rest believable."""
    reasons = dict.fromkeys(
        (run.target, run.test, limit.affects, limit.reason) for run in report.runs for limit in run.limits
    )
    listed = "".join(
        f'<li class="suspect"><b>{escape(f"{target} · {test} · {affects}")}</b>{escape(reason)}</li>\n'
        for target, test, affects, reason in reasons
    )
    intro = (
        "Numbers in brackets are invalid: the harness or the machine was the limit, not the target."
        if listed
        else "The harness was at no limit of its own in any run."
    )
    worst = max((run.watch.lag_p99_s for run in report.runs), default=0.0)
    busy = max((run.watch.generator_busy for run in report.runs), default=0.0)
    return (
        f'<h2>The harness itself</h2>\n<p class="what">{intro} 99 % of the requests that were due at a time of their '
        f"own were sent within {format_value(worst, 'seconds')} of it, in the worst run; the busiest generator was "
        f"{busy:.0%} busy.</p>\n"
        f'<ul class="findings">\n{listed}</ul>\n'
    )


def _record(report: Report) -> str:
    environment = report.environment
    facts = {
        "command": report.command,
        "kernel": environment.kernel,
        "CPU": f"{environment.cpu}, {environment.cpus} usable; harness on {environment.cpus_of_harness or 'all'}, "
        f"targets on {environment.cpus_of_targets or 'all'}",
        "load average at start": f"{environment.load_average:.2f}",
        "memory": format_value(environment.memory_bytes, "bytes"),
        **environment.versions,
        **{target.name: target.version for target in report.targets if target.version},
        **environment.sysctls,
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>\n" for name, value in facts.items())
    details = "".join(_target_details(report))
    scenario = escape(json.dumps(report.scenario, indent=2))
    return (
        f"<h2>How it was measured</h2>\n<dl>\n{listed}</dl>\n{details}"
        f"<details><summary>Scenario</summary><pre>{scenario}</pre></details>\n"
        f"<details><summary>All {len(report.findings)} checks</summary>{_findings(report.findings)}</details>\n"
        f"<footer>Confidence {report.confidence:.0%} for all differences together; differences below "
        f"{report.margin:.0%} count as none. Percentiles are of merged histograms, never averaged. Latency of open "
        "loops counts from when a request was due.</footer>\n"
    )


def _target_details(report: Report) -> Iterator[str]:
    for target in report.targets:
        said = target.failed or target.command
        configuration = f"\n\n{target.configuration}" if target.configuration else ""
        if said:
            shown = escape(said + configuration)
            yield f"<details><summary>{escape(target.name)}</summary><pre>{shown}</pre></details>\n"


def _rounds(report: Report) -> int:
    return max((run.repetition + 1 for run in report.runs), default=0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _css() -> str:
    return files("userspace_proxy.bench.output").joinpath("page.css").read_text(encoding="utf-8")
