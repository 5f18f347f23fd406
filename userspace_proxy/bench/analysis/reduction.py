"""From what generator processes wrote down to one `LoadResult`: counted, merged, put in order of time."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from userspace_proxy.bench.analysis import affinity, balance
from userspace_proxy.bench.analysis.balance import Assignment
from userspace_proxy.bench.analysis.failover import Happened
from userspace_proxy.bench.analysis.stalls import find_stalls
from userspace_proxy.bench.backend.behaviour import BackendReport
from userspace_proxy.bench.generator.job import Raw
from userspace_proxy.bench.histograms import encode, histogram_of
from userspace_proxy.bench.results import (
    UNKNOWN_BACKEND,
    Affinity,
    Datagrams,
    Ending,
    LoadResult,
    SelfWatch,
    Stalls,
    Survival,
    Timeline,
)

_BIN_S = 0.1
_TIME_OUT = "time-out"
_LOST = "lost"
_NEIGHBOURS = 5
_STREAM_PATIENCE = 5
_BREAKS = frozenset({"kill", "freeze", "reset", "half_close", "slow", "delay"})
_CHANGES = frozenset({"add", "remove"})
_SUMS = (
    "sent_in_all", "answered_in_all", "late", "duplicates", "foreign", "damaged", "flows", "flows_moved", "flows_dead",
    "refused", "own_drops",
)  # fmt: skip

FAITHFUL: Mapping[str, tuple[str, str]] = {
    # what the client saw, and how the backend's journal begins; nothing where it does not matter
    "client half-closes": ("as sent", "eof after 0"),
    "backend half-closes": ("as sent", "eof after 100000"),
    "client resets": ("as sent", "reset"),
    "backend resets": ("reset", "has reset"),
    "every byte": ("as sent", "same"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What has to be known of a run to understand its samples. Times are monotonic seconds."""

    kind: str
    measure_from: float
    duration_s: float
    backend_names: Mapping[int, str]
    eligible: Sequence[str]
    affinity_s: float | None = None
    is_sequential: bool = False
    is_open_loop: bool = False
    stall_limit_s: float = 0.1
    streams: int = 0
    own_endpoints: int = 0
    events: Sequence[Happened] = ()
    journals: Sequence[BackendReport] = field(default_factory=tuple)

    @property
    def ended_at(self) -> float:
        return self.measure_from + self.duration_s


@dataclass(slots=True)
class Samples:
    """All samples of a load. Times are seconds from the beginning of the measured part."""

    latencies: list[float]
    ends: list[float]
    assignments: list[Assignment]
    failures: list[tuple[float, float, str]]  # at, due, kind
    blind: list[tuple[float, float]]
    moved: list[tuple[float, float, int]]  # at, bytes, stream

    def waits(self) -> list[tuple[float, float]]:
        """Return (due, answered) of all that was answered, and of all that was given up after a time-out."""
        answered = [(end - latency, end) for latency, end in zip(self.latencies, self.ends, strict=True)]
        return answered + [(due, at) for at, due, kind in self.failures if kind == _TIME_OUT and due >= 0]


def samples_of(raws: Sequence[Raw], setting: Setting) -> Samples:
    """Return the samples of all processes, those of the warm-up left out (except for who was assigned to whom)."""
    start = setting.measure_from
    latencies, ends = _doubles(raws, "latencies"), _doubles(raws, "ends")
    measured = [(latency, end - start) for latency, end in zip(latencies, ends, strict=True) if end - latency >= start]
    assignments: list[Assignment] = []
    for raw in raws:
        names = {number: raw.names.get(number, setting.backend_names.get(number, UNKNOWN_BACKEND)) for number in
                 _ints([raw], "assigned_backend")}  # fmt: skip
        columns = zip(
            _doubles([raw], "assigned_at"),
            _ints([raw], "assigned_client"),
            _ints([raw], "assigned_backend"),
            strict=True,
        )
        assignments += [(at - start, client, names[number]) for at, client, number in columns]
    moved = zip(_doubles(raws, "moved_at"), _doubles(raws, "moved_bytes"), _ints(raws, "moved_stream"), strict=True)
    return Samples(
        latencies=[latency for latency, _ in measured],
        ends=[end for _, end in measured],
        assignments=sorted(assignments, key=itemgetter(0)),
        failures=sorted((f.at - start, f.due - start, f.kind) for raw in raws for f in raw.failures if f.due >= start),
        blind=sorted((from_ - start, to - start) for raw in raws for from_, to in raw.watch.blind),
        moved=[(at - start, size, stream) for at, size, stream in moved if start <= at < setting.ended_at],
    )


def reduce_load(raws: Sequence[Raw], samples: Samples, setting: Setting) -> LoadResult:
    """Return the result of a load.

    A request that timed out took at least that long: it is in the histogram, or a target that answers only the easy
    ones would look fast.
    """
    in_window = sum(0 <= end < setting.duration_s for end in samples.ends)
    timed_out = [at - due for at, due, kind in samples.failures if kind == _TIME_OUT]
    result = LoadResult(
        kind=setting.kind,
        completed=len(samples.latencies),
        rate=in_window / setting.duration_s,
        histogram=encode(histogram_of([*samples.latencies, *timed_out])),
        failures=dict(Counter(kind for _, _, kind in samples.failures if kind != _LOST)),
        timeline=_timeline(samples, setting),
        stalls=_stalls(samples, setting),
    )
    # In an open loop what was due counts as sent; connections that could not even be opened come on top of that.
    due = sum(raw.sent for raw in raws) if setting.is_open_loop else 0
    result.sent = max(due, result.completed + result.failed)
    if samples.moved:
        _add_streams(result, samples)
    if samples.assignments:
        result.balance = balance.tally(
            samples.assignments,
            setting.eligible,
            is_sequential=setting.is_sequential,
            endpoints=setting.own_endpoints,
        )
        if setting.affinity_s is not None:
            result.affinity = _affinity(samples, setting, setting.affinity_s)
    if any(raw.datagrams for raw in raws):
        result.datagrams = _datagrams(raws, setting)
        result.datagrams.lost_alone = _lost_alone(samples)
    result.endings = _endings(raws, setting.journals)
    if result.endings:
        result.sent = result.completed = sum(ending.tried for ending in result.endings.values())
    if setting.kind in ("hold", "requests", "http"):
        result.survival = _survival(raws, setting)
    return result


def watch_of(raws: Sequence[Raw]) -> SelfWatch:
    """Return what the generator processes saw of themselves; the busiest counts."""
    lags = sorted(_doubles(raws, "lags"))
    watch = SelfWatch(unsent=sum(raw.unsent for raw in raws))
    if lags:
        watch.lag_p50_s, watch.lag_p99_s = lags[len(lags) // 2], lags[min(len(lags) - 1, int(len(lags) * 0.99))]
        watch.lag_max_s = lags[-1]
    for raw in raws:
        seen = raw.watch
        if seen.wall_s > 0:
            watch.generator_busy = max(watch.generator_busy, (seen.cpu_s + seen.wait_s) / seen.wall_s)
            watch.generator_starved = max(watch.generator_starved, seen.wait_s / seen.wall_s)
        watch.blind_s = max(watch.blind_s, sum(to - from_ for from_, to in seen.blind))
        for kind, count in raw.own_failures.items():
            watch.own_failures[kind] = watch.own_failures.get(kind, 0) + count
    return watch


def _timeline(samples: Samples, setting: Setting) -> Timeline:
    size = max(1, round(setting.duration_s / _BIN_S))
    timeline = Timeline(
        bin_s=_BIN_S, completed=[0] * size, failed=[0] * size, slowest_s=[0.0] * size,
        moved_bytes=[0.0] * size if samples.moved else [],
    )  # fmt: skip
    for latency, end in zip(samples.latencies, samples.ends, strict=True):
        index = int(end / _BIN_S)
        if index < size:
            timeline.completed[index] += 1
            if latency > timeline.slowest_s[index]:
                timeline.slowest_s[index] = latency
    for at, _, kind in samples.failures:
        index = int(at / _BIN_S)
        if 0 <= index < size and kind != _LOST:
            timeline.failed[index] += 1
    for at, bytes_, _ in samples.moved:
        timeline.moved_bytes[min(size - 1, int(at / _BIN_S))] += bytes_
    for at, _, backend in samples.assignments:
        index = int(at / _BIN_S)
        if at >= 0 and index < size:
            timeline.by_backend.setdefault(backend, [0] * size)[index] += 1
    return timeline


def _stalls(samples: Samples, setting: Setting) -> Stalls:
    """Return when requests waited too long, or streams moved nothing for too long."""
    if not setting.streams:
        return find_stalls(samples.waits(), samples.blind, setting.stall_limit_s)
    # Streams share the link as their schedulers have it, so they may pause for longer, and one while others go on.
    found = find_stalls(_gaps(samples, setting), samples.blind, _STREAM_PATIENCE * setting.stall_limit_s)
    found.held = 0
    return found


def _gaps(samples: Samples, setting: Setting) -> list[tuple[float, float]]:
    """Return for how long each stream moved nothing."""
    by_stream: dict[int, list[float]] = {stream: [0.0] for stream in range(setting.streams)}
    for at, _, stream in samples.moved:
        by_stream.setdefault(stream, [0.0]).append(at)
    for times in by_stream.values():
        times.append(setting.duration_s)
    return [pair for times in by_stream.values() for pair in pairwise(times)]


def _add_streams(result: LoadResult, samples: Samples) -> None:
    by_stream: Counter[int] = Counter()
    for _, size, stream in samples.moved:
        by_stream[stream] += int(size)
    result.streams = [float(by_stream[stream]) for stream in sorted(by_stream)]
    result.moved_bytes = sum(result.streams)


def _affinity(samples: Samples, setting: Setting, timeout_s: float) -> Affinity:
    unusable: dict[str, list[tuple[float, float]]] = {}
    removed: dict[str, list[tuple[float, float]]] = {}
    for event in setting.events:
        if event.backend_name and event.kind != "add":
            unusable.setdefault(event.backend_name, []).append((event.at, event.until))
        if event.kind == "remove":
            removed.setdefault(event.backend_name, []).append((event.at, event.until))
    changes = [event.at for event in setting.events if event.kind in _CHANGES]
    return affinity.follow(samples.assignments, timeout_s, changes=changes, unusable=unusable, removed=removed)


def _datagrams(raws: Sequence[Raw], setting: Setting) -> Datagrams:
    result = Datagrams()
    for counts in (raw.datagrams for raw in raws if raw.datagrams):
        result.sent = dict(Counter(result.sent) + Counter(counts.sent))
        result.lost = dict(Counter(result.lost) + Counter(counts.lost))
        for name in _SUMS:
            setattr(result, name, getattr(result, name) + getattr(counts, name))
    result.own_drops += sum(report.datagrams_dropped for report in setting.journals)
    return result


def _lost_alone(samples: Samples) -> int:
    """Count lost datagrams of which most of those sent just before and after arrived."""
    arrived = [(end - latency, 0) for latency, end in zip(samples.latencies, samples.ends, strict=True)]
    fates = [fate for _, fate in sorted([*arrived, *((due, 1) for _, due, kind in samples.failures if kind == _LOST)])]
    return sum(
        fate and 2 * sum(fates[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS + 1]) <= _NEIGHBOURS * 2
        for index, fate in enumerate(fates)
    )


def _endings(raws: Sequence[Raw], journals: Sequence[BackendReport]) -> dict[str, Ending]:
    journal = {sequence: text for report in journals for sequence, text in report.journal.items()}
    endings: dict[str, Ending] = {}
    for seen in (seen for raw in raws for seen in raw.endings):
        ending = endings.setdefault(seen.probe, Ending())
        by_backend = journal.get(seen.sequence, "nothing")
        client_wanted, backend_wanted = FAITHFUL[seen.probe]
        ending.tried += 1
        ending.faithful += seen.outcome == client_wanted and by_backend.startswith(backend_wanted)
        outcome = f"client: {seen.outcome}; backend: {by_backend}"
        ending.outcomes[outcome] = ending.outcomes.get(outcome, 0) + 1
    return endings


def _survival(raws: Sequence[Raw], setting: Setting) -> Survival:
    result = Survival(opened=sum(raw.opened for raw in raws))
    start = setting.measure_from
    for broken in (broken for raw in raws for broken in raw.breaks):
        name = setting.backend_names.get(broken.backend, UNKNOWN_BACKEND)
        result.broken += 1
        result.expected += any(
            event.kind in _BREAKS and event.backend_name == name and event.at <= broken.at - start
            for event in setting.events
        )
        result.kinds[broken.kind] = result.kinds.get(broken.kind, 0) + 1
    return result


def _doubles(raws: Sequence[Raw], name: str) -> array[float]:
    column = array("d")
    for raw in raws:
        column.frombytes(getattr(raw, name))
    return column


def _ints(raws: Sequence[Raw], name: str) -> array[int]:
    column = array("i")
    for raw in raws:
        column.frombytes(getattr(raw, name))
    return column
