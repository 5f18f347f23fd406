"""Is there a difference? Asked of many pairs at once, so the confidence is shared out among all of them (Bonferroni):
a run of a target against itself has to say "no difference" everywhere, 19 times out of 20.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from userspace_proxy.bench.analysis.metrics import METRICS, Metric, valid_for
from userspace_proxy.bench.analysis.statistics import Interval, ratio_interval
from userspace_proxy.bench.results import Report, RunResult

COMPARED = ("rate", "throughput", "p50", "p99", "cpu per request", "cpu per gb")

Runs = Sequence[RunResult]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one test, `ours` against `theirs`.

    `verdict` is better, worse, different, no difference, invalid or unknown.
    """

    test: str
    metric: Metric
    ours: str
    theirs: str
    ratio: Interval | None
    verdict: str


@dataclass(frozen=True, slots=True)
class _Pair:
    test: str
    metric: Metric
    ours: str
    theirs: str
    our_values: dict[int, float]
    their_values: dict[int, float]


def compare_targets(report: Report) -> list[Comparison]:
    """Return the first judged target against each of the others."""
    names = [target.name for target in report.targets]
    subject = next((target.name for target in report.targets if target.judged), names[0] if names else "")
    pairs = [
        pair
        for other in names
        if other != subject
        for test in report.tests
        for pair in _pairs(test.name, (subject, report.of(subject, test.name)), (other, report.of(other, test.name)),
                           open_loop=test.is_open_loop)
    ]  # fmt: skip
    return _decide(pairs, report.confidence, report.margin, report.seed, paired=True)


def compare_reports(before: Report, after: Report) -> list[Comparison]:
    """Return each target of `after` against the one of the same name in `before`, for the tests that both have."""
    pairs: list[_Pair] = []
    tests_before = {test.name: test for test in before.tests}
    for target in after.targets:
        for test in after.tests:
            if test.name in tests_before:
                old, new = before.of(target.name, test.name), after.of(target.name, test.name)
                pairs += _pairs(test.name, (target.name, new), (target.name, old), open_loop=test.is_open_loop)
    return _decide(pairs, after.confidence, after.margin, after.seed, paired=False)


def _pairs(test: str, ours: tuple[str, Runs], theirs: tuple[str, Runs], *, open_loop: bool) -> Iterator[_Pair]:
    for name in COMPARED:
        metric = METRICS[name]
        if metric.name == "rate" and open_loop:
            continue  # it is what we have set
        ours_values, theirs_values = _values(metric, ours[1]), _values(metric, theirs[1])
        if metric.of(ours[1]) is not None and metric.of(theirs[1]) is not None:
            yield _Pair(test, metric, ours[0], theirs[0], ours_values, theirs_values)


def _values(metric: Metric, runs: Runs) -> dict[int, float]:
    """Return the value of each valid repetition."""
    found = {run.repetition: metric.of([run]) for run in valid_for(metric, runs)}
    return {repetition: value for repetition, value in found.items() if value is not None}


def _decide(pairs: Sequence[_Pair], confidence: float, margin: float, seed: int, *, paired: bool) -> list[Comparison]:
    each = 1 - (1 - confidence) / max(1, len(pairs))
    found = []
    for pair in pairs:
        ours, theirs = pair.our_values, pair.their_values
        if paired:  # only what was measured in the same round, and valid on both sides
            both = ours.keys() & theirs.keys()
            ours, theirs = ({r: values[r] for r in sorted(both)} for values in (ours, theirs))
        ratio = ratio_interval([*ours.values()], [*theirs.values()], each, paired=paired, seed=seed)
        if not pair.our_values or not pair.their_values:
            verdict = "invalid"
        elif ratio is None:
            verdict = "unknown"
        else:
            verdict = _verdict(pair.metric, ratio, margin)
        found.append(Comparison(pair.test, pair.metric, pair.ours, pair.theirs, ratio, verdict))
    return found


def _verdict(metric: Metric, ratio: Interval, margin: float) -> str:
    is_larger = ratio.low > 1 and ratio.value > 1 + margin
    is_smaller = ratio.high < 1 and ratio.value < 1 / (1 + margin)
    if not is_larger and not is_smaller:
        return "no difference"
    if metric.better == "neither":
        return "different"
    return "better" if is_larger is (metric.better == "higher") else "worse"
