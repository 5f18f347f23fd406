"""The redirector's policy, on tables in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import golden
from userspace_proxy.core.errors import KernelRefused, RedirectFailed, RuleNotUnderstood
from userspace_proxy.core.rule import Chain, Rule
from userspace_proxy.core.rules import RuleSet, render
from userspace_proxy.redirect.backend import FakeBackend
from userspace_proxy.redirect.redirector import MAX_NOT_UNDERSTOOD, Redirector
from userspace_proxy.redirect.tables import TableChange, Tables, meaning_of, target_of

RULES = render(golden.service_ports(), golden.proxy_ports(), golden.NODE)


def lacks(*matches: str) -> FakeBackend:
    return FakeBackend(refuses=lambda rule: not set(matches).isdisjoint(rule.kernel_matches))


def held(backend: FakeBackend) -> set[str]:
    return {line for chains in backend.tables.values() for lines in chains.values() for line in lines}


@pytest.mark.parametrize("matches", [("physdev",), ("addrtype",), ("physdev", "addrtype", "state")])
async def test_rules_that_need_a_match_that_the_kernel_lacks_are_left_out(matches: tuple[str, ...]) -> None:
    backend = lacks(*matches)
    redirector = Redirector(backend)

    outcome = await redirector.replace(RULES)

    expected = {rule.text for rule in RULES if set(matches).isdisjoint(rule.kernel_matches)}
    assert outcome.lacking == set(matches)
    assert not outcome.refused
    assert expected <= held(backend)
    assert ("addrtype" in matches) == (len(backend.tables["nat"]["PREROUTING"]) == 1)
    assert not (await redirector.replace(RULES)).was_written
    assert not (await redirector.repair()).was_written


class Deaf(FakeBackend):
    """Does not understand some rules, as iptables-restore without an extension."""

    def __init__(self, *words: str, stderr: str = "bad") -> None:
        super().__init__()
        self.words, self.stderr = words, stderr

    async def write(self, changes: Sequence[TableChange]) -> None:
        for change in changes:
            for line in change.lines():
                if any(word in line for word in self.words):
                    raise RuleNotUnderstood("deaf", self.stderr, line)
        await super().write(changes)


async def test_an_extension_that_is_not_installed_costs_only_its_rules() -> None:
    backend = Deaf("physdev", stderr="Couldn't load match `physdev':No such file or directory")

    outcome = await Redirector(backend).replace(RULES)

    assert outcome.lacking == {"physdev"}
    assert not outcome.refused


async def test_a_service_whose_rule_is_not_understood_is_left_out_by_name() -> None:
    outcome = await Redirector(Deaf("default/web:http", "prod/edge")).replace(RULES)

    assert {str(name) for name in outcome.refused} == {"default/web:http", "prod/edge:https"}


async def test_a_jump_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(RuleNotUnderstood):
        await Redirector(Deaf("handle ClusterIPs")).replace(RULES)


async def test_when_nothing_is_understood_the_attempts_end() -> None:
    many = {
        type(name)(name.namespace, f"{name.service}-{number}", name.port, name.protocol): rules
        for name, rules in RULES.rules.items()
        for number in range(MAX_NOT_UNDERSTOOD)
    }
    with pytest.raises(RuleNotUnderstood):
        await Redirector(Deaf("-A KUBE")).replace(RuleSet(RULES.family, many))


async def test_a_kernel_that_refuses_even_the_jumps_is_an_error_and_the_next_sync_tries_again() -> None:
    backend = FakeBackend(refuses=lambda rule: rule.chain is Chain.OUTPUT)
    redirector = Redirector(backend)

    with pytest.raises(KernelRefused):
        await redirector.replace(RULES)
    backend.refuses = lambda rule: False
    await redirector.replace(RULES)

    assert {rule.text for rule in RULES} <= held(backend)


async def test_a_refused_service_is_served_once_the_kernel_takes_its_rules() -> None:
    backend = FakeBackend(refuses=lambda rule: "prod/edge" in rule.text)
    redirector = Redirector(backend)
    refused = (await redirector.replace(RULES)).refused

    backend.refuses = lambda rule: False
    outcome = await redirector.repair()

    assert [str(name) for name in refused] == ["prod/edge:https"]
    assert not outcome.refused
    assert {rule.text for rule in RULES} <= held(backend)


async def test_a_small_change_is_one_small_write() -> None:
    backend = FakeBackend()
    redirector = Redirector(backend)
    await redirector.replace(RULES)
    node_ports = list(backend.tables["nat"]["KUBE-NODEPORT-HOST"])
    fewer = {name: rules for name, rules in RULES.rules.items() if name.service != "unnamed"}

    await redirector.replace(RuleSet(RULES.family, fewer))

    assert backend.writes == 2
    assert backend.tables["nat"]["KUBE-NODEPORT-HOST"] == node_ports
    assert not any("default/unnamed" in line for line in held(backend))


async def test_after_a_write_that_failed_everything_is_read_and_written_anew() -> None:
    backend = FakeBackend()
    redirector = Redirector(backend)
    await redirector.replace(RULES)
    backend.tables["nat"]["KUBE-PORTALS-HOST"].clear()  # unseen: the delta's deletions will fail
    fewer = dict(RULES.rules)
    fewer.popitem()

    await redirector.replace(RuleSet(RULES.family, fewer))

    assert {rule.text for rules in fewer.values() for rule in rules} <= held(backend)


async def test_a_failure_to_read_is_raised_and_forgotten_with_the_next_success() -> None:
    class Blind(FakeBackend):
        is_blind = True

        async def read(self) -> Tables:
            if self.is_blind:
                raise RedirectFailed("blind", "sees nothing")
            return await super().read()

    backend = Blind()
    redirector = Redirector(backend)
    with pytest.raises(RedirectFailed, match="sees nothing"):
        await redirector.replace(RULES)

    backend.is_blind = False

    assert (await redirector.replace(RULES)).was_written


async def test_other_spellings_of_the_same_rule_are_left_alone() -> None:
    backend = FakeBackend()
    redirector = Redirector(backend)
    await redirector.replace(RULES)
    for chains in backend.tables.values():
        for lines in chains.values():
            lines[:] = [respelled(line) for line in lines]

    for _ in range(10):
        assert not (await redirector.repair()).was_written


def respelled(line: str) -> str:
    """Return a rule as another iptables might print it."""
    chain, rest = line.split(" ", 2)[1:]
    options, _, target = rest.rpartition(" -j ")
    comment = options[options.index("-m comment") :].split('"')[1]
    without = options.replace(f'-m comment --comment "{comment}"', "").replace("/32", "").split()
    return f'-A {chain} -m comment --comment "{comment}" {" ".join(without)} -j {target}'.replace("  ", " ")


def test_a_negation_is_part_of_the_meaning() -> None:
    assert meaning_of("-A C ! -s 10.0.0.1/32 -j X") == meaning_of("-A C -j X ! -s 10.0.0.1")
    assert meaning_of("-A C ! -s 10.0.0.1 -d 10.0.0.2") != meaning_of("-A C -s 10.0.0.1 ! -d 10.0.0.2")


def test_a_quote_without_its_pair_hides_no_target() -> None:
    assert target_of('-A INPUT --string "it\'s KUBE-\\" -j KUBE-PORTALS-HOST') == "KUBE-PORTALS-HOST"


def test_a_rule_is_inserted_at_the_top_of_its_chain() -> None:
    rule = Rule(Chain.OUTPUT, (), RULES.rules[next(iter(RULES.rules))][0].target)

    assert TableChange("nat", insert=(rule,)).lines()[1].startswith("-I OUTPUT 1 -j ")
