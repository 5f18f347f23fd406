"""Balancers with one known fault each: the harness says so, and says nothing of the kind about a good one."""

from __future__ import annotations

import pytest

from tests.bench.conftest import Outcome

pytestmark = pytest.mark.timeout(240)  # the first test waits for its scenario

BALANCE = {"distribution", "round robin", "stickiness", "runs"}


def test_a_skewed_balancer_is_called_uneven(tcp: Outcome) -> None:
    assert set(tcp.faults("skewed")) & BALANCE == {"distribution"}


def test_a_balancer_that_remembers_clients_unasked_is_called_sticky(tcp: Outcome) -> None:
    assert "stickiness" in tcp.faults("sticky")


def test_a_balancer_that_sends_many_in_succession_to_one_endpoint_is_found(tcp: Outcome) -> None:
    assert set(tcp.faults("runs")) & BALANCE == {"runs"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("resetting", "reset"),
        ("closing", "of 600"),
        ("corrupting", "damaged"),
        ("refusing", "refused"),
        ("frozen", "time-out"),
    ],
)
def test_requests_that_fail_are_counted_by_what_happened_to_them(tcp: Outcome, fault: str, kind: str) -> None:
    assert kind in tcp.faults(fault)["errors"]


def test_a_balancer_that_holds_single_requests_up_is_called_stalling(tcp: Outcome) -> None:
    assert "overtaken" in tcp.faults("slow-sometimes")["stalls"]


def test_nothing_is_said_against_a_good_balancer(tcp: Outcome, udp: Outcome, held: Outcome) -> None:
    assert tcp.faults("none") == {}
    assert udp.faults("none") == {}
    assert held.faults("none") == {}


def test_faults_of_judged_targets_decide_the_exit_code(tcp: Outcome) -> None:
    assert tcp.code == 1
    assert "✗ skewed · connect · distribution  uneven" in tcp.output


def test_lost_datagrams_are_found_and_have_a_direction(udp: Outcome) -> None:
    assert "on the way back" in udp.faults("dropping")["udp loss"]


@pytest.mark.parametrize(
    ("fault", "check", "text"),
    [
        ("doubling", "udp delivery", "twice"),
        ("damaging", "udp delivery", "damaged"),
        ("wandering", "udp sessions", "changed their endpoint"),
        ("one-endpoint-ignored", "distribution", "uneven"),
    ],
)
def test_what_else_may_happen_to_datagrams_is_told_apart(udp: Outcome, fault: str, check: str, text: str) -> None:
    faults = udp.faults(fault)
    assert text in faults[check]
    assert "udp loss" not in faults


def test_a_balancer_that_stands_still_now_and_then_is_called_stalling(standing_still: Outcome) -> None:
    assert "stalls" in standing_still.faults("stalling")


def test_affinity_is_followed_per_client_and_beyond_its_time_out(affinity: Outcome) -> None:
    assert "affinity broken" in affinity.faults("none")["affinity"]
    assert "affinity broken" in affinity.faults("forgetful-affinity")["affinity"]
    assert set(affinity.faults("affinity")) == {"affinity time-out"}
    assert affinity.faults("proxy") == {}
    statuses = {outcome.target: outcome.status for outcome in affinity.report.thresholds}
    assert statuses == {"none": "missed", "affinity": "met", "forgetful-affinity": "missed", "proxy": "met"}


def test_long_lived_connections_that_break_without_need_are_found(held: Outcome) -> None:
    assert "20 of 20 long-lived connections broke" in held.faults("breaking")["survival"]


def test_a_balancer_that_passes_on_no_half_close_and_no_reset_is_found(endings: Outcome) -> None:
    assert set(endings.faults("half-deaf")) == {
        "client half-closes", "backend half-closes", "client resets", "backend resets",
    }  # fmt: skip
    assert endings.faults("proxy") == {}


def test_a_balancer_against_itself_shows_no_difference(same: Outcome) -> None:
    shown = [line for line in same.output.splitlines() if "×" in line]
    assert shown
    assert all("no difference" in line for line in shown)
