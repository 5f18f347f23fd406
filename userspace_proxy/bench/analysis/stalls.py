"""Times at which answers took too long, and whose fault that is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from userspace_proxy.bench.analysis.judgement import Judgement, fault, good, suspect, unknown
from userspace_proxy.bench.results import Stalls

Span = tuple[float, float]

_LONG_S = 1.0
_PROVEN_BY = 3
_OFTEN_PER_S = 0.08
_DIRECT_FACTOR = 3
_EXCUSED_SHARE = 0.3
_MAX_EPISODES = 500
_MIN_OVERTAKERS = 5


def find_stalls(waits: Iterable[Span], blind: Sequence[Span], limit_s: float) -> Stalls:
    """Return the episodes in which answers took longer than the limit.

    `waits` are (due, answered or given up). A wait through which the generator itself was blind for a good part is not
    counted, as nobody knows when the answer came. One that was overtaken by many others, asked later and answered at
    once, is `held`: no hiccup of the machine does that.
    """
    found = Stalls(limit_s=limit_s)
    waits = sorted(waits)
    merged_blind = _merge(blind)
    episodes: list[tuple[float, float, float, int]] = []  # from, to, longest, requests
    for due, end in waits:
        if end - due <= limit_s:
            continue
        if _overlap(merged_blind, due, end) > _EXCUSED_SHARE * (end - due):
            found.unseen += 1
            continue
        found.slow += 1
        if found.slow <= _MAX_EPISODES:
            found.held += _is_overtaken(waits, due, end, limit_s)
        if episodes and due <= episodes[-1][1] + limit_s:
            from_, to, longest, requests = episodes[-1]
            episodes[-1] = (from_, max(to, end), max(longest, end - due), requests + 1)
        else:
            episodes.append((due, end, end - due, 1))
    found.episodes = [(from_, longest, requests) for from_, _, longest, requests in episodes[:_MAX_EPISODES]]
    return found


def judge_stalls(
    of_target: Sequence[Stalls], of_direct: Sequence[Stalls], answered: int, measured_s: float
) -> Judgement:
    """Say whether the target stalls, given how often the backends themselves did under the same load."""
    if answered == 0:
        return unknown("nothing was answered")
    calm = [stalls for stalls in of_target if not stalls.starved]
    if len(calm) < len(of_target):
        said = judge_stalls(calm, of_direct, answered, measured_s) if calm else unknown("")
        if said.status == "fault" or not any(stalls.episodes for stalls in of_target):
            return said if calm else good("no answer took too long")
        slow = sum(stalls.slow for stalls in of_target if stalls.starved)
        return suspect(f"{slow} answers took too long in runs in which the target had to wait for a CPU")
    episodes = [episode for stalls in of_target for episode in stalls.episodes]
    held, limit_ms = sum(stalls.held for stalls in of_target), of_target[0].limit_s * 1000
    unseen = sum(stalls.unseen for stalls in of_target)
    blind = f" ({unseen} slow answers were not counted: the generator was not running)" if unseen else ""
    if not episodes:
        return good(f"no answer took longer than {limit_ms:.0f} ms{blind}")
    longest_s, requests = max(longest for _, longest, _ in episodes), sum(count for _, _, count in episodes)
    times = "once" if len(episodes) == 1 else f"{len(episodes)} times"
    facts = f"{requests} answers took longer than {limit_ms:.0f} ms, up to {longest_s * 1000:.0f} ms, {times}{blind}"
    if held >= _PROVEN_BY and not any(stalls.held for stalls in of_direct):
        return fault(
            f"holds single requests up: {facts}; {held} of them were overtaken by others that were answered at once"
        )
    ours = len(episodes) / len(of_target)
    direct = sum(len(stalls.episodes) for stalls in of_direct) / len(of_direct) if of_direct else 0.0
    if direct and ours <= _DIRECT_FACTOR * direct:
        return suspect(f"{facts}; but so did those of the backends alone")
    is_often = len(episodes) >= max(_PROVEN_BY, _OFTEN_PER_S * measured_s)
    if is_often or longest_s >= _LONG_S:
        return fault(f"stalls: {facts}")
    return suspect(f"may stall: {facts}")


def judge_all_tests(stalled: int, measured: int) -> Judgement | None:
    """Say whether runs with stalls, none of which proves anything by itself, do so together; None where they do not."""
    if stalled >= _PROVEN_BY and stalled * 2 >= measured:
        return fault(f"stalls: {stalled} of {measured} runs, whatever the test, had answers that took too long")
    return None


def _is_overtaken(waits: Sequence[Span], due: float, end: float, limit_s: float) -> bool:
    """Tell whether most requests that were due while this one waited were answered at once."""
    first, last = bisect_right(waits, (due, end)), bisect_left(waits, (end - limit_s / 2, 0.0))
    during = waits[first:last]
    fast = sum(answered - asked < limit_s / 2 for asked, answered in during)
    return fast >= _MIN_OVERTAKERS and 2 * fast > len(during)


def _merge(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for from_, to in sorted(spans):
        if merged and from_ <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], to))
        else:
            merged.append((from_, to))
    return merged


def _overlap(spans: Sequence[Span], from_: float, to: float) -> float:
    return sum(max(0.0, min(to, end) - max(from_, begin)) for begin, end in spans)
