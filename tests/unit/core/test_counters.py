"""Readings of counters, added up."""

from __future__ import annotations

from dataclasses import astuple, fields

import pytest

from userspace_proxy.core.counters import WAKE_TIME_BUCKETS_S, EndpointCounters, WakeTimes, WakingCounters, add_up


def test_readings_are_added_field_by_field() -> None:
    one = EndpointCounters(*range(1, len(fields(EndpointCounters)) + 1))
    assert astuple(add_up([one, one, EndpointCounters()])) == tuple(2 * value for value in astuple(one))


def test_the_sum_of_nothing_is_zero() -> None:
    assert add_up([]) == EndpointCounters()


def test_each_wake_up_is_counted_in_the_first_bucket_that_is_large_enough() -> None:
    times = WakeTimes()
    for seconds in (0.0, 0.1, 0.11, 120.0, 121.0):
        times = times.with_another(seconds)
    assert times.counts == (2, 1, *(0,) * (len(WAKE_TIME_BUCKETS_S) - 3), 1, 1)
    assert times.total_s == pytest.approx(241.21)


def test_what_several_processes_counted_about_waking_is_added_field_by_field() -> None:
    one = WakingCounters(1, 2, 3, 4, 5, WakeTimes().with_another(0.5))
    assert one.plus(WakingCounters()) == one
    assert one.plus(one) == WakingCounters(2, 4, 6, 8, 10, WakeTimes().with_another(0.5).with_another(0.5))
