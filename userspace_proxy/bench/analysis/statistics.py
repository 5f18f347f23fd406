"""The statistics that verdicts rest on, each small enough to be checked by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev

_RESAMPLES = 2000
_SERIES_END = 1e-15
_MAX_STEPS = 10_000
_MIN_ROUNDS = 3
_MAX_LOG = 20.0  # an interval that reaches further says "anything"


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and between which bounds it lies with the confidence that was asked for."""

    value: float
    low: float
    high: float


def jain(counts: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 when all are equal, 1/n when one has all. Source: Jain, Chiu, Hawe 1984."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 1.0


def chi_square(counts: Sequence[int]) -> tuple[float, float]:
    """Return the statistic of equal shares, and how likely chance alone makes it that large."""
    expected = sum(counts) / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    return statistic, upper_gamma((len(counts) - 1) / 2, statistic / 2)


def upper_gamma(shape: float, x: float) -> float:
    """Return the regularised upper incomplete gamma function Q(shape, x)."""
    if x <= 0:
        return 1.0
    front = math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1.0 / shape
        for step in range(1, _MAX_STEPS):
            term *= x / (shape + step)
            total += term
            if term < total * _SERIES_END:
                break
        return max(0.0, 1.0 - total * front)
    # Lentz's continued fraction
    b = x + 1.0 - shape
    c, d = 1e300, 1.0 / b
    fraction = d
    for step in range(1, _MAX_STEPS):
        a = -step * (step - shape)
        b += 2.0
        d = 1.0 / _not_zero(a * d + b)
        c = _not_zero(b + a / c)
        fraction *= d * c
        if abs(d * c - 1.0) < _SERIES_END:
            break
    return front * fraction


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Return the share of successes with Wilson's interval, which is sound for few trials and shares near 0."""
    if trials == 0:
        return Interval(0.0, 0.0, 1.0)
    z, share = NormalDist().inv_cdf((1 + confidence) / 2), successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return Interval(share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def excess_z(successes: int, trials: int, expected: float) -> float:
    """Return by how many standard deviations there are more successes than `expected`, a probability, lets expect."""
    deviation = math.sqrt(trials * expected * (1 - expected))
    return (successes - trials * expected) / deviation if deviation else 0.0


def bootstrap_median(values: Sequence[float], confidence: float, seed: int = 0) -> Interval:
    """Return the median with its percentile bootstrap interval. One value has no interval but itself."""
    middle = median(values)
    if len(values) < 2:
        return Interval(middle, middle, middle)
    rng = random.Random(f"bootstrap {seed}")
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = int((1 - confidence) / 2 * _RESAMPLES)
    return Interval(middle, medians[tail], medians[-1 - tail])


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float, *, paired: bool, seed: int = 0
) -> Interval | None:
    """Return how many times `theirs` our values are; None where there are too few, or none above 0, to tell.

    The interval is the hull of a bootstrap of the median and of Student's interval of the mean, both of logarithms: the
    bootstrap of three or four values alone is far too narrow. `paired` values were measured in the same round.
    """
    if min(len(ours), len(theirs)) < _MIN_ROUNDS or min(*ours, *theirs) <= 0:
        return None
    ours, theirs = [math.log(value) for value in ours], [math.log(value) for value in theirs]
    if paired and len(ours) == len(theirs):
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        boot = bootstrap_median(differences, confidence, seed)
        half = (
            student_quantile((1 + confidence) / 2, len(differences) - 1)
            * stdev(differences)
            / math.sqrt(len(differences))
        )
        mean, middle = fmean(differences), boot.value
    else:
        boot = _bootstrap_difference(ours, theirs, confidence, seed)
        mean, half = _welch(ours, theirs, confidence)
        middle = median(ours) - median(theirs)
    low, high = min(boot.low, mean - half), max(boot.high, mean + half)
    return Interval(*(math.exp(min(max(value, -_MAX_LOG), _MAX_LOG)) for value in (middle, low, high)))


def student_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's distribution, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def student_cdf(t: float, degrees: float) -> float:
    """Return how much of Student's distribution lies below t >= 0; the degrees are rounded down."""
    whole = max(1, int(degrees))
    angle = math.atan(t / math.sqrt(whole))
    sine, cosine = math.sin(angle), math.cos(angle)
    # Abramowitz and Stegun 26.7.3 and 26.7.4
    if whole % 2:
        total, term = (0.0, cosine)
        for step in range(1, (whole - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * step / (2 * step + 1)
        return 0.5 + (angle + sine * total) / math.pi
    total, term = 0.0, 1.0
    for step in range(1, whole // 2 + 1):
        total += term
        term *= cosine * cosine * (2 * step - 1) / (2 * step)
    return 0.5 + sine * total / 2


def _welch(ours: Sequence[float], theirs: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the difference of means and half its interval, for variances that need not be equal."""
    a, b = stdev(ours) ** 2 / len(ours), stdev(theirs) ** 2 / len(theirs)
    if a + b == 0:
        return fmean(ours) - fmean(theirs), 0.0
    degrees = (a + b) ** 2 / (a * a / (len(ours) - 1) + b * b / (len(theirs) - 1))
    half = student_quantile((1 + confidence) / 2, degrees) * math.sqrt(a + b)
    return fmean(ours) - fmean(theirs), half


def _bootstrap_difference(ours: Sequence[float], theirs: Sequence[float], confidence: float, seed: int) -> Interval:
    rng = random.Random(f"bootstrap {seed}")
    found = sorted(
        median(rng.choices(ours, k=len(ours))) - median(rng.choices(theirs, k=len(theirs))) for _ in range(_RESAMPLES)
    )
    tail = int((1 - confidence) / 2 * _RESAMPLES)
    return Interval(median(ours) - median(theirs), found[tail], found[-1 - tail])


def _not_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300
