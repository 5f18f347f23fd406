from __future__ import annotations

import random

import pytest

from userspace_proxy import Endpoint, NoEndpoints, RoundRobin

A, B, C, D = (Endpoint("10.0.0.1", port) for port in range(1, 5))
FIVE = [A, B, C, D, Endpoint("10.0.0.2", 1)]


def balancer_of(*endpoints: Endpoint, affinity_s: float | None = None) -> RoundRobin:
    balancer = RoundRobin(random.Random(7))
    balancer.update(endpoints, affinity_s)
    return balancer


def picks(balancer: RoundRobin, count: int, client: str = "10.1.0.1", *, now: float = 0.0) -> list[Endpoint]:
    return [balancer.pick(client, now=now) for _ in range(count)]


def test_no_endpoint_is_an_error() -> None:
    with pytest.raises(NoEndpoints):
        RoundRobin().pick("10.1.0.1", now=0.0)
    with pytest.raises(NoEndpoints, match="no endpoints"):
        balancer_of(affinity_s=5.0).pick("10.1.0.1", now=0.0)


def test_each_round_hits_every_endpoint_once_in_the_same_order() -> None:
    balancer = balancer_of(A, B, C)
    first = picks(balancer, 3)
    assert set(first) == {A, B, C}
    assert picks(balancer, 6) == first * 2


def test_the_same_endpoints_in_another_order_leave_the_turn_alone() -> None:
    balancer = balancer_of(A, B, C)
    first = picks(balancer, 3)
    assert picks(balancer, 1) == first[:1]
    balancer.update([C, A, B], None)
    assert picks(balancer, 2) == first[1:]


def test_other_endpoints_start_a_new_turn() -> None:
    balancer = balancer_of(A, B, C)
    picks(balancer, 1)
    balancer.update([A, B, C, D], None)
    assert set(picks(balancer, 4)) == {A, B, C, D}


def test_the_order_differs_between_balancers() -> None:
    firsts = set()
    for _ in range(100):
        balancer = RoundRobin()
        balancer.update([A, B, C, D], None)
        firsts.add(balancer.pick("10.1.0.1", now=0.0))
    assert firsts == {A, B, C, D}


def test_a_retry_takes_an_endpoint_not_tried_and_leaves_the_turn_alone() -> None:
    balancer = balancer_of(*FIVE)
    order = picks(balancer, 5)
    first = balancer.pick("10.1.0.1", now=0.0)
    tried = [first]
    for _ in range(4):
        tried.append(balancer.pick("10.1.0.1", now=0.0, tried=tried))
    assert tried == order
    assert balancer.pick("10.1.0.1", now=0.0, tried=tried) == order[0]  # all tried: it starts over
    assert picks(balancer, 1) == [order[1]]


def test_a_retry_after_the_failed_endpoint_went_takes_the_one_whose_turn_it_is() -> None:
    balancer = balancer_of(A, B, C)
    failed = balancer.pick("10.1.0.1", now=0.0)
    balancer.update([endpoint for endpoint in (A, B, C) if endpoint != failed], None)
    assert balancer.pick("10.1.0.1", now=0.0, tried=[failed]) == balancer.pick("10.1.0.1", now=0.0)


def test_the_default_affinity_of_10_800_s_is_in_seconds() -> None:
    """cases.md 18"""
    balancer = balancer_of(A, B, affinity_s=10_800)
    first = balancer.pick("10.1.0.1", now=100.0)
    assert balancer.pick("10.1.0.1", now=100.0 + 10_799) == first
    renewed_at = 100.0 + 10_799
    assert balancer.pick("10.1.0.1", now=renewed_at + 10_799) == first
    renewed_at += 10_799
    assert balancer.pick("10.1.0.1", now=renewed_at + 10_800) != first


def test_affinity_is_per_client_and_a_remembered_client_takes_no_turn() -> None:
    balancer = balancer_of(A, B, affinity_s=60)
    one = balancer.pick("10.1.0.1", now=0.0)
    assert picks(balancer, 5, "10.1.0.1") == [one] * 5
    two = balancer.pick("10.1.0.2", now=0.0)
    assert {one, two} == {A, B}
    assert picks(balancer, 5, "10.1.0.2") == [two] * 5


def test_a_failed_dial_resets_the_affinity_to_the_next_endpoint() -> None:
    balancer = balancer_of(A, B, C, affinity_s=60)
    failed = balancer.pick("10.1.0.1", now=0.0)
    instead = balancer.pick("10.1.0.1", now=0.0, tried=[failed])
    assert instead != failed
    assert picks(balancer, 5) == [instead] * 5


def test_removing_an_endpoint_forgets_only_its_clients() -> None:
    """cases.md 22"""
    balancer = balancer_of(A, B, C, affinity_s=60)
    before = {client: balancer.pick(client, now=0.0) for client in map(str, range(9))}
    balancer.update([A, C], 60)
    after = {client: balancer.pick(client, now=1.0) for client in before}
    assert B not in after.values()
    assert all(after[client] == endpoint for client, endpoint in before.items() if endpoint != B)
    assert after == {client: balancer.pick(client, now=2.0) for client in before}


def test_no_endpoints_forget_all_clients() -> None:
    balancer = balancer_of(A, B, affinity_s=60)
    balancer.pick("10.1.0.1", now=0.0)
    balancer.update([], 60)
    with pytest.raises(NoEndpoints):
        balancer.pick("10.1.0.1", now=0.0)
    balancer.update([A, B], 60)
    assert len(set(picks(balancer, 3))) == 1


def test_another_time_out_counts_at_once_for_clients_remembered_before() -> None:
    """cases.md 20"""
    balancer = balancer_of(A, B, affinity_s=10_800)
    first = balancer.pick("10.1.0.1", now=0.0)
    balancer.update([A, B], 2)
    assert balancer.pick("10.1.0.1", now=1.9) == first
    assert balancer.pick("10.1.0.1", now=3.9) != first


def test_affinity_off_and_on_again_remembers_nobody() -> None:
    balancer = balancer_of(A, B, affinity_s=60)
    first = balancer.pick("10.1.0.1", now=0.0)
    balancer.update([A, B], None)
    balancer.update([A, B], 60)
    assert balancer.pick("10.1.0.1", now=0.0) != first


def test_expired_clients_are_forgotten_and_others_are_not() -> None:
    balancer = balancer_of(A, B, affinity_s=10)
    one = balancer.pick("one", now=0.0)
    two = balancer.pick("two", now=5.0)
    assert balancer.pick("two", now=12.0) == two
    assert balancer.pick("one", now=12.0) == one  # in turn: it happens to be the first one's again
    assert len(balancer._remembered) == 2
