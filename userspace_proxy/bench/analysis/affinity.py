"""Whether clients stay at their endpoint: while the time-out runs, after it, and when endpoints come and go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from userspace_proxy.bench.analysis.balance import Assignment
from userspace_proxy.bench.analysis.judgement import Judgement, fault, good, unknown
from userspace_proxy.bench.analysis.statistics import excess_z
from userspace_proxy.bench.results import Affinity

Span = tuple[float, float]

_SLACK_S = 0.2  # a gap that is near the time-out may fall on either side
_EXPIRES_WITHIN_S = 1.0  # balancers look for expired clients now and then
_LEARNS_WITHIN_S = 1.5  # so long it may take until a change of endpoints is known everywhere
_MIN_EXPIRED = 12
_OUTLASTS_Z = 4.0
_OF_PEOPLE = ("clients", "violating_clients")


def follow(
    assignments: Sequence[Assignment],
    timeout_s: float,
    *,
    changes: Sequence[float] = (),
    unusable: Mapping[str, Sequence[Span]],
    removed: Mapping[str, Sequence[Span]],
) -> Affinity:
    """Return what became of each client's return to the balancer, with its gap since the visit before.

    `changes` are the times at which endpoints came or went. From an `unusable` endpoint clients may move away; one that
    was `removed` must not be used soon after.
    """
    result = Affinity()
    last: dict[int, tuple[float, str]] = {}
    violating: set[int] = set()
    for at, client, backend in assignments:
        if client < 0:
            continue
        result.removed += any(from_ + _LEARNS_WITHIN_S < at < to for from_, to in removed.get(backend, ()))
        before = last.get(client)
        last[client] = (at, backend)
        if before is None:
            continue
        came, kept_by = before
        if any(from_ <= at and came < to for from_, to in unusable.get(kept_by, ())):
            continue  # it had to move, or still met the old one while that was being found out
        gap_s, same = at - came, backend == kept_by
        if gap_s > timeout_s + _EXPIRES_WITHIN_S:
            result.expired_pairs += 1
            result.expired_same += same
        elif gap_s < timeout_s - _SLACK_S:
            is_over_change = any(came < change <= at for change in changes)
            result.kept_pairs += 1
            result.pairs_over_change += is_over_change
            if not same:
                result.moved_by_change += is_over_change
                result.violations += 1
                violating.add(client)
    result.clients, result.violating_clients = len(last), len(violating)
    return result


def total(affinities: Iterable[Affinity]) -> Affinity:
    """Return the sums over repetitions; clients are the most seen in any."""
    result = Affinity()
    for affinity in affinities:
        for name in Affinity.__struct_fields__:
            so_far, more = getattr(result, name), getattr(affinity, name)
            setattr(result, name, max(so_far, more) if name in _OF_PEOPLE else so_far + more)
    return result


def judge_kept(affinity: Affinity) -> Judgement:
    """Say whether clients that came back in time met their endpoint."""
    if affinity.kept_pairs == 0:
        return unknown("no client came back within the time-out")
    facts = f"{affinity.violations} of {affinity.kept_pairs} returns within the time-out met another endpoint"
    if affinity.violations:
        after = f", {affinity.moved_by_change} of them after a change of endpoints" if affinity.moved_by_change else ""
        return fault(f"affinity broken: {facts} ({affinity.violating_clients} of {affinity.clients} clients{after})")
    return good(f"affinity kept: {facts}")


def judge_expiry(affinity: Affinity, endpoints: int) -> Judgement:
    """Say whether clients that came back too late were balanced anew."""
    if affinity.expired_pairs < _MIN_EXPIRED or endpoints < 2:
        return unknown(f"{affinity.expired_pairs} returns after the time-out are too few to tell")
    same, pairs, expected = affinity.expired_same, affinity.expired_pairs, 1 / endpoints
    facts = f"{same} of {pairs} returns after the time-out met the old endpoint, {expected:.0%} expected"
    if excess_z(same, pairs, expected) > _OUTLASTS_Z and same / pairs > (1 + expected) / 2:
        return fault(f"affinity outlasts its time-out: {facts}")
    return good(f"affinity ends with its time-out: {facts}")


def judge_removal(affinity: Affinity) -> Judgement:
    """Say whether an endpoint that is gone is still used."""
    if affinity.removed:
        return fault(
            f"{affinity.removed} connections met an endpoint more than {_LEARNS_WITHIN_S:g} s after it was gone"
        )
    return good("no client met an endpoint that was gone")
