"""Go's durations, in and out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.durations import Duration, format_duration, parse_duration
from userspace_proxy.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h0m0s", 3600.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("-1s", -1.0),
        ("+2m", 120.0),
        ("0", 0.0),
        ("1h15m30.918s", 4530.918),
        (".5s", 0.5),
        ("100us", 0.0001),
        ("1µs", 0.000001),
        ("3ns", 0.000000003),
    ],
)
def test_a_go_duration_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "1 s", "1s ", "1d", "--1s", "1h-1m", "NaN", "1e3s", "9999999h", "١s"])
def test_what_is_no_go_duration_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(text)


def test_a_number_without_a_unit_is_told_that_it_needs_one() -> None:
    with pytest.raises(ConfigError, match="it needs a unit"):
        parse_duration("5")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (5400, "1h30m0s"),
        (3600, "1h0m0s"),
        (90, "1m30s"),
        (1.5, "1.5s"),
        (0.25, "250ms"),
        (0.0000015, "1.5µs"),
        (3e-9, "3ns"),
        (-1, "-1s"),
        (10, "10s"),
    ],
)
def test_a_duration_is_printed_as_go_prints_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_what_is_printed_is_read_back(nanoseconds: int) -> None:
    seconds = nanoseconds / 10**9
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


def test_a_duration_is_seconds_that_print_as_go_does() -> None:
    duration = Duration.parse("1h30m")
    assert duration == 5400.0
    assert str(duration) == f"{duration}" == "1h30m0s"
    assert repr(duration) == "Duration(5400.0)"
