"""All that a report says of its targets: findings of the checks, and thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from userspace_proxy.bench.analysis import affinity, balance
from userspace_proxy.bench.analysis.failover import judge_event
from userspace_proxy.bench.analysis.judgement import Judgement, fault, good, suspect, unknown
from userspace_proxy.bench.analysis.metrics import total_balance
from userspace_proxy.bench.analysis.stalls import judge_all_tests, judge_stalls
from userspace_proxy.bench.analysis.statistics import wilson
from userspace_proxy.bench.analysis.thresholds import effective
from userspace_proxy.bench.results import (
    Datagrams,
    Finding,
    Report,
    RunResult,
    Survival,
    TargetRecord,
    ThresholdOutcome,
)
from userspace_proxy.bench.scenario import Scenario, Test

Runs = Sequence[RunResult]
Said = Iterator[tuple[str, Judgement]]

_LOSS_CONFIDENCE = 0.95
_MIN_LOST_ALONE = 3
_LOST_ANYHOW = 0.2
_DIRECT = "direct"


def judge(report: Report, scenario: Scenario) -> None:
    """Fill in the findings and thresholds of a report from its runs."""
    report.findings, report.thresholds = [], []
    direct = next((target.name for target in report.targets if target.kind == _DIRECT), None)
    for target in report.targets:
        if target.failed:
            report.findings.append(
                Finding(check="start", target=target.name, test="", status="fault" if target.judged else "unknown",
                        text=target.failed, judged=target.judged)
            )  # fmt: skip
        for test in scenario.tests:
            runs = report.of(target.name, test.name)
            if not runs:
                continue
            reference = report.of(direct, test.name) if direct and direct != target.name else []
            for check, judgement in _check(test, runs, reference, is_direct=target.name == direct):
                report.findings.append(
                    Finding(check=check, target=target.name, test=test.name, status=judgement.status,
                            text=judgement.text, judged=target.judged)
                )  # fmt: skip
            report.thresholds += _thresholds(scenario, test, target, runs)
        report.findings += _stalls_of_all_tests(report, scenario, target)


def _stalls_of_all_tests(report: Report, scenario: Scenario, target: TargetRecord) -> Iterator[Finding]:
    """Yield that a target stalls where single tests give rise to no more than suspicion."""
    said = [f.status for f in report.findings if f.check == "stalls" and f.target == target.name]
    asked = {test.name for test in scenario.tests if test.checks.stalls and not test.events}
    runs = [run for run in report.runs if run.test in asked]
    directs = {each.name for each in report.targets if each.kind == _DIRECT}
    together = judge_all_tests(
        [run.load.stalls for run in runs if run.target == target.name],
        [run.load.stalls for run in runs if run.target in directs - {target.name}],
    )
    if together is not None and "fault" not in said:
        yield Finding(check="stalls", target=target.name, test="all tests", status=together.status,
                      text=together.text, judged=target.judged)  # fmt: skip


def exit_code(report: Report) -> int:
    """Return 0 when all that is judged is as it should be, 1 when something is not, 3 when nobody can tell."""
    findings = [finding for finding in report.findings if finding.judged]
    outcomes = [outcome for outcome in report.thresholds if outcome.judged]
    if any(finding.status == "fault" for finding in findings) or any(
        outcome.status == "missed" for outcome in outcomes
    ):
        return 1
    return 3 if any(outcome.status in ("invalid", "unknown") for outcome in outcomes) else 0


def _check(test: Test, runs: Runs, reference: Runs, *, is_direct: bool) -> Said:
    checks, disturbed = test.checks, bool(test.events)
    if checks.errors and not disturbed:
        yield "errors", _judge_errors(runs)
    if not is_direct:
        yield from _check_balance(test, runs)
    if checks.stalls and not disturbed and any(run.load.completed or run.load.moved_bytes for run in runs):
        answered = sum(run.load.completed or run.load.moved_bytes > 0 for run in runs)
        stalls = [run.load.stalls for run in runs]
        measured_s = sum(run.duration_s for run in runs)
        yield "stalls", judge_stalls(stalls, [run.load.stalls for run in reference], answered, measured_s)
    if checks.udp and any(run.load.datagrams for run in runs):
        yield from _check_datagrams(test, runs, reference)
    if checks.endings and any(run.load.endings for run in runs):
        yield from _check_endings(runs)
    if checks.survival:
        yield from _check_survival(test, runs)
    if checks.failover and disturbed and not is_direct:
        for index, event in enumerate(runs[0].events):
            outcomes = [
                run.events[index] for run in runs if index < len(run.events) and run.events[index].kind == event.kind
            ]
            judgement = judge_event(outcomes, checks.recovery_limit)
            if judgement.status != "unknown" or any(outcome.fault for outcome in outcomes):
                yield f"{event.kind} {event.backend or ''}".strip(), judgement


def _check_balance(test: Test, runs: Runs) -> Said:
    found = total_balance(runs)
    if found is None or test.load.kind in ("download", "upload"):
        return
    if test.affinity is not None:
        if test.checks.affinity:
            yield from _check_affinity(runs, len(balance.shares(found)))
        return
    if test.checks.balance != "any" and not test.events:
        yield "distribution", balance.judge_distribution(found)
    if test.checks.balance == "round_robin":
        yield "round robin", balance.judge_round_robin(found)
    if test.checks.stickiness:
        yield "stickiness", balance.judge_stickiness(found)
        if test.checks.balance != "any" and not test.events:
            yield "runs", balance.judge_runs(found)


def _check_affinity(runs: Runs, endpoints: int) -> Said:
    found = affinity.total(run.load.affinity for run in runs if run.load.affinity)
    yield "affinity", affinity.judge_kept(found)
    yield "affinity time-out", affinity.judge_expiry(found, endpoints)
    if any(event.kind == "remove" for run in runs for event in run.events):
        yield "affinity after removal", affinity.judge_removal(found)


def _judge_errors(runs: Runs) -> Judgement:
    total, kinds = sum(run.load.failed for run in runs), dict[str, int]()
    for run in runs:
        for kind, count in run.load.failures.items():
            kinds[kind] = kinds.get(kind, 0) + count
    asked = sum(run.load.sent for run in runs)
    if total:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        return fault(f"{total} of {asked} requests failed: {shown}")
    if asked == 0 and not any(run.load.moved_bytes for run in runs):
        return fault("nothing was answered at all")
    return good(f"none among {asked}" if asked else "none")


def _check_datagrams(test: Test, runs: Runs, reference: Runs) -> Said:
    found = [run.load.datagrams for run in runs if run.load.datagrams]
    alone = [run.load.datagrams for run in reference if run.load.datagrams]
    own = any(limit.affects in ("loss", "all") for run in runs for limit in run.limits)
    yield "udp loss", _judge_loss(found, alone, test.checks.udp_loss, is_own=own)
    if not sum(d.answered_in_all for d in found):
        return
    strange = {
        "twice": sum(d.duplicates for d in found),
        "damaged": sum(d.damaged for d in found),
        "to the wrong flow": sum(d.foreign for d in found),
    }
    shown = ", ".join(f"{count} {what}" for what, count in strange.items() if count)
    yield "udp delivery", fault(f"datagrams came {shown}") if shown else good("each came once, whole, to its flow")
    moved, flows = sum(d.flows_moved for d in found), sum(d.flows for d in found)
    if not test.events:
        said = (
            fault(f"{moved} of {flows} flows changed their endpoint")
            if moved
            else good(f"{flows} flows kept their endpoint")
        )
        yield "udp sessions", said


def _judge_loss(found: Sequence[Datagrams], alone: Sequence[Datagrams], tolerated: float, *, is_own: bool) -> Judgement:
    sent, lost = (sum(sum(getattr(d, name).values()) for d in found) for name in ("sent", "lost"))
    if sent == 0:
        return unknown("no datagram was sent")
    sizes = sorted({size for d in found for size in d.lost})
    by_size = ", ".join(
        f"{sum(d.lost.get(size, 0) for d in found)} of {sum(d.sent.get(size, 0) for d in found)} of {size} bytes"
        for size in sizes
    )
    facts = (
        f"{lost} of {sent} datagrams lost"
        + (f" ({by_size})" if len(sizes) > 1 or lost < sent else "")
        + _direction(found, lost)
    )
    dead = sum(d.flows_dead for d in found)
    facts += f", {dead} flows had no answer at all" if dead else ""
    if lost == 0:
        return good(f"none of {sent} datagrams lost")
    if is_own:
        return unknown(f"{facts}; some in the harness' own buffers")
    if wilson(lost, sent, _LOSS_CONFIDENCE).low <= tolerated:
        return suspect(f"{facts}: too few to tell")
    alone_sent, alone_lost = (sum(sum(getattr(d, name).values()) for d in alone) for name in ("sent", "lost"))
    if alone_lost and wilson(lost, sent).low <= wilson(alone_lost, alone_sent).high:
        return suspect(f"{facts}; but so are {alone_lost} of {alone_sent} without it")
    if sum(d.lost_alone for d in found) < _MIN_LOST_ALONE and lost < _LOST_ANYHOW * sent:
        return suspect(f"{facts}: in a burst, as when a machine stands still")
    return fault(f"loses datagrams: {facts}")


def _direction(found: Sequence[Datagrams], lost: int) -> str:
    """Return on which way datagrams were lost, where backends of ours have counted."""
    if not lost or any(d.reached is None for d in found):
        return ""
    before = sum(max(0, d.sent_in_all - (d.reached or 0)) for d in found)
    back = sum(max(0, (d.reached or 0) - d.answered_in_all) for d in found)
    return f", {before} before a backend saw them and {back} on the way back (warm-up included)"


def _check_endings(runs: Runs) -> Said:
    for probe in dict.fromkeys(probe for run in runs for probe in run.load.endings):
        endings = [run.load.endings[probe] for run in runs if probe in run.load.endings]
        tried, faithful = sum(e.tried for e in endings), sum(e.faithful for e in endings)
        outcomes: dict[str, int] = {}
        for ending in endings:
            for outcome, count in ending.outcomes.items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        if faithful == tried:
            yield probe, good(f"passed on as it was, {tried} times")
        else:
            worst = max((o for o in outcomes), key=lambda outcome: outcomes[outcome])
            yield probe, fault(f"not passed on as it was {tried - faithful} of {tried} times, mostly {worst}")


def _check_survival(test: Test, runs: Runs) -> Said:
    found: list[Survival] = []
    for run in runs:
        held = run.background.survival if run.background else run.load.survival if test.load.kind == "hold" else None
        if held is not None:
            found.append(held)
    if not found:
        return
    opened, broken, expected = (sum(getattr(s, name) for s in found) for name in ("opened", "broken", "expected"))
    if broken > expected:
        kinds = sorted({kind for s in found for kind in s.kinds})
        yield (
            "survival",
            fault(f"{broken - expected} of {opened} long-lived connections broke without need ({', '.join(kinds)})"),
        )
    else:
        yield "survival", good(f"{opened} long-lived connections, {broken} broke, as their endpoint did" if broken else
                               f"all {opened} long-lived connections lived on")  # fmt: skip


def _thresholds(scenario: Scenario, test: Test, target: TargetRecord, runs: Runs) -> Iterator[ThresholdOutcome]:
    for threshold in effective(scenario.thresholds, test.thresholds):
        status, measured = threshold.measure(runs)
        is_own = threshold.text in {" ".join(text.split()) for text in test.thresholds}
        if status == "unknown" and not is_own:
            continue  # a threshold of the scenario holds where it can be measured
        yield ThresholdOutcome(
            text=threshold.text,
            target=target.name,
            test=test.name,
            status=status,
            measured=measured,
            judged=target.judged,
        )
