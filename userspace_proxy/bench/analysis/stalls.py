"""Times at which answers took too long, and whose fault that is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from userspace_proxy.bench.analysis.judgement import Judgement, fault, good, suspect, unknown
from userspace_proxy.bench.results import Stalls

Span = tuple[float, float]
Episode = tuple[float, float, int]
"""Its beginning, the longest wait in it, and how many requests waited."""

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


def own_episodes(stalls: Stalls) -> list[Episode]:
    """Return the episodes that a lack of CPU does not explain."""
    return [episode for episode in stalls.episodes if episode[1] > 2 * (stalls.excuse_s or 0.0)]


def judge_stalls(
    of_target: Sequence[Stalls], of_direct: Sequence[Stalls], answered: int, measured_s: float
) -> Judgement:
    """Say whether the target stalls, given how often the backends themselves did under the same load."""
    if answered == 0:
        return unknown("nothing was answered")
    episodes = [episode for stalls in of_target for episode in stalls.episodes]
    limit_ms = of_target[0].limit_s * 1000
    unseen = sum(stalls.unseen for stalls in of_target)
    blind = f" ({unseen} slow answers were not counted: the generator was not running)" if unseen else ""
    if not episodes:
        return good(f"no answer took longer than {limit_ms:.0f} ms{blind}")
    longest_s, requests = max(longest for _, longest, _ in episodes), sum(count for _, _, count in episodes)
    facts = (
        f"{requests} answers took longer than {limit_ms:.0f} ms, up to {longest_s * 1000:.0f} ms, {_times(episodes)}"
    )
    facts += blind
    own = [episode for stalls in of_target for episode in own_episodes(stalls)]
    if not own:
        return suspect(f"{facts}; but it had to wait for a CPU")
    held = sum(stalls.held for stalls in of_target if own_episodes(stalls))
    if held >= _PROVEN_BY and not any(stalls.held for stalls in of_direct):
        return fault(f"holds single requests up: {facts}; {held} were overtaken by others that were answered at once")
    direct = sum(len(stalls.episodes) for stalls in of_direct) / len(of_direct) if of_direct else 0.0
    if direct and len(own) / len(of_target) <= _DIRECT_FACTOR * direct:
        return suspect(f"{facts}; but so did those of the backends alone")
    is_often = len(own) >= max(_PROVEN_BY, _OFTEN_PER_S * measured_s)
    if is_often or max(longest for _, longest, _ in own) >= _LONG_S:
        return fault(f"stalls: {facts}")
    return suspect(f"may stall: {facts}")


def judge_all_tests(of_target: Sequence[Stalls], of_direct: Sequence[Stalls]) -> Judgement | None:
    """Say whether stalls that prove nothing in a single test do so in all tests together; None where they do not."""
    proven = [stalls for stalls in of_target if stalls.excuse_s is not None and own_episodes(stalls)]
    direct = sum(bool(stalls.episodes) for stalls in of_direct)
    stalled = sum(bool(own_episodes(stalls)) for stalls in of_target)
    if stalled <= _DIRECT_FACTOR * direct:
        return None
    if len(proven) >= _PROVEN_BY:
        return fault(
            f"stalls: {len(proven)} of {len(of_target)} runs had slow answers though it need not wait for a CPU"
        )
    if stalled >= _PROVEN_BY and stalled * 2 >= len(of_target):
        return fault(f"stalls: {stalled} of {len(of_target)} runs, whatever the test, had answers that took too long")
    return None


def _times(episodes: Sequence[Episode]) -> str:
    return "once" if len(episodes) == 1 else f"{len(episodes)} times"


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
