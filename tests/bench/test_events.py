"""What happens to backends while the load runs, seen through this package's own proxy."""

from __future__ import annotations

import pytest

from tests.bench.conftest import Outcome
from userspace_proxy.bench.results import EventOutcome

pytestmark = pytest.mark.timeout(240)  # the first test waits for its scenario


def first_event(proxy: Outcome, test: str) -> EventOutcome:
    (run,) = proxy.report.of("proxy", test)
    return run.events[0]


def test_a_round_robin_is_exact(proxy: Outcome) -> None:
    assert proxy.faults("proxy", "round robin") == {}
    assert all(outcome.status == "met" for outcome in proxy.report.thresholds)


def test_events_happen_at_their_times_and_are_undone(proxy: Outcome) -> None:
    (run,) = proxy.report.of("proxy", "kill")
    assert [event.kind for event in run.events] == ["kill", "after kill"]
    assert run.events[0].at == pytest.approx(0.4, abs=0.3)
    assert run.events[1].at == pytest.approx(1.2, abs=0.4)


@pytest.mark.parametrize("test", ["kill", "refuse", "remove"])
def test_a_backend_that_is_gone_costs_no_more_than_what_was_under_way(proxy: Outcome, test: str) -> None:
    assert first_event(proxy, test).failures <= 5


@pytest.mark.parametrize("test", ["freeze", "reset"])
def test_a_backend_that_accepts_but_does_not_answer_is_seen_by_clients(proxy: Outcome, test: str) -> None:
    event = first_event(proxy, test)
    assert event.failures + event.slow > 0


def test_an_added_endpoint_is_used_soon(proxy: Outcome) -> None:
    event = first_event(proxy, "add")
    assert event.first_use_s is not None
    (run,) = proxy.report.of("proxy", "add")
    assert run.load.balance is not None
    assert run.load.balance.counts["4"] > 0


def test_a_removed_endpoint_is_not_used_for_long(proxy: Outcome) -> None:
    event = first_event(proxy, "remove")
    assert event.last_use_s is not None
    assert event.last_use_s < 1.6


@pytest.mark.parametrize("test", ["refuse", "add", "remove", "churn"])
def test_long_lived_connections_outlive_changes_of_endpoints(proxy: Outcome, test: str) -> None:
    (run,) = proxy.report.of("proxy", test)
    assert run.background is not None
    assert run.background.survival is not None
    assert run.background.survival.broken == 0


def test_long_lived_connections_to_a_killed_backend_break_as_expected(proxy: Outcome) -> None:
    (run,) = proxy.report.of("proxy", "kill")
    assert run.background is not None
    survival = run.background.survival
    assert survival is not None
    assert survival.broken == survival.expected == 4
