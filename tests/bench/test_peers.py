"""HAProxy and nginx, with the configurations that we write for them. What is known of both is found."""

from __future__ import annotations

import shutil

import pytest

from tests.bench.conftest import Outcome

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not shutil.which("haproxy") or not shutil.which("nginx"), reason="haproxy or nginx is not installed"
    ),
]


@pytest.mark.parametrize("name", ["haproxy", "nginx"])
def test_they_balance_and_follow_their_endpoints(peers: Outcome, name: str) -> None:
    assert peers.faults(name, "start") == {}
    for test in ("connect", "add", "remove"):
        assert peers.report.of(name, test), test
    (added,) = peers.report.of(name, "add")
    assert added.load.balance is not None
    assert added.load.balance.counts.get("4", 0) > 0
    (removed,) = peers.report.of(name, "remove")
    assert removed.events[0].last_use_s is None or removed.events[0].last_use_s < 1.5


def test_haproxy_keeps_affinity_and_passes_no_reset_on_to_clients(peers: Outcome) -> None:
    assert peers.faults("haproxy", "affinity") == {}
    assert set(peers.faults("haproxy", "endings")) == {"backend resets"}


def test_nginx_has_no_half_close_and_passes_no_reset_on(peers: Outcome) -> None:
    assert set(peers.faults("nginx", "endings")) == {
        "client half-closes", "backend half-closes", "client resets", "backend resets",
    }  # fmt: skip


def test_who_cannot_take_part_is_named_with_the_reason(peers: Outcome) -> None:
    (record,) = (test for test in peers.report.tests if test.name == "udp")
    assert record.skipped == {"haproxy": "HAProxy has no UDP"}
    assert peers.faults("nginx", "udp") == {}


def test_their_configurations_are_kept_with_the_results(peers: Outcome) -> None:
    configurations = {target.name: target.configuration for target in peers.report.targets}
    assert "balance roundrobin" in configurations["haproxy"]
    assert "upstream bench" in configurations["nginx"]
