"""Every number that can be shown, compared or limited: one table, so that a name means the same everywhere.

A metric is computed over any number of repetitions. Percentiles come from merged histograms, counts are added up, rates
are medians. `needs` says which limit of the harness makes it void.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from userspace_proxy.bench.analysis import affinity, balance
from userspace_proxy.bench.histograms import merged, percentile_s
from userspace_proxy.bench.results import Affinity, Balance, Cost, LoadResult, RunResult

Unit = Literal["seconds", "count", "per second", "share", "bytes", "bits per second", "ratio"]
Better = Literal["lower", "higher", "neither"]
Runs = Sequence[RunResult]

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_GB = 1e9
_COARSE_UP_TO = 99.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with a name. `of` returns None where the runs do not have it."""

    name: str
    unit: Unit
    better: Better
    of: Callable[[Runs], float | None]
    needs: Literal["latency", "throughput", "loss", ""] = ""
    short: str = ""

    @property
    def label(self) -> str:
        return self.short or self.name


def metric_called(name: str) -> Metric | None:
    """Return the metric of that name, however it is spelled; any percentile such as p99.9 is one."""
    plain = re.sub(r"[\s_-]+", " ", name.strip().lower())
    match = _PERCENTILE.fullmatch(plain.replace(" ", ""))
    if match:
        return _percentile(float(match[1]))
    return METRICS.get(_ALIASES.get(plain, plain))


def valid_for(metric: Metric, runs: Runs) -> Runs:
    """Return the runs in which the harness was no limit for the metric; none at all when most were not."""
    usable = [run for run in runs if not any(limit.affects in ("all", metric.needs) for limit in run.limits)]
    return usable if 2 * len(usable) > len(runs) else []


def total_balance(runs: Runs) -> Balance | None:
    """Return who was sent where in all repetitions."""
    return balance.total(run.load.balance for run in runs if run.load.balance) if _any(runs, "balance") else None


def _percentile(percent: float) -> Metric:
    def of(runs: Runs) -> float | None:
        if percent > _COARSE_UP_TO and any(run.load.is_coarse for run in runs):
            return None
        return percentile_s(merged(run.load.histogram for run in runs), percent)

    return Metric(f"p{percent:g}", "seconds", "lower", of, needs="latency")


def _any(runs: Runs, name: str) -> bool:
    return any(getattr(run.load, name) for run in runs)


def _sum(take: Callable[[LoadResult], float | None]) -> Callable[[Runs], float | None]:
    def of(runs: Runs) -> float | None:
        found = [value for run in runs if (value := take(run.load)) is not None]
        return float(sum(found)) if found else None

    return of


def _median(take: Callable[[RunResult], float | None]) -> Callable[[Runs], float | None]:
    def of(runs: Runs) -> float | None:
        found = [value for run in runs if (value := take(run)) is not None]
        return median(found) if found else None

    return of


def _share(part: Callable[[LoadResult], float], whole: Callable[[LoadResult], float]) -> Callable[[Runs], float | None]:
    def of(runs: Runs) -> float | None:
        number = sum(whole(run.load) for run in runs)
        return sum(part(run.load) for run in runs) / number if number else None

    return of


def _cost(take: Callable[[RunResult, Cost], float | None]) -> Callable[[Runs], float | None]:
    return _median(lambda run: take(run, run.cost) if run.cost is not None else None)


def _switches(cost: Cost) -> int:
    return cost.voluntary_switches + cost.involuntary_switches


def _per_request(run: RunResult, value: float) -> float | None:
    done = run.load.rate * run.cost.wall_s if run.cost else 0.0
    return value / done if done else None


def _per_gb(run: RunResult, value: float) -> float | None:
    return value / (run.load.moved_bytes / _GB) if run.load.moved_bytes else None


def _per_connection(run: RunResult, value: float) -> float | None:
    opened = run.load.survival.opened if run.load.kind == "hold" and run.load.survival else 0
    return value / opened if opened else None


def _from_balance(take: Callable[[Balance], float | None]) -> Callable[[Runs], float | None]:
    def of(runs: Runs) -> float | None:
        found = total_balance(runs)
        return take(found) if found else None

    return of


def _from_shares(take: Callable[[Balance], float]) -> Callable[[Runs], float | None]:
    return _from_balance(lambda found: take(found) if balance.is_enough(found) else None)


def _stickiness(found: Balance) -> float | None:
    expected = balance.expected_same(found)
    if found.client_pairs < balance.MIN_PAIRS or expected >= 1:
        return None
    return max(0.0, (found.client_pairs_same / found.client_pairs - expected) / (1 - expected))


def _from_affinity(take: Callable[[Affinity], float]) -> Callable[[Runs], float | None]:
    def of(runs: Runs) -> float | None:
        found = [run.load.affinity for run in runs if run.load.affinity]
        return take(affinity.total(found)) if found else None

    return of


_maximum = _percentile(100.0).of


def _mean(runs: Runs) -> float | None:
    if any(run.load.is_coarse for run in runs):
        return None
    histogram = merged(run.load.histogram for run in runs)
    return float(histogram.get_mean_value()) / 1e9 if histogram.get_total_count() else None


def _longest_stall(runs: Runs) -> float | None:
    return max((longest for run in runs for _, longest, _ in run.load.stalls.episodes), default=0.0)


def _recovery(runs: Runs) -> float | None:
    """Return the longest recovery; infinite where one did not end."""
    times = [e.recovered_s for run in runs for e in run.events if not e.kind.startswith("after") and e.kind != "add"]
    if not times:
        return None
    return max(float("inf") if time is None else time for time in times)


def _first_use(runs: Runs) -> float | None:
    times = [event.first_use_s for run in runs for event in run.events if event.kind == "add"]
    return max((float("inf") if time is None else time for time in times), default=None)


def _broken(runs: Runs) -> float | None:
    found = [s for run in runs for s in (run.load.survival, run.background and run.background.survival) if s]
    return float(sum(s.broken - s.expected for s in found)) if found else None


def _unfaithful(*probes: str) -> Callable[[LoadResult], float | None]:
    def take(load: LoadResult) -> float | None:
        chosen = [ending for probe, ending in load.endings.items() if not probes or probe in probes]
        return float(sum(ending.tried - ending.faithful for ending in chosen)) if load.endings else None

    return take


def _lost(load: LoadResult) -> float:
    return float(sum(load.datagrams.lost.values())) if load.datagrams else 0.0


def _datagrams_sent(load: LoadResult) -> float:
    return float(sum(load.datagrams.sent.values())) if load.datagrams else 0.0


def _datagram_sum(name: str) -> Callable[[Runs], float | None]:
    return _sum(lambda load: getattr(load.datagrams, name) if load.datagrams else None)


def _table(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS: dict[str, Metric] = _table([
    _percentile(50), _percentile(90), _percentile(99), _percentile(99.9),
    Metric("max", "seconds", "lower", _maximum, needs="latency"),
    Metric("mean", "seconds", "lower", _mean, needs="latency"),
    Metric("rate", "per second", "higher", _median(lambda run: run.load.rate or None), needs="throughput"),
    Metric("throughput", "bits per second", "higher",
           _median(lambda run: 8 * run.load.moved_bytes / run.duration_s if run.load.moved_bytes else None),
           needs="throughput"),
    Metric("errors", "count", "lower", _sum(lambda load: load.failed)),
    Metric("error rate", "share", "lower", _share(lambda load: load.failed, lambda load: load.sent)),
    Metric("sent", "count", "neither", _sum(lambda load: load.sent)),
    Metric("completed", "count", "neither", _sum(lambda load: load.completed)),
    Metric("stalls", "count", "lower", _sum(lambda load: len(load.stalls.episodes))),
    Metric("longest stall", "seconds", "lower", _longest_stall),
    Metric("udp loss", "share", "lower", _share(_lost, _datagrams_sent), needs="loss"),
    Metric("udp duplicates", "count", "lower", _datagram_sum("duplicates")),
    Metric("udp damaged", "count", "lower", _datagram_sum("damaged")),
    Metric("udp misdelivered", "count", "lower", _datagram_sum("foreign")),
    Metric("udp flows moved", "count", "lower", _datagram_sum("flows_moved")),
    Metric("jain", "ratio", "higher", _from_shares(balance.fairness)),
    Metric("max/min", "ratio", "lower", _from_shares(balance.max_to_min)),
    Metric("round robin violations", "count", "lower",
           _from_balance(lambda found: float(found.cycle_violations) if found.is_sequential else None)),
    Metric("stickiness", "share", "lower", _from_balance(_stickiness)),
    Metric("affinity violations", "count", "lower", _from_affinity(lambda found: float(found.violations))),
    Metric("visits to removed", "count", "lower", _from_affinity(lambda found: float(found.removed))),
    Metric("recovery", "seconds", "lower", _recovery),
    Metric("first use", "seconds", "lower", _first_use),
    Metric("broken connections", "count", "lower", _broken),
    Metric("unfaithful endings", "count", "lower", _sum(_unfaithful())),
    Metric("half-close failures", "count", "lower", _sum(_unfaithful("client half-closes", "backend half-closes"))),
    Metric("reset failures", "count", "lower", _sum(_unfaithful("client resets", "backend resets"))),
    Metric("cpu", "seconds", "lower", _cost(lambda run, cost: cost.cpu_s)),
    Metric("cpu per request", "seconds", "lower",
           _cost(lambda run, cost: _per_request(run, cost.cpu_s)), short="CPU/request"),
    Metric("cpu per gb", "seconds", "lower", _cost(lambda run, cost: _per_gb(run, cost.cpu_s)), short="CPU/GB"),
    Metric("memory", "bytes", "lower", _cost(lambda run, cost: float(cost.peak_resident_bytes))),
    Metric("memory per connection", "bytes", "lower",
           _cost(lambda run, cost: _per_connection(run, cost.peak_resident_bytes - cost.base_resident_bytes))),
    Metric("descriptors", "count", "lower", _cost(lambda run, cost: float(cost.peak_descriptors))),
    Metric("descriptors per connection", "count", "lower",
           _cost(lambda run, cost: _per_connection(run, cost.peak_descriptors - cost.base_descriptors))),
    Metric("context switches", "count", "lower",
           _cost(lambda run, cost: float(_switches(cost)))),
    Metric("context switches per request", "count", "lower",
           _cost(lambda run, cost: _per_request(run, _switches(cost))), short="switches/request"),
    Metric("context switches per gb", "count", "lower",
           _cost(lambda run, cost: _per_gb(run, _switches(cost))), short="switches/GB"),
])  # fmt: skip

_ALIASES = {
    "max min": "max/min", "max to min": "max/min", "requests/s": "rate", "rps": "rate", "requests per second": "rate",
    "failures": "errors", "rss": "memory", "half close failures": "half-close failures", "loss": "udp loss",
    "recovery time": "recovery", "fds": "descriptors", "cpu seconds": "cpu",
    "average": "mean", "error share": "error rate",
    "rr violations": "round robin violations", "jain index": "jain", "udp duplicated": "udp duplicates",
}  # fmt: skip


def format_value(value: float | None, unit: Unit) -> str:
    """Return the value as people read it, with three digits that matter."""
    if value is None:
        return "–"
    if value == float("inf"):
        return "never" if unit == "seconds" else "∞"
    match unit:
        case "seconds":
            return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))
        case "bytes":
            return _scaled(value, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))
        case "bits per second":
            return _scaled(value, ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")))
        case "per second":
            return f"{value:,.0f}/s" if value >= 100 else f"{value:.3g}/s"
        case "share":
            return f"{value * 100:.3g} %"
        case "count":
            return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"
        case "ratio":
            return f"{value:.4g}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, name = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    number = value / size
    return f"{number:.0f} {name}" if abs(number) >= 100 else f"{number:.3g} {name}"
