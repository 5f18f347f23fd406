"""Who was sent where: from single connections to sums, and from sums to what may be said.

Three questions that are easily confused. Are all endpoints used alike? Does a client meet the same endpoint again more
often than chance lets it (sticky)? Do connections in succession, of whoever, meet the same one (runs)? Clients connect
in random order, since a fixed order repeats in step with a round robin and looks sticky.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from userspace_proxy.bench.analysis.judgement import Judgement, fault, good, suspect, unknown
from userspace_proxy.bench.analysis.statistics import chi_square, excess_z, jain
from userspace_proxy.bench.results import UNKNOWN_BACKEND, Balance

Assignment = tuple[float, int, str]
"""When, which client (-1: not known), which backend."""

ALPHA = 0.001
_MIN_EXPECTED = 5  # a chi-square with fewer per endpoint says nothing
_MIN_UNEVENNESS = 0.05  # what is smaller may be real in a large sample, but matters to nobody
MIN_PAIRS = 30
_STICKY_Z = 5.0
_STICKY_EXCESS = 0.1


def tally(
    assignments: Sequence[Assignment], eligible: Sequence[str], *, is_sequential: bool, endpoints: int = 0
) -> Balance:
    """Return the sums of connections in the order in which they began."""
    backends = [backend for _, _, backend in assignments]
    by_client: dict[int, list[str]] = {}
    for _, client, backend in assignments:
        if client >= 0:
            by_client.setdefault(client, []).append(backend)
    client_pairs = [pair for met in by_client.values() for pair in pairwise(met)]
    serial_pairs = list(pairwise(backends))
    size = len(eligible) or max(endpoints, len(set(backends)))
    violations = _cycle_violations(backends, size) if is_sequential else 0
    return Balance(
        eligible=list(eligible),
        endpoints=endpoints,
        counts=dict(sorted(Counter(backends).items())),
        clients=len(by_client),
        client_pairs=len(client_pairs),
        client_pairs_same=sum(a == b for a, b in client_pairs),
        serial_pairs=len(serial_pairs),
        serial_pairs_same=sum(a == b for a, b in serial_pairs),
        is_sequential=is_sequential,
        cycle_checked=max(0, len(backends) - 1) if is_sequential else 0,
        cycle_violations=violations,
    )


def total(balances: Iterable[Balance]) -> Balance:
    """Return the sums over repetitions."""
    result = Balance()
    for balance in balances:
        result.eligible = list(dict.fromkeys([*result.eligible, *balance.eligible]))
        result.counts = dict(sorted((Counter(result.counts) + Counter(balance.counts)).items()))
        result.endpoints = balance.endpoints
        result.clients = max(result.clients, balance.clients)
        result.is_sequential = balance.is_sequential
        for name in ("client_pairs", "client_pairs_same", "serial_pairs", "serial_pairs_same", "cycle_checked",
                     "cycle_violations"):  # fmt: skip
            setattr(result, name, getattr(result, name) + getattr(balance, name))
    return result


def shares(balance: Balance) -> list[int]:
    """Return how many connections each eligible endpoint got, those without any included."""
    counts = [balance.counts.get(name, 0) for name in names_of(balance)]
    return counts + [0] * (0 if balance.eligible else balance.endpoints - len(counts))


def names_of(balance: Balance) -> list[str]:
    """Return the names of the eligible endpoints, as far as they are known."""
    return balance.eligible or [name for name in balance.counts if name != UNKNOWN_BACKEND]


def is_enough(balance: Balance) -> bool:
    """Tell whether there are connections enough to say anything about shares."""
    counts = shares(balance)
    return len(counts) > 1 and sum(counts) / len(counts) >= _MIN_EXPECTED


def max_to_min(balance: Balance) -> float:
    """Return the connections of the most used endpoint, divided by those of the least used one."""
    counts = shares(balance)
    if not counts or max(counts) == 0:
        return 1.0
    return max(counts) / min(counts) if min(counts) else math.inf


def fairness(balance: Balance) -> float:
    """Return Jain's index over the eligible endpoints."""
    counts = shares(balance)
    return jain(counts) if counts else 1.0


def expected_same(balance: Balance) -> float:
    """Return how likely two connections meet the same endpoint when nothing but the shares counts."""
    number = sum(balance.counts.values())
    return sum((count / number) ** 2 for count in balance.counts.values()) if number else 0.0


def judge_distribution(balance: Balance) -> Judgement:
    """Say whether all endpoints are used alike, as far as chance allows."""
    counts = shares(balance)
    number = sum(counts)
    names = names_of(balance) + ["never seen"] * (len(counts) - len(names_of(balance)))
    shown = ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
    if len(counts) < 2:
        return unknown("there is only one endpoint" if counts else "nobody said which endpoint answered")
    if not is_enough(balance):
        return unknown(f"{number} connections are too few for {len(counts)} endpoints ({shown})")
    _, chance = chi_square(counts)
    unevenness = max(abs(count * len(counts) / number - 1) for count in counts)
    facts = f"{shown}; max/min {max_to_min(balance):.3g}, Jain {jain(counts):.4f}"
    if chance < ALPHA and unevenness > _MIN_UNEVENNESS:
        return fault(f"uneven: {facts}; chance explains it with p = {chance:.2g}")
    return good(f"even: {facts}, chi-square p = {chance:.2g}")


def judge_round_robin(balance: Balance) -> Judgement:
    """Say whether connections one after the other went round exactly."""
    if not balance.is_sequential:
        return unknown("needs connections one after the other (connections: 1)")
    size = len(shares(balance))
    if size < 2 or balance.cycle_checked < 2 * size:
        return unknown("too few connections to see whether they go round")
    if balance.cycle_violations:
        return fault(
            f"not a round robin: {balance.cycle_violations} of {balance.cycle_checked} connections "
            "met another endpoint than the one whose turn it was"
        )
    return good(f"exact round robin over {size} endpoints, {balance.cycle_checked} connections")


def judge_stickiness(balance: Balance) -> Judgement:
    """Say whether a client meets its endpoint again more often than the shares explain, though nobody asked for it."""
    if len(shares(balance)) < 2:
        return unknown("there is only one endpoint")
    if balance.client_pairs < MIN_PAIRS:
        return unknown(f"{balance.client_pairs} returns of clients are too few")
    expected = expected_same(balance)
    if expected > 1 - _STICKY_EXCESS:
        return unknown("nearly all connections meet one endpoint, so returning to it says nothing")
    same, pairs = balance.client_pairs_same, balance.client_pairs
    excess = (same / pairs - expected) / (1 - expected)
    facts = (
        f"{same / pairs:.0%} of {pairs} returns of clients met the endpoint they had before, {expected:.0%} expected"
    )
    z = excess_z(same, pairs, expected)
    if excess > _STICKY_EXCESS and z > _STICKY_Z:
        return fault(f"sticky: {facts}")
    if excess > 2 * _STICKY_EXCESS and z > _STICKY_Z / 2:
        return suspect(f"perhaps sticky: {facts}; more connections would tell")
    return good(f"not sticky: {facts}")


def judge_runs(balance: Balance) -> Judgement:
    """Say whether one endpoint gets many connections in succession, whoever they are from."""
    expected = expected_same(balance)
    if len(shares(balance)) < 2 or balance.serial_pairs < MIN_PAIRS or expected > 1 - _STICKY_EXCESS:
        return unknown("too few connections or endpoints")
    same, pairs = balance.serial_pairs_same, balance.serial_pairs
    excess = (same / pairs - expected) / (1 - expected)
    facts = f"{same / pairs:.0%} of {pairs} connections went where the one before went, {expected:.0%} expected"
    if excess > 2 * _STICKY_EXCESS and excess_z(same, pairs, expected) > _STICKY_Z:
        return fault(f"in runs: {facts}")
    return good(f"no runs: {facts}")


def _cycle_violations(backends: Sequence[str], size: int) -> int:
    """Count connections that broke the cycle: repeated one of the last size - 1, so that another had to wait."""
    return sum(backend in backends[max(0, index - size + 1) : index] for index, backend in enumerate(backends))
