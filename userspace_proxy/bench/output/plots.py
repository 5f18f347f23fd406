"""The pictures of the HTML report. Each answers one question, and says it in its title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from userspace_proxy.bench.analysis.balance import names_of, shares
from userspace_proxy.bench.analysis.comparison import Comparison
from userspace_proxy.bench.analysis.metrics import format_value, total_balance
from userspace_proxy.bench.histograms import curve, merged
from userspace_proxy.bench.output.svg import Scale, element, linear, logarithmic, picture, polyline, text
from userspace_proxy.bench.results import RunResult

Runs = Sequence[RunResult]
ByTarget = Mapping[str, Runs]
Colours = Mapping[str, str]

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 96, 34, 40
_CURVE_STEPS = 80
_SHOWN_PERCENTS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
_LABEL_HEIGHT = 13.0


def latency_plot(by_target: ByTarget, colours: Colours) -> str:
    """Show the latency of each target by percentile, both axes logarithmic, so that the tail has its room."""
    curves = {}
    for target, runs in by_target.items():
        points = curve(merged(run.load.histogram for run in runs), [_percent(i) for i in range(_CURVE_STEPS)])
        if len(points) > 1:
            curves[target] = [(_nines(percent), seconds) for percent, seconds in points]
    if not curves:
        return ""
    values = [seconds for points in curves.values() for _, seconds in points]
    far = max(points[-1][0] for points in curves.values())
    x = Scale(lambda nines: _LEFT + nines / far * (_WIDTH - _LEFT - _RIGHT), ())
    y = logarithmic(min(values), max(values), _HEIGHT - _BOTTOM, _TOP)
    parts = [_title("Latency by percentile"), _y_axis(y, [format_value(tick, "seconds") for tick in y.ticks])]
    for percent in _SHOWN_PERCENTS:
        if _nines(percent) <= far * 1.001:
            parts.append(_x_tick(x.place(_nines(percent)), f"{percent:g} %"))
    ends = {}
    for target, points in curves.items():
        places = [(x.place(nines), y.place(seconds)) for nines, seconds in points]
        tip = element("title", f"{target}: {format_value(points[-1][1], 'seconds')} at {_label(points[-1][0])}")
        parts.append(element("g", tip, polyline(places, class_="line", stroke=colours[target]), class_="series"))
        ends[target] = places[-1]
    parts += _end_labels(ends, colours)
    return picture(_WIDTH, _HEIGHT, f"Latency by percentile of {', '.join(curves)}", *parts)


def timeline_plot(by_target: ByTarget, colours: Colours) -> str:
    """Show answers per second, failures and the slowest answer over the time of a test, with its events."""
    shown = {target: runs for target, runs in by_target.items() if any(run.load.timeline.completed for run in runs)}
    if not shown:
        return ""
    height, middle = 380, 232
    bin_s = next(iter(shown.values()))[0].load.timeline.bin_s
    duration_s = max(run.duration_s for runs in shown.values() for run in runs)
    right = _WIDTH - _RIGHT
    x = linear(0, duration_s, _LEFT, right)
    rates = {target: [value / bin_s for value in _mean_of_bins(runs)] for target, runs in shown.items()}
    slowest = {target: _max_of_bins(runs) for target, runs in shown.items()}
    y = linear(0, 1.2 * max(max(values) for values in rates.values()) or 1, middle - 24, _TOP, count=4)
    peaks = [value for values in slowest.values() for value in values if value > 0]
    slow = logarithmic(min(peaks, default=1e-3), max(peaks, default=1e-3), height - _BOTTOM, middle + 26)
    parts = [_title("Answers per second"), _y_axis(y, [f"{tick:,.0f}" for tick in y.ticks])]
    parts += [
        text(_LEFT, middle + 14, "Slowest answer", class_="title small"),
        _y_axis(slow, [format_value(tick, "seconds") for tick in slow.ticks]),
    ]
    parts += [_x_tick(x.place(tick), f"{tick:g} s", height=height) for tick in x.ticks]
    parts += _event_marks(next(iter(shown.values()))[0], x, height)
    ends = {}
    for target, values in rates.items():
        places = [(x.place((index + 0.5) * bin_s), y.place(value)) for index, value in enumerate(values)]
        parts.append(polyline(places, class_="line", stroke=colours[target]))
        ends[target] = places[-1]
        tops = [
            (x.place((index + 0.5) * bin_s), slow.place(value))
            for index, value in enumerate(slowest[target])
            if value > 0
        ]
        parts.append(polyline(tops, class_="line", stroke=colours[target]))
        parts += _failure_marks(shown[target], x, y.place(0), colours[target], list(rates).index(target))
    parts += _end_labels(ends, colours)
    return picture(_WIDTH, height, f"Timeline of {', '.join(shown)}", *parts)


def distribution_plot(by_target: ByTarget, colours: Colours) -> str:
    """Show which share of the connections each endpoint got, beside the fair share and what chance allows."""
    found = {target: balance for target, runs in by_target.items() if (balance := total_balance(runs))}
    found = {target: balance for target, balance in found.items() if len(shares(balance)) > 1 and any(shares(balance))}
    if not found:
        return ""
    column, gap = 22.0, 34.0
    widths = {target: column * len(shares(balance)) for target, balance in found.items()}
    width = max(_WIDTH, int(_LEFT + sum(widths.values()) + gap * len(found) + 20))
    highest = max(max(max(shares(b)) / sum(shares(b)), _fair_until(shares(b))) for b in found.values())
    y = linear(0, highest * 1.08, _HEIGHT - _BOTTOM - 14, _TOP, count=4)
    parts = [
        _title("Connections per endpoint"),
        _y_axis(y, [f"{tick * 100:g} %" for tick in y.ticks], right=width - 12),
    ]
    left = _LEFT + gap / 2
    for target, balance in found.items():
        counts = shares(balance)
        names = names_of(balance) + ["?"] * (len(counts) - len(names_of(balance)))
        total, fair = sum(counts), 1 / len(counts)
        spread = _fair_until(counts) - fair
        for index, (name, count) in enumerate(zip(names, counts, strict=False)):
            top = y.place(count / total)
            tip = element("title", f"{target}: endpoint {name} got {count} of {total} ({count / total:.1%})")
            bar = element(
                "rect", tip, x=left + index * column + 2, y=top, width=column - 4, rx=2,
                height=max(0.0, y.place(0) - top), fill=colours[target], class_="bar",
            )  # fmt: skip
            short = name if len(name) <= 3 else str(index + 1)
            parts += [
                bar,
                text(left + (index + 0.5) * column, y.place(0) + 14, short, class_="tick", text_anchor="middle"),
            ]
        right = left + widths[target]
        band_top, band_bottom = y.place(fair + spread), y.place(max(0.0, fair - spread))
        parts += [
            element("rect", x=left, y=band_top, width=right - left, height=band_bottom - band_top, class_="band"),
            element("line", x1=left, x2=right, y1=y.place(fair), y2=y.place(fair), class_="fair"),
            text(
                (left + right) / 2, y.place(0) + 32, target, class_="label", text_anchor="middle", fill=colours[target]
            ),
        ]
        left = right + gap
    parts.append(text(width - 12, 18, "dashed: fair share; band: 99 % of chance", class_="tick", text_anchor="end"))
    return picture(width, _HEIGHT, f"Connections per endpoint of {', '.join(found)}", *parts)


def _fair_until(counts: Sequence[int]) -> float:
    """Return the share that chance does not exceed 99 times out of 100 when all are alike."""
    fair = 1 / len(counts)
    return min(1.0, fair + 2.58 * math.sqrt(fair * (1 - fair) / sum(counts)))


def forest_plot(comparisons: Sequence[Comparison]) -> str:
    """Show every difference with its interval: right of 1 is more, and the colour says whether that is good."""
    shown = [c for c in comparisons if c.ratio is not None]
    if not shown:
        return ""
    low = min(0.5, *(max(c.ratio.low, 0.02) for c in shown if c.ratio))
    high = max(2.0, *(min(c.ratio.high, 50.0) for c in shown if c.ratio))
    row, left, right, width = 22, 300, 150, 900
    height = 44 + row * len(shown) + 30
    x = logarithmic(low, high, left, width - right)
    parts = [element("line", x1=x.place(1), x2=x.place(1), y1=30, y2=height - 26, class_="one")]
    for tick in x.ticks:
        parts.append(text(x.place(tick), height - 8, f"{tick:g}×", class_="tick", text_anchor="middle"))
        parts.append(element("line", x1=x.place(tick), x2=x.place(tick), y1=30, y2=height - 26, class_="grid"))
    for index, comparison in enumerate(shown):
        ratio, y = comparison.ratio, 44.0 + index * row
        assert ratio is not None
        kind = comparison.verdict.replace(" ", "-")
        from_, to = x.place(min(max(ratio.low, low), high)), x.place(min(max(ratio.high, low), high))
        parts += [
            text(left - 16, y + 4, f"{comparison.test} · {comparison.metric.label} ÷ {comparison.theirs}", class_="row",
                 text_anchor="end"),
            element("line", x1=from_, x2=to, y1=y, y2=y, class_=f"whisker {kind}"),
            element("circle", element("title", f"{ratio.value:.3f} [{ratio.low:.3f} – {ratio.high:.3f}]"),
                    cx=x.place(min(max(ratio.value, low), high)), cy=y, r=4.5, class_=f"dot {kind}"),
            text(width - right + 14, y + 4, f"{ratio.value:.2f}× {comparison.verdict}", class_=f"row {kind}"),
        ]  # fmt: skip
    return picture(width, height, "Differences with their intervals", *parts)


def _title(content: str) -> str:
    return text(_LEFT, 18, content, class_="title small")


def _y_axis(y: Scale, labels: Sequence[str], right: float = _WIDTH - _RIGHT) -> str:
    parts = []
    for tick, label in zip(y.ticks, labels, strict=True):
        parts.append(element("line", x1=_LEFT, x2=right, y1=y.place(tick), y2=y.place(tick), class_="grid"))
        parts.append(text(_LEFT - 8, y.place(tick) + 4, label, class_="tick", text_anchor="end"))
    return "".join(parts)


def _x_tick(x: float, label: str, height: int = _HEIGHT) -> str:
    return element("line", x1=x, x2=x, y1=_TOP, y2=height - _BOTTOM, class_="grid") + text(
        x, height - _BOTTOM + 18, label, class_="tick", text_anchor="middle"
    )


def _end_labels(ends: Mapping[str, tuple[float, float]], colours: Colours) -> list[str]:
    """Return the names of lines at their ends, moved apart where they would lie upon each other."""
    parts, last = [], -math.inf
    for target, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        last = max(y, last + _LABEL_HEIGHT)
        parts.append(text(min(x, _WIDTH - _RIGHT) + 7, last + 4, target, class_="label", fill=colours[target]))
    return parts


def _event_marks(run: RunResult, x: Scale, height: int) -> list[str]:
    parts = []
    for index, event in enumerate(run.events):
        place = x.place(min(max(event.at, 0.0), run.duration_s))
        label = f"{event.kind} {event.backend or ''}".strip()
        parts.append(element("line", x1=place, x2=place, y1=_TOP - 4, y2=height - _BOTTOM, class_="event"))
        parts.append(text(place + 4, _TOP + 8 + 12 * (index % 2), label, class_="event-label"))
    return parts


def _failure_marks(runs: Runs, x: Scale, y: float, colour: str, row: int) -> list[str]:
    """Return a mark for each bin with failures, larger where there were more."""
    parts = []
    bin_s = runs[0].load.timeline.bin_s
    failed = [sum(values) for values in zip(*(run.load.timeline.failed for run in runs), strict=False)]
    for index, count in enumerate(failed):
        if count:
            tip = element("title", f"{count} failures")
            radius = min(7.0, 2.5 + math.log2(count))
            parts.append(
                element("circle", tip, cx=x.place((index + 0.5) * bin_s), cy=y - 6.0 * row, r=radius, class_="failure",
                        stroke=colour)
            )  # fmt: skip
    return parts


def _mean_of_bins(runs: Runs) -> list[float]:
    return [fmean(values) for values in zip(*(run.load.timeline.completed for run in runs), strict=False)]


def _max_of_bins(runs: Runs) -> list[float]:
    return [max(values) for values in zip(*(run.load.timeline.slowest_s for run in runs), strict=False)]


def _percent(index: int) -> float:
    return 100.0 * (1 - 10 ** (-5.0 * index / _CURVE_STEPS))


def _nines(percent: float) -> float:
    return -math.log10(1 - percent / 100.0) if percent < 100 else 6.0


def _label(nines: float) -> str:
    return f"{100 * (1 - 10**-nines):.4g} %"
