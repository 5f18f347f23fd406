"""What an event did to clients, and how long: measured from the event to the last request that began and went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from userspace_proxy.bench.analysis.balance import Assignment
from userspace_proxy.bench.analysis.judgement import Judgement, fault, good, unknown
from userspace_proxy.bench.results import EventOutcome

_SETTLED_SHARE = 0.2  # no trouble in the last fifth before the next event: it was over
_TROUBLE = frozenset({"kill", "freeze", "refuse", "reset", "half_close", "delay", "slow", "remove", "churn"})


@dataclass(frozen=True, slots=True)
class Happened:
    """An event as it was carried out: when, to whom, and when the next thing happened."""

    kind: str
    at: float
    until: float
    backend: int = 0
    backend_name: str = ""
    fault: str = ""


def outcome_of(
    event: Happened, failed: Sequence[float], slow: Sequence[float], assignments: Sequence[Assignment]
) -> EventOutcome:
    """Return what an event did. `failed` and `slow` are when requests were due that failed, or took too long."""
    bad = sorted(due for due in (*failed, *slow) if event.at <= due < event.until)
    uses = [at for at, _, backend in assignments if backend == event.backend_name and event.at <= at < event.until]
    settled_at = event.until - _SETTLED_SHARE * (event.until - event.at)
    recovered_s: float | None = 0.0
    if bad:
        recovered_s = bad[-1] - event.at if bad[-1] < settled_at else None
    return EventOutcome(
        kind=event.kind,
        at=event.at,
        backend=event.backend,
        until=event.until,
        failures=sum(event.at <= due < event.until for due in failed),
        slow=sum(event.at <= due < event.until for due in slow),
        recovered_s=recovered_s,
        first_use_s=min(uses) - event.at if uses else None,
        last_use_s=max(uses) - event.at if uses else None,
        fault=event.fault,
    )


def judge_event(outcomes: Sequence[EventOutcome], limit_s: float) -> Judgement:
    """Say whether the clients got over an event in time, in every repetition."""
    kind = outcomes[0].kind
    if any(outcome.fault for outcome in outcomes):
        return unknown(next(outcome.fault for outcome in outcomes if outcome.fault))
    if kind == "add":
        return _judge_add(outcomes, limit_s)
    if kind == "remove":
        uses = [outcome.last_use_s or 0.0 for outcome in outcomes]
        if max(uses) > limit_s:
            return fault(f"still used {max(uses):.2f} s after it was removed")
    if kind not in _TROUBLE:
        return unknown("nothing is expected of it")
    failures, slow = sum(o.failures for o in outcomes), sum(o.slow for o in outcomes)
    facts = f"{failures} requests failed, {slow} were slow"
    times = [outcome.recovered_s for outcome in outcomes]
    if any(time is None for time in times):
        return fault(f"not over before the next event or the end: {facts}")
    worst = max(time for time in times if time is not None)
    if worst > limit_s:
        return fault(f"over after {worst:.2f} s only: {facts}")
    return good(f"over after {worst:.2f} s at most: {facts}")


def _judge_add(outcomes: Sequence[EventOutcome], limit_s: float) -> Judgement:
    times = [outcome.first_use_s for outcome in outcomes]
    if any(time is None for time in times):
        return fault("the added endpoint was never used")
    worst = max(time for time in times if time is not None)
    if worst > limit_s:
        return fault(f"the added endpoint was used after {worst:.2f} s only")
    return good(f"the added endpoint was used after {worst:.2f} s")
