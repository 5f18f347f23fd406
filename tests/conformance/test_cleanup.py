"""Clean-up: what we and kube-proxy left goes, what is foreign stays as it is, in every variant and family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import golden
from tests.support.libiptc import needs_libiptc
from tests.support.namespaces import Namespace, run
from userspace_proxy.core.model import IPFamily
from userspace_proxy.core.portals import NodeFacts
from userspace_proxy.core.rule import OWN_CHAINS, Table
from userspace_proxy.core.rules import render
from userspace_proxy.redirect.cleanup import clean_up
from userspace_proxy.redirect.conntrack import ConntrackProgram
from userspace_proxy.redirect.keeper import RuleKeeper
from userspace_proxy.redirect.libiptc import LibiptcBackend
from userspace_proxy.redirect.opening import BackendChoice, open_redirectors
from userspace_proxy.redirect.programs import legacy_tables
from userspace_proxy.redirect.redirector import Redirector
from userspace_proxy.redirect.tables import Tables, read_save, target_of

VARIANTS = pytest.mark.parametrize("variant", ["nft", "legacy"])
FIXTURES = pytest.mark.parametrize("fixture", ["fixture", "fixture2"])


def restore(variant: str, save: str, stem: str = "iptables") -> None:
    run(f"{stem}-{variant}-restore", "--noflush", stdin=save)


def saved(variant: str, stem: str = "iptables") -> Tables:
    """Return the tables without built-in chains that are empty."""
    tables = read_save(run(f"{stem}-{variant}-save"))
    kept = {
        table: {
            chain: rules for chain, rules in chains.items() if rules or chain.startswith(("KUBE", "CNI", "FLANNEL"))
        }
        for table, chains in tables.items()
    }
    return {table: chains for table, chains in kept.items() if chains}


def fixture_text(path: Path, stem: str) -> str:
    """Return a save; for ip6tables with addresses of its family."""
    text = path.read_text()
    if stem == "iptables":
        return text
    text = text.replace("0.0.0.0/0", "::/0").replace("icmp-port", "icmp6-port")
    text = re.sub(r"--to-destination (\d+)\.(\d+)\.(\d+)\.(\d+):", r"--to-destination [fd00:\1:\2:\3::\4]:", text)
    text = re.sub(r" (\d+)\.(\d+)\.(\d+)\.(\d+)/32", r" fd00:\1:\2:\3::\4/128", text)
    return re.sub(r" (\d+)\.(\d+)\.(\d+)\.0/\d+", r" fd00:\1:\2:\3::/64", text)


@VARIANTS
@FIXTURES
@pytest.mark.parametrize("stem", ["iptables", "ip6tables"])
async def test_of_a_busy_host_only_what_is_foreign_remains(
    namespace: Namespace, variant: str, fixture: str, stem: str
) -> None:
    restore(variant, fixture_text(golden.FIXTURES / f"{fixture}-foreign-only.rules", stem), stem)
    foreign = saved(variant, stem)
    everything = fixture_text(golden.FIXTURES / f"{fixture}-kubeproxy.rules", stem)
    run(f"{stem}-{variant}-restore", stdin=everything)
    assert saved(variant, stem) != foreign

    result = await clean_up()

    assert not result.errors
    assert saved(variant, stem) == foreign
    assert not (await clean_up()).removed


@VARIANTS
async def test_what_a_real_kube_proxy_left_in_either_mode_goes(namespace: Namespace, variant: str) -> None:
    restore(variant, golden.userspace_save())
    restore(variant, (golden.GOLDEN / "iptables-mode-leftovers.iptables-save").read_text())
    restore(variant, (golden.GOLDEN / "iptables-mode-leftovers.ip6tables-save").read_text(), "ip6tables")

    result = await clean_up()

    assert not result.errors
    assert saved(variant) == saved(variant, "ip6tables") == {}
    if variant == "nft":
        assert legacy_tables(IPFamily.IPV4) == legacy_tables(IPFamily.IPV6) == ()


@VARIANTS
async def test_both_variants_are_cleaned_where_both_have_rules(namespace: Namespace, variant: str) -> None:
    for each in ("nft", "legacy"):
        restore(each, golden.userspace_save())

    await clean_up()

    assert saved("nft") == saved("legacy") == {}


@needs_libiptc
async def test_python_iptables_cleans_a_host_without_programs(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore("legacy", (golden.GOLDEN / "iptables-mode-leftovers.iptables-save").read_text())
    restore("legacy", golden.userspace_save())
    monkeypatch.setattr("userspace_proxy.redirect.programs.which", lambda program: None)

    result = await clean_up()

    assert not result.errors
    assert saved("legacy") == {}


async def test_legacy_tables_that_nothing_reaches_are_an_error(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore("legacy", golden.userspace_save())
    monkeypatch.setattr("userspace_proxy.redirect.programs.which", lambda program: None)
    monkeypatch.setattr("userspace_proxy.redirect.cleanup.is_installed", lambda: False)

    (error,) = (await clean_up()).errors

    assert "IPV4 legacy tables" in str(error)


@VARIANTS
async def test_the_first_sync_removes_the_iptables_mode_and_the_other_variant(
    namespace: Namespace, variant: str
) -> None:
    other = {"nft": "legacy", "legacy": "nft"}[variant]
    leftovers = (golden.GOLDEN / "iptables-mode-leftovers.iptables-save").read_text()
    foreign = "*nat\n:MINE - [0:0]\n-A PREROUTING -j MINE\nCOMMIT\n"
    for each in (variant, other):
        restore(each, leftovers)
        restore(each, foreign)
    restore(other, golden.userspace_save())
    opened = await open_redirectors(BackendChoice(variant))
    keeper = RuleKeeper(opened.redirectors, conntrack=ConntrackProgram("/bin/true"))

    report = await keeper.apply(golden.service_ports(), golden.proxy_ports(), {IPFamily.IPV4: golden.NODE})

    assert report.is_complete
    assert saved(other) == {"nat": {"PREROUTING": ["-A PREROUTING -j MINE"]}}
    chains = {chain for of_table in saved(variant).values() for chain in of_table if chain.startswith("KUBE")}
    assert chains == {chain for table in Table for chain in OWN_CHAINS[table]}
    assert not any([await redirector.has_changed() for redirector in opened.redirectors])
    await keeper.close()


@VARIANTS
async def test_a_real_kube_proxy_in_userspace_mode_and_ours_print_the_same_rules(
    namespace: Namespace, variant: str
) -> None:
    opened = await open_redirectors(BackendChoice(variant), [IPFamily.IPV4])
    rules = render(golden.service_ports(), golden.proxy_ports(), golden.NODE)

    await opened.redirectors[0].replace(rules)

    ours, theirs = golden.rule_lines(run(f"iptables-{variant}-save")), golden.rule_lines(golden.userspace_save())
    assert {chain: sorted(lines) for chain, lines in ours.items()} == {
        chain: sorted(lines) for chain, lines in theirs.items()
    }
    await opened.redirectors[0].close()


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ('-A A -m comment --comment "x -j B" -j C', "C"),
        ("-A A -m comment --comment -j -j C", "C"),
        (r'-A A -m comment --comment "\"-j D\"" -g E', "E"),
        ("-A A -p tcp", ""),
    ],
)
def test_a_comment_does_not_mislead_about_the_target(line: str, target: str) -> None:
    assert target_of(line) == target


@needs_libiptc
async def test_libiptc_leaves_the_rules_of_the_other_family_alone(namespace: Namespace) -> None:
    redirectors = [Redirector(LibiptcBackend(family)) for family in IPFamily]
    for redirector in redirectors:
        node = golden.NODE if redirector.family is IPFamily.IPV4 else NodeFacts("fd00::1")
        await redirector.replace(render(golden.service_ports(), golden.proxy_ports(), node))

    assert len(saved("legacy")["nat"]["KUBE-PORTALS-HOST"]) == 14
    assert saved("legacy", "ip6tables")["nat"]["KUBE-PORTALS-HOST"] == []
    for redirector in redirectors:
        await redirector.close()
