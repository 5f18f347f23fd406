"""Readings of counters, added up."""

from __future__ import annotations

from dataclasses import astuple, fields

from userspace_proxy.core.counters import EndpointCounters, add_up


def test_readings_are_added_field_by_field() -> None:
    one = EndpointCounters(*range(1, len(fields(EndpointCounters)) + 1))
    assert astuple(add_up([one, one, EndpointCounters()])) == tuple(2 * value for value in astuple(one))


def test_the_sum_of_nothing_is_zero() -> None:
    assert add_up([]) == EndpointCounters()
