from __future__ import annotations

import random

from userspace_proxy.core.errors import ApiRefused, ApiUnreachable, StreamBroken
from userspace_proxy.sources.pace import Backoff, RateLimit

BROKEN = StreamBroken("watch", "services", "a test")
AWAY = ApiUnreachable("https://api", "a test")


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        self.now += delay_s


async def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    time = FakeTime()
    limit = RateLimit(5, 10, clock=time.clock, sleep=time.sleep)
    started = []
    for _ in range(15):
        await limit.wait()
        started.append(round(time.now - 100, 6))
    assert started == [0.0] * 10 + [0.2, 0.4, 0.6, 0.8, 1.0]


async def test_a_pause_fills_the_burst_again_but_no_more() -> None:
    time = FakeTime()
    limit = RateLimit(5, 2, clock=time.clock, sleep=time.sleep)
    for _ in range(3):
        await limit.wait()
    time.now += 60
    resumed_at = time.now
    for _ in range(2):
        await limit.wait()
    assert time.now == resumed_at
    await limit.wait()
    assert time.now > resumed_at


async def test_no_rate_is_no_limit() -> None:
    time = FakeTime()
    limit = RateLimit(0, 1, clock=time.clock, sleep=time.sleep)
    for _ in range(100):
        await limit.wait()
    assert time.now == 100


def test_delays_grow_from_one_second_to_thirty_and_differ() -> None:
    backoff = Backoff(rng=random.Random(1))
    delays = [backoff.delay_s(BROKEN) for _ in range(10)]
    assert 1 <= delays[0] <= 2
    assert all(15 <= delay <= 30 for delay in delays[4:])
    assert len(set(delays)) == len(delays)


def test_a_server_that_is_away_is_tried_each_three_seconds() -> None:
    backoff = Backoff(rng=random.Random(1))
    assert all(1 <= backoff.delay_s(AWAY) <= 3 for _ in range(100))


def test_another_kind_of_failure_and_a_success_start_anew() -> None:
    backoff = Backoff(rng=random.Random(1))
    for _ in range(8):
        backoff.delay_s(BROKEN)
    assert backoff.delay_s(ApiRefused("watch", "services", 500, "")) <= 2
    for _ in range(8):
        backoff.delay_s(BROKEN)
    backoff.reset()
    assert backoff.delay_s(BROKEN) <= 2


def test_what_the_server_asks_for_is_the_least() -> None:
    backoff = Backoff(rng=random.Random(1))
    assert 20 <= backoff.delay_s(ApiRefused("list", "services", 429, "", retry_after_s=20)) <= 21
