"""The statistics behind verdicts, against values that anyone can look up, and against chance."""

from __future__ import annotations

import random

import pytest

from userspace_proxy.bench.analysis.statistics import (
    bootstrap_median,
    chi_square,
    excess_z,
    jain,
    ratio_interval,
    student_quantile,
    upper_gamma,
    wilson,
)


@pytest.mark.parametrize(
    ("shape", "x", "expected"), [(0.5, 3.841 / 2, 0.05), (1.5, 7.815 / 2, 0.05), (5.0, 18.307 / 2, 0.05)]
)
def test_the_tail_of_chi_square_is_that_of_the_tables(shape: float, x: float, expected: float) -> None:
    assert upper_gamma(shape, x) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.995, 5, 4.032), (0.975, 30, 2.042)],
)
def test_the_quantiles_of_student_are_those_of_the_tables(probability: float, degrees: int, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=1e-3)


def test_equal_shares_are_no_surprise_and_unequal_ones_are() -> None:
    assert chi_square([25, 25, 25, 25]) == (0.0, 1.0)
    assert chi_square([40, 20, 20, 20])[1] < 0.05


def test_jain_is_one_when_all_are_equal_and_one_of_n_when_one_has_all() -> None:
    assert jain([3, 3, 3]) == 1.0
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)


def test_wilson_never_leaves_zero_to_one_and_contains_the_share() -> None:
    for successes, trials in [(0, 10), (1, 1000), (10, 10)]:
        interval = wilson(successes, trials)
        assert 0 <= interval.low <= interval.value + 1e-12
        assert interval.value <= interval.high + 1e-12 <= 1 + 1e-9


def test_more_successes_than_expected_are_counted_in_standard_deviations() -> None:
    assert excess_z(50, 100, 0.5) == 0.0
    assert excess_z(60, 100, 0.5) == pytest.approx(2.0)


def test_the_bootstrap_of_the_median_contains_it_and_depends_on_the_seed_alone() -> None:
    values = [3.0, 1.0, 2.0, 5.0, 4.0]
    interval = bootstrap_median(values, 0.95, seed=1)
    assert interval.low <= interval.value == 3.0 <= interval.high
    assert interval == bootstrap_median(values, 0.95, seed=1)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_equal_targets_are_rarely_told_apart(paired: bool, rounds: int) -> None:
    """At 95 % confidence at most about one in twenty; the hull of two intervals makes it fewer."""
    rng, told_apart, trials = random.Random(5), 0, 200
    for trial in range(trials):
        ours, theirs = ([rng.lognormvariate(0, 0.2) for _ in range(rounds)] for _ in range(2))
        interval = ratio_interval(ours, theirs, 0.95, paired=paired, seed=trial)
        assert interval is not None
        told_apart += interval.low > 1 or interval.high < 1
    assert told_apart <= 0.09 * trials


def test_a_clear_difference_is_told_with_its_size() -> None:
    interval = ratio_interval([2.0, 2.1, 1.95, 2.05, 2.0], [1.0, 1.02, 0.98, 1.01, 1.0], 0.99, paired=True)
    assert interval is not None
    assert 1.5 < interval.low < 2.0 < interval.high < 2.6


def test_nothing_is_said_of_too_few_values() -> None:
    assert ratio_interval([1.0], [2.0], 0.95, paired=True) is None
    assert ratio_interval([0.0, 1.0], [2.0, 1.0], 0.95, paired=True) is None
