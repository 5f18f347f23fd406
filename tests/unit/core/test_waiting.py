from __future__ import annotations

from dataclasses import dataclass

from userspace_proxy.core.waiting import WaitingQueue

TIMEOUT_S = 120.0


@dataclass(eq=False)
class Guest:
    name: str
    since_s: float


def queue_of(*names: str) -> tuple[WaitingQueue[Guest], dict[str, Guest]]:
    """A queue, and guests in it that came at the seconds 0, 1, 2, ..."""
    queue: WaitingQueue[Guest] = WaitingQueue()
    guests = {name: Guest(name, float(second)) for second, name in enumerate(names)}
    for guest in guests.values():
        assert queue.admit(guest, max_held=16) == []
    return queue, guests


def names(guests: list[Guest]) -> str:
    return "".join(guest.name for guest in guests)


def begin(queue: WaitingQueue[Guest], now: float) -> bool:
    return queue.begin(now=now, hold_timeout_s=TIMEOUT_S)


def wake(queue: WaitingQueue[Guest], now: float) -> float | None:
    return queue.wake(now=now, hold_timeout_s=TIMEOUT_S)


def test_the_oldest_go_for_those_who_come() -> None:
    queue, _ = queue_of(*"abc")
    assert names(queue.admit(Guest("d", 3.0), max_held=3)) == "a"
    assert names(queue.admit(Guest("e", 4.0), max_held=2)) == "bc"
    assert names(queue.guests) == "de"


def test_one_that_comes_back_has_its_old_place_also_as_the_oldest_that_has_to_go() -> None:
    queue, guests = queue_of(*"abc")
    queue.leave(guests["a"])
    queue.leave(guests["a"])
    assert names(queue.guests) == "bc"
    assert queue.admit(guests["a"], max_held=3) == []
    assert names(queue.guests) == "abc"
    queue.leave(guests["a"])
    assert names(queue.admit(guests["a"], max_held=2)) == "a"


def test_admitting_somebody_again_takes_no_second_place() -> None:
    queue, guests = queue_of(*"ab")
    assert queue.admit(guests["a"], max_held=2) == []
    assert len(queue) == 2


def test_all_are_released_in_order_of_arrival() -> None:
    queue, _ = queue_of(*"abc")
    assert names(queue.release()) == "abc"
    assert not queue


def test_each_waits_for_the_hold_time_out_and_no_longer() -> None:
    queue, _ = queue_of(*"abc")
    assert queue.expire(now=119.9, hold_timeout_s=TIMEOUT_S) == []
    assert names(queue.expire(now=121.0, hold_timeout_s=TIMEOUT_S)) == "ab"
    assert names(queue.guests) == "c"


def test_a_wake_up_begins_once_until_its_time_is_over() -> None:
    queue, _ = queue_of()
    assert begin(queue, 0.0)
    assert not begin(queue, 119.9)
    assert begin(queue, 120.0)
    assert not begin(queue, 239.9)


def test_a_wake_up_ends_with_the_first_endpoints_and_the_next_client_begins_another() -> None:
    queue, _ = queue_of()
    assert wake(queue, 0.0) is None
    assert begin(queue, 1.0)
    assert wake(queue, 3.5) == 2.5
    assert wake(queue, 4.0) is None
    assert begin(queue, 5.0)
    assert wake(queue, 6.0) == 1.0


def test_endpoints_that_come_too_late_end_no_wake_up() -> None:
    queue, _ = queue_of()
    assert begin(queue, 0.0)
    assert wake(queue, 120.0) is None


def test_endpoints_may_be_tried_again_while_the_wake_up_and_the_guest_have_time() -> None:
    queue, guests = queue_of("a")
    late = Guest("late", 100.0)

    def may_retry(guest: Guest, now: float) -> bool:
        return queue.may_retry(guest, now=now, hold_timeout_s=TIMEOUT_S)

    assert not may_retry(guests["a"], 0.0)
    begin(queue, 10.0)
    assert not may_retry(guests["a"], 11.0)
    wake(queue, 12.0)
    assert may_retry(guests["a"], 119.9)
    assert not may_retry(guests["a"], 120.0)
    assert may_retry(late, 129.9)
    assert not may_retry(late, 130.0)
