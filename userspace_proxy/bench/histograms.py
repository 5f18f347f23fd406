"""Latencies as HdrHistograms: 1 µs to 1 h with three digits, in nanoseconds inside, in seconds outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from io import BytesIO

from hdrh.histogram import HdrHistogram

_LOWEST_NS, _HIGHEST_NS, _DIGITS = 1_000, 3_600_000_000_000, 3
_NS_PER_MS = 1e6


def histogram_of(latencies_s: Iterable[float]) -> HdrHistogram:
    """Return a histogram of these latencies."""
    histogram = HdrHistogram(_LOWEST_NS, _HIGHEST_NS, _DIGITS)
    for value, count in Counter(round(latency * 1e6) for latency in latencies_s).items():
        histogram.record_value(min(max(value * 1000, _LOWEST_NS), _HIGHEST_NS), count)
    return histogram


def merged(encoded: Iterable[str]) -> HdrHistogram:
    """Return one histogram of all these."""
    total = HdrHistogram(_LOWEST_NS, _HIGHEST_NS, _DIGITS)
    for text in encoded:
        if text:
            total.decode_and_add(text.encode())
    return total


def encode(histogram: HdrHistogram) -> str:
    """Return the histogram as text, compressed, as all tools of the HdrHistogram family read it."""
    return str(histogram.encode().decode())


def percentile_s(histogram: HdrHistogram, percent: float) -> float | None:
    """Return the latency below which so many percent lie; None where nothing was recorded."""
    if histogram.get_total_count() == 0:
        return None
    return float(histogram.get_value_at_percentile(percent)) / 1e9


def curve(histogram: HdrHistogram, percents: Sequence[float]) -> list[tuple[float, float]]:
    """Return (percent, seconds) for each of the percents that the number of samples can tell apart from the maximum."""
    count = histogram.get_total_count()
    points = []
    for percent in percents:
        if count and (100.0 - percent) / 100.0 * count >= 1.0:
            points.append((percent, float(histogram.get_value_at_percentile(percent)) / 1e9))
    return points


def as_hgrm(histogram: HdrHistogram) -> bytes:
    """Return the percentile distribution in milliseconds, as .hgrm plotters read it."""
    out = BytesIO()
    histogram.output_percentile_distribution(out, _NS_PER_MS, 5)
    return out.getvalue()
