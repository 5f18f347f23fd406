"""One suite for all ways into the kernel: what a redirector promises, it promises with each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import pytest

from tests.conformance.hosts import FakeHost, Host, KernelHost
from tests.support.libiptc import LIBIPTC
from userspace_proxy.core.model import IPFamily, L4Protocol, ServicePort, ServicePortName
from userspace_proxy.core.portals import NodeFacts, ProxyPortKey
from userspace_proxy.core.rule import OWN_CHAINS, Chain, Dnat, Rule, Table
from userspace_proxy.core.rules import JUMPS_IN_FRONT, RuleSet, Style, render
from userspace_proxy.redirect.redirector import Redirector
from userspace_proxy.redirect.tables import OWN_CHAIN_NAMES, Tables

NODES = {IPFamily.IPV4: NodeFacts("192.168.77.1"), IPFamily.IPV6: NodeFacts("fd00:77::1")}
FIRST = "-A PREROUTING -m comment --comment"


@pytest.fixture(params=list(IPFamily), ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> IPFamily:
    return IPFamily(request.param)


@pytest.fixture(params=["fake", "restore-nft", "restore-legacy", LIBIPTC])
def host(request: pytest.FixtureRequest, family: IPFamily) -> Host:
    if request.param == "fake":
        return FakeHost(family)
    request.getfixturevalue("namespace")
    return KernelHost(request.param, family)


@pytest.fixture
async def redirector(host: Host) -> AsyncIterator[Redirector]:
    made = Redirector(await host.backend())
    yield made
    await made.close()


def services(family: IPFamily, count: int = 3, *, first_port: int = 40000, style: Style = Style.FAITHFUL) -> RuleSet:
    """Return the rules of services with every kind of portal."""
    made, ports = [], {}
    for number in range(count):
        protocol = L4Protocol.UDP if number % 2 else L4Protocol.TCP
        name = ServicePortName("ns", f"service-{number}", "port", protocol)
        made.append(
            ServicePort(
                name,
                80,
                cluster_ips=(f"10.96.0.{number + 1}", f"fd00:96::{number + 1:x}"),
                external_ips=("203.0.113.7", "fd00:113::7") if number == 0 else (),
                load_balancer_ips=("198.51.100.9", "fd00:51::9") if number == 1 else (),
                node_port=30000 + number if number == 2 else 0,
            )
        )
        ports[ProxyPortKey(name, family)] = first_port + number
    return render(made, ports, NODES[family], style)


def refused_rule(rules: RuleSet, number: int) -> RuleSet:
    """Return the rules with one that no kernel takes in the place of a service's."""
    name = list(rules.rules)[number]
    (rule, *_) = rules.rules[name]
    bad = Rule(Chain.NODEPORT_NON_LOCAL, rule.matches, Dnat("192.168.77.1", 1), protocol=name.protocol)
    if rules.family is IPFamily.IPV6:
        bad = replace(bad, target=Dnat("fd00:77::1", 1))
    return RuleSet(rules.family, {**rules.rules, name: (*rules.rules[name], bad)})


def ours(tables: Tables) -> Counter[str]:
    """Return the rules in chains of ours."""
    return Counter(
        line
        for chains in tables.values()
        for chain, lines in chains.items()
        if chain in OWN_CHAIN_NAMES
        for line in lines
    )


def texts(rules: Iterable[Rule]) -> Counter[str]:
    return Counter(rule.text for rule in rules)


@pytest.mark.parametrize("style", list(Style))
async def test_the_kernel_holds_what_is_wanted(
    host: Host, redirector: Redirector, family: IPFamily, style: Style
) -> None:
    rules = services(family, style=style)

    outcome = await redirector.replace(rules)

    tables = host.tables()
    assert ours(tables) == texts(rules)
    assert Counter(outcome.added) == texts(rules)
    assert all(chain in tables[table] for table in Table for chain in OWN_CHAINS[table])
    assert tables["nat"]["PREROUTING"] == [
        '-A PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules"'
        " -j KUBE-PORTALS-CONTAINER",
        "-A PREROUTING -m addrtype --dst-type LOCAL -m comment"
        ' --comment "handle service NodePorts; NOTE: this must be the last rule in the chain"'
        " -j KUBE-NODEPORT-CONTAINER",
    ]


async def test_what_is_right_is_not_written_again(host: Host, redirector: Redirector, family: IPFamily) -> None:
    rules = services(family)
    await redirector.replace(rules)

    for _ in range(10):
        assert not (await redirector.replace(services(family))).was_written
        assert not (await redirector.repair()).was_written

    assert ours(host.tables()) == texts(rules)


async def test_a_restart_that_finds_its_rules_writes_nothing(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    await redirector.replace(services(family))
    restarted = Redirector(await host.backend())

    assert not (await restarted.replace(services(family))).was_written
    await restarted.close()


async def test_a_change_touches_only_what_changed(host: Host, redirector: Redirector, family: IPFamily) -> None:
    before, after = services(family, 4), services(family, 5)
    changed = next(iter(after.rules))
    after = RuleSet(family, {**after.rules, changed: services(family, 1, first_port=41000).rules[changed]})
    await redirector.replace(before)

    outcome = await redirector.replace(after)

    assert ours(host.tables()) == texts(after)
    assert Counter(outcome.added) == texts(after) - texts(before)
    assert Counter(outcome.removed) == texts(before) - texts(after)


async def test_rules_of_services_that_are_gone_are_removed(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    await redirector.replace(services(family))

    await redirector.replace(RuleSet(family))

    assert ours(host.tables()) == Counter()


async def test_foreign_rules_stay_and_ours_move_back_to_their_places(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    foreign = '-p tcp -m comment --comment "a -j KUBE-PORTALS-HOST" -m tcp --dport 99 -j ACCEPT'
    await redirector.replace(services(family))
    host.insert("nat", "PREROUTING", foreign)
    host.insert("nat", "PREROUTING", "-j KUBE-PORTALS-CONTAINER")

    await redirector.repair()

    first, *between, last = host.tables()["nat"]["PREROUTING"]
    assert first.startswith(FIRST)
    assert between == [f"-A PREROUTING {foreign}"]
    assert last.endswith("-j KUBE-NODEPORT-CONTAINER")
    assert not (await redirector.repair()).was_written


async def test_a_foreign_rule_with_odd_quotes_is_read_and_stays(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    foreign = '-j LOG --log-prefix "KUBE- \\"it\\\'s "'
    host.insert("nat", "PREROUTING", foreign)

    await redirector.replace(services(family))

    assert f"-A PREROUTING {foreign}" in host.tables()["nat"]["PREROUTING"]
    assert not (await redirector.repair()).was_written


@pytest.mark.parametrize("delete_chains", [False, True])
@pytest.mark.parametrize("table", list(Table))
async def test_rules_that_others_flushed_come_back(
    host: Host, redirector: Redirector, family: IPFamily, table: Table, delete_chains: bool
) -> None:
    rules = services(family)
    await redirector.replace(rules)
    host.flush(table, delete_chains=delete_chains)
    assert await redirector.has_changed()

    await redirector.repair()

    assert ours(host.tables()) == texts(rules)
    assert not await redirector.has_changed()


async def test_a_change_after_a_flush_brings_everything_back(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    await redirector.replace(services(family))
    host.flush("nat", delete_chains=True)

    await redirector.replace(services(family, 4))

    assert ours(host.tables()) == texts(services(family, 4))


async def test_a_stray_copy_in_a_chain_of_ours_is_removed(host: Host, redirector: Redirector, family: IPFamily) -> None:
    rules = services(family)
    await redirector.replace(rules)
    copied = next(rule for rule in rules if rule.chain is Chain.PORTALS_HOST).text
    host.insert("nat", "KUBE-PORTALS-HOST", copied.removeprefix("-A KUBE-PORTALS-HOST "))

    await redirector.repair()

    assert ours(host.tables()) == texts(rules)


async def test_what_one_service_lacks_costs_no_other_its_rules(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    good = services(family, 10)
    bad = refused_rule(good, 4)
    name = list(good.rules)[4]
    others = [rule for owner, rules in good.rules.items() if owner != name for rule in rules]

    outcome = await redirector.replace(bad)

    assert list(outcome.refused) == [name]
    assert ours(host.tables()) == texts(others)
    assert list((await redirector.replace(bad)).refused) == [name]
    assert list((await redirector.repair()).refused) == [name]
    assert ours(host.tables()) == texts(others)
    assert not (await redirector.replace(good)).refused
    assert ours(host.tables()) == texts(good)


async def test_own_writes_do_not_look_like_those_of_others(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    await redirector.replace(services(family))
    assert not await redirector.has_changed()
    await redirector.replace(services(family, 4))
    assert not await redirector.has_changed()

    host.insert("nat", "OUTPUT", "-j ACCEPT")

    assert await redirector.has_changed()


async def test_jumps_in_front_outrank_what_others_have_and_stay_there(host: Host, family: IPFamily) -> None:
    redirector = Redirector(await host.backend(), jumps=JUMPS_IN_FRONT)
    foreign = "-p tcp -m tcp --dport 99 -j ACCEPT"
    for chain in ("PREROUTING", "OUTPUT"):
        host.insert("nat", chain, foreign)

    for _ in range(2):
        await redirector.replace(services(family))
        host.insert("nat", "PREROUTING", foreign)
        assert (await redirector.repair()).was_written
        assert not (await redirector.repair()).was_written

    for chain, suffix in (("PREROUTING", "CONTAINER"), ("OUTPUT", "HOST")):
        portals, node_ports, *others = host.tables()["nat"][chain]
        assert portals.endswith(f"-j KUBE-PORTALS-{suffix}")
        assert node_ports.endswith(f"-j KUBE-NODEPORT-{suffix}")
        assert set(others) == {f"-A {chain} {foreign}"}
    await redirector.close()


async def test_a_change_of_mode_moves_the_jumps(host: Host, redirector: Redirector, family: IPFamily) -> None:
    host.insert("nat", "PREROUTING", "-p tcp -m tcp --dport 99 -j ACCEPT")
    await redirector.replace(services(family))
    in_front = Redirector(await host.backend(), jumps=JUMPS_IN_FRONT)
    for each, place in ((in_front, 1), (redirector, 2)):
        await each.repair() if each is redirector else await each.replace(services(family))
        targets = [line.rpartition(" ")[2] for line in host.tables()["nat"]["PREROUTING"]]
        assert len(targets) == 3
        assert targets.index("KUBE-NODEPORT-CONTAINER") == place
    await in_front.close()


async def test_withdrawn_rules_leave_nothing_but_what_is_foreign(
    host: Host, redirector: Redirector, family: IPFamily
) -> None:
    host.insert("nat", "PREROUTING", "-p tcp -m tcp --dport 99 -j ACCEPT")
    rules = services(family)
    await redirector.replace(rules)

    outcome = await redirector.withdraw()

    assert Counter(outcome.removed) == texts(rules)
    assert outcome.was_written
    tables = host.tables()
    assert not {chain for chains in tables.values() for chain in chains} & OWN_CHAIN_NAMES
    assert tables["nat"]["PREROUTING"] == ["-A PREROUTING -p tcp -m tcp --dport 99 -j ACCEPT"]
    assert not (await redirector.withdraw()).was_written
    await redirector.replace(rules)
    assert ours(host.tables()) == texts(rules)
