"""Where the harness itself, or the machine, is what was measured: that is declared invalid, not reported."""

from __future__ import annotations

from collections.abc import Iterator

from userspace_proxy.bench.results import Datagrams, Limit, SelfWatch

_BUSY = 0.9
_STARVED = 0.25
_BLIND_SHARE = 0.1
_LAG_SHARE = 0.5
_LAG_MATTERS_S = 0.002


def limits_of(
    watch: SelfWatch,
    *,
    is_open_loop: bool,
    is_bulk: bool,
    latency_p99_s: float | None,
    duration_s: float,
    datagrams: Datagrams | None,
    has_target: bool,
) -> Iterator[Limit]:
    """Yield why numbers of a run are not the target's. `has_target` is false where there is nothing but the harness."""
    for kind, count in watch.own_failures.items():
        yield Limit(affects="all", reason=f"the generator ran out of {kind} ({count} times)")
    if datagrams is not None and datagrams.own_drops:
        yield Limit(
            affects="loss", reason=f"{datagrams.own_drops} datagrams were lost in the harness' own receive buffers"
        )
    if not is_bulk:
        yield from _latency_limits(watch, is_open_loop, latency_p99_s, duration_s)
    if has_target:
        yield from _capacity_limits(watch, is_open_loop)


def _latency_limits(
    watch: SelfWatch, is_open_loop: bool, latency_p99_s: float | None, duration_s: float
) -> Iterator[Limit]:
    late_s = watch.lag_p99_s
    if is_open_loop and latency_p99_s is not None and late_s > max(_LAG_MATTERS_S, _LAG_SHARE * latency_p99_s):
        yield Limit(
            affects="latency",
            reason=f"1 % of the requests were sent more than {late_s * 1000:.1f} ms late by the generator, "
            f"which is most of the p99 of {latency_p99_s * 1000:.1f} ms",
        )
    if watch.blind_s > _BLIND_SHARE * duration_s:
        yield Limit(affects="latency", reason=f"the generator was not running for {watch.blind_s:.2f} s in all")


def _capacity_limits(watch: SelfWatch, is_open_loop: bool) -> Iterator[Limit]:
    target = watch.target_busy
    if watch.target_starved is not None and watch.target_starved > _STARVED:
        yield Limit(affects="throughput", reason=f"the target waited for a CPU {watch.target_starved:.0%} of the time")
    if is_open_loop or (target is not None and target >= _BUSY):
        return
    how_busy = "nobody knows how busy the target was" if target is None else f"the target was {target:.0%} busy"
    if watch.generator_busy >= _BUSY:
        yield Limit(
            affects="throughput",
            reason=f"the generator had no time left ({watch.generator_busy:.0%} busy), while {how_busy}: "
            "the target may do more",
        )
    elif watch.backends_busy >= _BUSY:
        yield Limit(
            affects="throughput", reason=f"a backend had no time left, while {how_busy}: the target may do more"
        )
