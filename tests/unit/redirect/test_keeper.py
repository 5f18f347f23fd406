"""The keeper: all families, failures told once, flows forgotten, rules put right."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from ipaddress import ip_network

import pytest

from tests.support import golden
from tests.support.announcing import Announcing
from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily, ServicePort
from userspace_proxy.core.portals import NodeFacts, ProxyPortKey
from userspace_proxy.core.rule import OWN_CHAINS, Table
from userspace_proxy.core.rules import Style, render
from userspace_proxy.redirect.backend import Backend, FakeBackend
from userspace_proxy.redirect.cleanup import of_userspace_mode
from userspace_proxy.redirect.conntrack import UdpFlows
from userspace_proxy.redirect.keeper import Rendering, RuleKeeper
from userspace_proxy.redirect.redirector import Redirector
from userspace_proxy.redirect.tables import Tables

SERVICES = golden.service_ports()
PORTS = golden.proxy_ports()
NODES = {IPFamily.IPV4: golden.NODE, IPFamily.IPV6: NodeFacts("fd00::1")}


class FakeConntrack:
    def __init__(self) -> None:
        self.forgotten: set[UdpFlows] = set()

    async def forget(self, flows: Collection[UdpFlows]) -> None:
        self.forgotten |= set(flows)


class Blind(FakeBackend):
    """Cannot be read while it is blind."""

    is_blind = True

    async def read(self) -> Tables:
        if self.is_blind:
            raise RedirectFailed("blind", "sees nothing")
        return await super().read()


def keeper(*backends: FakeBackend, conntrack: FakeConntrack | None = None) -> RuleKeeper:
    return RuleKeeper(
        [Redirector(backend) for backend in backends], conntrack=conntrack or FakeConntrack(), leftovers=None
    )


def rules_in(backend: FakeBackend) -> set[str]:
    return {line for chains in backend.tables.values() for lines in chains.values() for line in lines}


def rules_in_chains(backends: Sequence[FakeBackend], table: Table) -> list[str]:
    """Return the rules in chains of ours."""
    chains = [each.tables[table.value].get(chain.value, []) for each in backends for chain in OWN_CHAINS[table]]
    return [line for lines in chains for line in lines]


async def test_a_family_that_fails_stops_no_other_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    blind, sees = Blind(IPFamily.IPV6), FakeBackend()
    kept = keeper(blind, sees)

    reports = [await kept.apply(SERVICES, PORTS, NODES) for _ in range(3)]

    assert list(reports[0].failures) == [IPFamily.IPV6]
    assert not reports[0].is_complete
    assert {rule.text for rule in render(SERVICES, PORTS, golden.NODE)} <= rules_in(sees)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    blind.is_blind = False
    assert (await kept.check()).is_complete


async def test_a_family_that_fails_keeps_no_leftovers_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_other_ways(family: IPFamily, name: str) -> list[Backend]:
        return []

    monkeypatch.setattr("userspace_proxy.redirect.keeper.other_ways_in", no_other_ways)
    blind, sees = Blind(IPFamily.IPV6), FakeBackend()
    for backend in (blind, sees):
        backend.tables["nat"]["KUBE-SERVICES"] = []
    kept = RuleKeeper([Redirector(blind), Redirector(sees)], conntrack=FakeConntrack())

    await kept.apply(SERVICES, PORTS, NODES)
    assert "KUBE-SERVICES" not in sees.tables["nat"]
    assert "KUBE-SERVICES" in blind.tables["nat"]
    blind.is_blind = False
    await kept.check()
    assert "KUBE-SERVICES" not in blind.tables["nat"]


async def test_a_family_that_the_kernel_lacks_is_no_failure_where_the_node_has_no_address_of_it() -> None:
    kept = keeper(Blind(IPFamily.IPV6), FakeBackend())
    assert (await kept.apply(SERVICES, PORTS, {IPFamily.IPV4: golden.NODE})).is_complete
    assert not (await kept.apply(SERVICES, PORTS, NODES)).is_complete


async def test_the_udp_flows_of_rules_that_changed_are_forgotten() -> None:
    conntrack = FakeConntrack()
    kept = keeper(FakeBackend(), conntrack=conntrack)
    await kept.apply(SERVICES, PORTS, NODES)
    assert UdpFlows("10.96.0.10", 53) in conntrack.forgotten
    assert {UdpFlows(address, 30700) for address in golden.NODE.local_addresses} <= conntrack.forgotten
    conntrack.forgotten.clear()

    await kept.apply(SERVICES, PORTS, NODES)
    assert not conntrack.forgotten

    dns = next(key for key in PORTS if key.name.port == "dns")
    await kept.apply(SERVICES, {**PORTS, dns: 41000}, NODES)
    assert conntrack.forgotten == {UdpFlows("10.96.0.10", 53)}


async def test_the_flows_of_a_service_that_a_former_process_left_are_forgotten_too() -> None:
    backend, conntrack = FakeBackend(), FakeConntrack()
    await keeper(backend).apply(SERVICES, PORTS, NODES)

    await keeper(backend, conntrack=conntrack).apply([], {}, NODES)

    assert UdpFlows("10.96.0.10", 53) in conntrack.forgotten


async def test_the_flows_of_what_is_waking_are_forgotten_once_when_it_is_waking_no_more() -> None:
    conntrack = FakeConntrack()
    kept = keeper(FakeBackend(), conntrack=conntrack)
    await kept.apply(SERVICES, PORTS, NODES)
    dns = next(each for each in SERVICES if each.name.port == "dns")
    others = [each for each in SERVICES if each is not dns]
    flow = UdpFlows("10.96.0.10", 53)
    conntrack.forgotten.clear()

    for _ in range(2):
        await kept.apply(others, PORTS, NODES, waking=[dns])
        await kept.check()
        assert not conntrack.forgotten

    await kept.apply(others, PORTS, NODES)
    assert conntrack.forgotten == {flow}
    conntrack.forgotten.clear()
    await kept.apply(others, PORTS, NODES)
    assert not conntrack.forgotten


async def test_the_flows_of_what_is_idled_again_are_forgotten_with_its_new_rules() -> None:
    conntrack = FakeConntrack()
    kept = keeper(FakeBackend(), conntrack=conntrack)
    await kept.apply(SERVICES, PORTS, NODES)
    dns = next(each for each in SERVICES if each.name.port == "dns")
    await kept.apply([each for each in SERVICES if each is not dns], PORTS, NODES, waking=[dns])
    conntrack.forgotten.clear()

    await kept.apply(SERVICES, PORTS, NODES)

    assert conntrack.forgotten == {UdpFlows("10.96.0.10", 53)}


async def test_what_is_withdrawn_leaves_neither_rules_nor_flows() -> None:
    backend, conntrack = FakeBackend(), FakeConntrack()
    kept = keeper(backend, conntrack=conntrack)
    dns = next(each for each in SERVICES if each.name.port == "dns")
    await kept.apply(SERVICES, PORTS, NODES)
    await kept.apply([], PORTS, NODES, waking=[dns])
    conntrack.forgotten.clear()

    report = await kept.withdraw()

    assert report.is_complete
    assert not rules_in(backend)
    assert conntrack.forgotten == {UdpFlows("10.96.0.10", 53)}
    await kept.close()


async def test_beside_another_mode_only_what_is_ours_is_a_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, here = FakeBackend(), FakeBackend()

    async def other_ways(family: IPFamily, name: str) -> list[Backend]:
        return [elsewhere]

    monkeypatch.setattr("userspace_proxy.redirect.keeper.other_ways_in", other_ways)
    for backend in (elsewhere, here):
        backend.tables["nat"]["KUBE-SERVICES"] = []
    elsewhere.tables["nat"]["KUBE-PORTALS-HOST"] = []
    kept = RuleKeeper([Redirector(here)], conntrack=FakeConntrack(), leftovers=of_userspace_mode)

    await kept.apply(SERVICES, PORTS, NODES)

    assert "KUBE-PORTALS-HOST" in here.tables["nat"]
    assert "KUBE-PORTALS-HOST" not in elsewhere.tables["nat"]
    assert all("KUBE-SERVICES" in each.tables["nat"] for each in (elsewhere, here))


async def test_a_refused_service_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = keeper(FakeBackend(refuses=lambda rule: "prod/edge" in rule.text))

    reports = [await kept.apply(SERVICES, PORTS, NODES), await kept.check()]

    for report in reports:
        ((name, family),) = report.refused
        assert (str(name), family) == ("prod/edge:https", IPFamily.IPV4)
    assert len([record for record in caplog.records if "prod/edge:https" in record.message]) == 1


async def test_source_ranges_that_cannot_be_enforced_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    ranges = [replace(SERVICES[0], load_balancer_source_ranges=(ip_network("10.0.0.0/8"),))]
    kept = keeper(FakeBackend())

    for _ in range(3):
        await kept.apply(ranges, PORTS, NODES)

    assert [str(SERVICES[0].name) in record.message for record in caplog.records] == [True]


async def test_a_kernel_without_a_match_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    kept = keeper(FakeBackend(refuses=lambda rule: "physdev" in rule.kernel_matches))

    for _ in range(3):
        assert (await kept.apply(SERVICES, PORTS, NODES)).is_complete

    assert [record.message for record in caplog.records] == [
        "this kernel has no physdev match for IPV4: rules that need it are left out"
    ]


async def test_a_family_without_node_address_has_empty_chains() -> None:
    backend = FakeBackend()

    await keeper(backend).apply(SERVICES, PORTS, {})

    assert backend.tables["nat"]["KUBE-PORTALS-HOST"] == []


@pytest.mark.parametrize(("is_seen", "sync_period_s"), [(True, 30), (False, 0.02)])
async def test_changes_by_others_are_put_right_when_seen_and_else_at_the_next_period(
    monkeypatch: pytest.MonkeyPatch, is_seen: bool, sync_period_s: float
) -> None:
    monkeypatch.setattr("userspace_proxy.redirect.watch.POLL_S", 0.01)
    backend = Announcing()
    kept = keeper(backend)
    await kept.apply(SERVICES, PORTS, NODES)
    backend.tables["nat"]["OUTPUT"].clear()
    backend.foreign_changes += is_seen
    backend.written.clear()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(kept.run(lambda: sync_period_s))
        async with asyncio.timeout(5):
            await backend.written.wait()
        running.cancel()

    assert len(backend.tables["nat"]["OUTPUT"]) == 2
    await kept.close()


async def test_only_what_changed_is_rendered_anew() -> None:
    rendering = Rendering(Style.FAITHFUL)
    before = await rendering.rules(SERVICES, PORTS, golden.NODE)
    changed: list[ServicePort] = [replace(SERVICES[0], port=8443), *SERVICES[1:]]

    after = await rendering.rules(changed, PORTS, golden.NODE)

    assert [name for name in after.rules if after.rules[name] is not before.rules[name]] == [SERVICES[0].name]
    assert dict(after.rules) == dict(render(changed, PORTS, golden.NODE).rules)
    assert rendering.counts == Counter(rule.chain.table for rule in after)
    assert rendering.counts[Table.NAT]
    moved = await rendering.rules(changed, PORTS, NodeFacts("192.168.77.99"))
    assert rendering.counts == Counter(rule.chain.table for rule in moved)
    assert dict(moved.rules) == dict(render(changed, PORTS, NodeFacts("192.168.77.99")).rules)
    key = ProxyPortKey(SERVICES[1].name, IPFamily.IPV4)
    other_port = await rendering.rules(changed, {**PORTS, key: 1234}, golden.NODE)
    assert any("1234" in rule.text for rule in other_port.rules[SERVICES[1].name])
    await rendering.rules([], PORTS, golden.NODE)
    assert not any(rendering.counts.values())


async def test_a_report_counts_the_rules_of_all_families() -> None:
    backends = FakeBackend(), FakeBackend(IPFamily.IPV6)
    kept = keeper(*backends)
    report = await kept.apply(SERVICES, PORTS, NODES)
    assert dict(report.rule_counts) == {table: len(rules_in_chains(backends, table)) for table in Table}
    report = await kept.apply(SERVICES, PORTS, {IPFamily.IPV4: golden.NODE})
    assert report.rule_counts[Table.NAT] == len(rules_in_chains(backends[:1], Table.NAT))
    await kept.close()
