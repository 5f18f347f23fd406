"""Clean-up as a decision: what goes, what stays, and what an error in one place means for the others."""

from __future__ import annotations

import pytest

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect.backend import FakeBackend
from userspace_proxy.redirect.cleanup import of_any_mode, of_iptables_mode, removal, remove
from userspace_proxy.redirect.tables import Tables


@pytest.mark.parametrize(
    ("table", "chain", "is_owned"),
    [
        ("nat", "KUBE-PORTALS-HOST", True),
        ("filter", "KUBE-NODEPORT-NON-LOCAL", True),
        ("mangle", "KUBE-PROXY-CANARY", True),
        ("nat", "KUBE-SEP-ABC", True),
        ("filter", "KUBE-SEP-ABC", False),
        ("filter", "KUBE-FIREWALL", False),
        ("mangle", "KUBE-KUBELET-CANARY", False),
        ("mangle", "KUBE-IPTABLES-HINT", False),
        ("nat", "KUBE-HOSTPORTS", False),
        ("nat", "PREROUTING", False),
    ],
)
def test_only_chains_of_both_modes_are_owned(table: str, chain: str, is_owned: bool) -> None:
    assert of_any_mode(table, chain) is is_owned
    assert not of_iptables_mode("nat", "KUBE-PORTALS-HOST")


def test_a_chain_that_a_foreign_chain_jumps_to_is_kept_with_all_that_it_jumps_to() -> None:
    chains = {
        "PREROUTING": ["-A PREROUTING -j KUBE-SERVICES", "-A PREROUTING -j FOREIGN"],
        "FOREIGN": ["-A FOREIGN -g KUBE-SVC-A"],
        "KUBE-SERVICES": ["-A KUBE-SERVICES -j KUBE-SVC-B"],
        "KUBE-SVC-A": ["-A KUBE-SVC-A -j KUBE-SEP-A"],
        "KUBE-SEP-A": ["-A KUBE-SEP-A -j KUBE-MARK-MASQ", "-A KUBE-SEP-A -j KUBE-SVC-A"],
        "KUBE-SVC-B": ["-A KUBE-SVC-B -j KUBE-MARK-MASQ"],
        "KUBE-MARK-MASQ": [],
    }

    change = removal("nat", chains, of_any_mode)

    assert change.remove == change.declare == ("KUBE-SERVICES", "KUBE-SVC-B")
    assert change.delete == ("-A PREROUTING -j KUBE-SERVICES",)


async def test_an_error_in_one_place_is_told_and_stops_no_other() -> None:
    class Blind(FakeBackend):
        async def read(self) -> Tables:
            raise RedirectFailed("blind", "sees nothing")

    sees = FakeBackend(IPFamily.IPV6)
    sees.tables["nat"]["KUBE-SVC-A"] = []

    result = await remove([Blind(), sees], of_any_mode)

    assert [error.stderr for error in result.errors] == ["sees nothing"]
    assert result.removed == ("fake IPV6 nat KUBE-SVC-A",)
    assert "KUBE-SVC-A" not in sees.tables["nat"]
