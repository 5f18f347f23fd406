"""What is said of balancing, affinity, stalls and failovers, given who was sent where and when."""

from __future__ import annotations

import random

import pytest

from userspace_proxy.bench.analysis import affinity, balance
from userspace_proxy.bench.analysis.balance import Assignment
from userspace_proxy.bench.analysis.failover import Happened, judge_event, outcome_of
from userspace_proxy.bench.analysis.stalls import find_stalls, judge_all_tests, judge_stalls
from userspace_proxy.bench.analysis.validity import limits_of
from userspace_proxy.bench.results import Affinity, Datagrams, SelfWatch, Stalls

NAMES = ["1", "2", "3", "4"]
SEEDS = range(30)


def visits(picks: list[str], seed: int = 1, clients: int = 16) -> list[Assignment]:
    rng = random.Random(seed)
    return [(index / 100, rng.randrange(clients), backend) for index, backend in enumerate(picks)]


def tally(picks: list[str], *, is_sequential: bool = False, seed: int = 1) -> balance.Balance:
    return balance.tally(visits(picks, seed), NAMES, is_sequential=is_sequential)


def round_robin(number: int) -> list[str]:
    return [NAMES[index % 4] for index in range(number)]


def test_a_round_robin_is_even_exact_and_not_sticky() -> None:
    found = tally(round_robin(400), is_sequential=True)
    judges = (balance.judge_distribution, balance.judge_round_robin, balance.judge_stickiness, balance.judge_runs)
    assert [judge(found).status for judge in judges] == ["good"] * 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fair_die_is_even_and_not_sticky_whatever_the_seed(seed: int) -> None:
    picks = random.Random(seed).choices(NAMES, k=1000)
    found = tally(picks, is_sequential=True, seed=seed)
    assert balance.judge_distribution(found).status == "good"
    assert balance.judge_stickiness(found).status == "good"
    assert balance.judge_runs(found).status == "good"
    assert balance.judge_round_robin(found).status == "fault"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loaded_die_is_uneven_whatever_the_seed(seed: int) -> None:
    picks = random.Random(seed).choices(NAMES, weights=[30, 20, 25, 25], k=3000)
    assert balance.judge_distribution(tally(picks)).status == "fault"


def test_an_endpoint_that_is_never_used_counts() -> None:
    assert balance.judge_distribution(tally(["1", "2", "3"] * 50)).status == "fault"


def test_nothing_is_said_of_a_few_connections() -> None:
    found = tally(["1", "1", "2", "1"])
    assert balance.judge_distribution(found).status == "unknown"
    assert balance.judge_stickiness(found).status == "unknown"


def test_one_turn_out_of_order_is_no_round_robin() -> None:
    picks = round_robin(40)
    picks[20], picks[21] = picks[21], picks[20]
    assert balance.judge_round_robin(tally(picks, is_sequential=True)).status == "fault"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_balancer_that_is_sticky_for_some_is_sticky(seed: int) -> None:
    rng = random.Random(seed)
    remembered: dict[int, str] = {}
    assignments: list[Assignment] = []
    for index in range(600):
        client = rng.randrange(32)
        is_sticky = client % 3 == 0
        backend = remembered.setdefault(client, rng.choice(NAMES)) if is_sticky else rng.choice(NAMES)
        assignments.append((index / 100, client, backend))
    found = balance.tally(assignments, NAMES, is_sequential=False)
    assert balance.judge_stickiness(found).status == "fault"


def test_connections_in_runs_are_found_though_even() -> None:
    found = tally([NAMES[index // 10 % 4] for index in range(400)])
    assert balance.judge_distribution(found).status == "good"
    assert balance.judge_runs(found).status == "fault"


def test_repetitions_add_up() -> None:
    total = balance.total([tally(round_robin(40)), tally(round_robin(44))])
    assert sum(total.counts.values()) == 84
    assert balance.max_to_min(total) == 1.0


def follow(assignments: list[Assignment], timeout_s: float = 2.0, **changes: object) -> Affinity:
    unusable, removed = changes.pop("unusable", {}), changes.pop("removed", {})
    return affinity.follow(assignments, timeout_s, unusable=unusable, removed=removed, **changes)  # type: ignore[arg-type]


def test_a_client_that_moves_within_the_time_out_is_a_violation() -> None:
    found = follow([(0.0, 1, "1"), (1.0, 1, "2"), (0.0, 2, "3"), (1.0, 2, "3")])
    assert (found.violations, found.violating_clients, found.kept_pairs) == (1, 1, 2)
    assert affinity.judge_kept(found).status == "fault"


def test_a_client_may_move_when_its_endpoint_is_gone_but_not_when_another_is() -> None:
    gone = {"1": [(0.5, 9.0)]}
    found = follow([(0.0, 1, "1"), (1.0, 1, "2")], unusable=gone, removed=gone, changes=[0.5])
    assert found.violations == 0
    found = follow([(0.0, 1, "3"), (1.0, 1, "2")], unusable=gone, removed=gone, changes=[0.5])
    assert (found.violations, found.moved_by_change) == (1, 1)


def test_an_endpoint_that_is_used_long_after_it_was_removed_is_a_fault() -> None:
    gone = {"1": [(0.5, 9.0)]}
    found = follow([(3.0, 1, "1")], unusable=gone, removed=gone)
    assert affinity.judge_removal(found).status == "fault"


def test_an_affinity_that_outlasts_its_time_out_is_a_fault() -> None:
    late = [(at, client, "1") for client in range(20) for at in (0.0, 5.0)]
    assert affinity.judge_expiry(follow(late), endpoints=4).status == "fault"
    moved = [(at, client, NAMES[(client + int(at)) % 4]) for client in range(20) for at in (0.0, 5.0)]
    assert affinity.judge_expiry(follow(moved), endpoints=4).status == "good"


def test_one_hiccup_is_suspect_three_are_a_fault() -> None:
    once = find_stalls([(0.0, 0.3), (1.0, 1.01)], [], 0.1)
    assert judge_stalls([once], [], 2, 2.0).status == "suspect"
    thrice = find_stalls([(0.0, 0.3), (1.0, 1.3), (2.0, 2.3)], [], 0.1)
    assert judge_stalls([thrice], [], 3, 3.0).status == "fault"


def test_a_wait_through_which_the_generator_slept_is_not_the_targets() -> None:
    found = find_stalls([(0.0, 0.3)], [(0.05, 0.28)], 0.1)
    assert (found.slow, found.unseen) == (0, 1)


def test_what_the_backends_do_alone_is_not_said_of_the_target() -> None:
    stalls = find_stalls([(float(at), at + 0.3) for at in range(5)], [], 0.1)
    assert judge_stalls([stalls], [stalls], 5, 5.0).status == "suspect"


def test_a_request_that_others_overtake_is_held_up() -> None:
    fast = [(at / 100, at / 100 + 0.001) for at in range(100)]
    found = find_stalls([*fast, (0.1, 0.5), (0.2, 0.6), (0.3, 0.7)], [], 0.1)
    assert found.held == 3
    assert judge_stalls([found], [], 103, 60.0).status == "fault"


def stalled(*, excuse_s: float | None) -> Stalls:
    found = find_stalls([(0.0, 0.3)], [], 0.1)
    found.excuse_s = excuse_s
    return found


def test_what_a_lack_of_cpu_explains_is_not_the_targets() -> None:
    assert judge_stalls([stalled(excuse_s=0.5)] * 5, [], 5, 5.0).status == "suspect"
    assert judge_stalls([stalled(excuse_s=0.01)] * 5, [], 5, 5.0).status == "fault"


def test_stalls_are_proven_over_all_tests_when_the_target_had_its_cpu_or_stalls_in_most() -> None:
    calm = find_stalls([], [], 0.1)
    assert judge_all_tests([stalled(excuse_s=0.01)] * 3 + [calm] * 27, []) is not None
    assert judge_all_tests([stalled(excuse_s=0.5)] * 3 + [calm] * 27, []) is None
    assert judge_all_tests([stalled(excuse_s=None)] * 3 + [calm] * 27, []) is None
    assert judge_all_tests([stalled(excuse_s=None)] * 3 + [calm], []) is not None
    assert judge_all_tests([stalled(excuse_s=0.01)] * 3, [stalled(excuse_s=None)] * 3) is None


def event(kind: str, failed: list[float], uses: list[float] | None = None) -> str:
    happened = Happened(kind, 1.0, 3.0, 2, "2")
    outcome = outcome_of(happened, failed, [], [(at, 0, "2") for at in uses or []])
    return judge_event([outcome], limit_s=0.5).status


def test_a_failover_is_over_with_the_last_request_that_went_wrong() -> None:
    assert event("kill", [1.1, 1.2]) == "good"
    assert event("kill", [1.1, 2.0]) == "fault"
    assert event("kill", [1.1, 2.9]) == "fault"


def test_an_added_endpoint_must_be_used_and_a_removed_one_must_not() -> None:
    assert event("add", [], [1.2]) == "good"
    assert event("add", []) == "fault"
    assert event("remove", [], [1.1]) == "good"
    assert event("remove", [], [2.5]) == "fault"


def limits(watch: SelfWatch, **values: object) -> list[str]:
    given = {"is_open_loop": False, "is_bulk": False, "latency_p99_s": 0.01, "duration_s": 1.0, "datagrams": None,
             "has_target": True, **values}  # fmt: skip
    return [limit.affects for limit in limits_of(watch, **given)]  # type: ignore[arg-type]


def test_the_harness_says_when_it_was_the_limit_itself() -> None:
    assert limits(SelfWatch(own_failures={"ports": 3}, target_busy=1.0)) == ["all"]
    assert limits(SelfWatch(generator_busy=0.99, target_busy=0.5)) == ["throughput"]
    assert limits(SelfWatch(generator_busy=0.5, backends_busy=0.99, target_busy=0.5)) == ["throughput"]
    assert limits(SelfWatch(lag_p99_s=0.008, target_busy=1.0), is_open_loop=True) == ["latency"]
    assert limits(SelfWatch(blind_s=0.5, target_busy=1.0)) == ["latency"]
    assert limits(SelfWatch(target_busy=1.0), datagrams=Datagrams(own_drops=1)) == ["loss"]


def test_the_harness_says_nothing_when_the_target_was_the_limit() -> None:
    assert limits(SelfWatch(generator_busy=0.99, target_busy=0.99)) == []
    assert limits(SelfWatch(generator_busy=0.99), has_target=False) == []
