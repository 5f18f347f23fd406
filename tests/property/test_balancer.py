"""RoundRobin beside a simple model that looks at everything each time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy import Endpoint, NoEndpoints, RoundRobin

ENDPOINTS = [Endpoint("10.0.0.1", port) for port in range(1, 6)]

updates = st.tuples(
    st.just("update"), st.lists(st.sampled_from(ENDPOINTS), unique=True), st.sampled_from([None, 5.0, 50.0])
)
picks = st.tuples(st.just("pick"), st.sampled_from(["x", "y", "z"]), st.integers(0, 3))
waits = st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 20.0]), st.none())


class Model:
    def __init__(self) -> None:
        self.order: list[Endpoint] = []
        self.turn = 0
        self.affinity_s: float | None = None
        self.seen: dict[str, tuple[Endpoint, float]] = {}

    def update(self, order: list[Endpoint], affinity_s: float | None) -> None:
        if affinity_s is None:
            self.seen = {}
        self.affinity_s = affinity_s
        if set(order) != set(self.order):
            self.order, self.turn = order, 0
            self.seen = {client: seen for client, seen in self.seen.items() if seen[0] in order}

    def pick(self, client: str, now: float, tried: list[Endpoint]) -> Endpoint:
        if self.affinity_s is not None:  # who is too late now stays forgotten, even if the time-out grows afterwards
            self.seen = {who: seen for who, seen in self.seen.items() if now - seen[1] < self.affinity_s}
        seen = self.seen.get(client)
        if tried:
            position = self.order.index(tried[-1])
            following = [self.order[(position + step) % len(self.order)] for step in range(1, len(self.order) + 1)]
            chosen = ([endpoint for endpoint in following if endpoint not in tried] or following)[0]
        elif seen is not None:
            chosen = seen[0]
        else:
            chosen = self.order[self.turn % len(self.order)]
            self.turn += 1
        if self.affinity_s is not None:
            self.seen[client] = (chosen, now)
        return chosen


@given(st.lists(st.one_of(updates, picks, waits), max_size=60))
def test_round_robin_does_what_its_model_does(steps: list[tuple[str, object, object]]) -> None:
    balancer, model, now = RoundRobin(random.Random(1)), Model(), 0.0
    for kind, what, more in steps:
        match kind, what, more:
            case "update", list(endpoints), affinity_s:
                assert affinity_s is None or isinstance(affinity_s, float)
                balancer.update(endpoints, affinity_s)
                model.update(list(balancer._turn), affinity_s)
            case "wait", float(seconds), _:
                now += seconds
            case _, str(client), int(retries):
                tried: list[Endpoint] = []
                for _ in range(retries + 1):
                    try:
                        endpoint = balancer.pick(client, now=now, tried=tried)
                    except NoEndpoints:
                        assert not model.order
                        break
                    assert endpoint == model.pick(client, now, tried)
                    tried.append(endpoint)
            case _:
                raise AssertionError(kind)
