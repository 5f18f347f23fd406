"""Who may accept a connection, when there is no room for all."""

from __future__ import annotations

import asyncio
from collections import Counter

from userspace_proxy.core.model import ServicePortName
from userspace_proxy.dataplane.admission import Admission

ONE, OTHER = ServicePortName("shop", "one"), ServicePortName("shop", "other")


class Queue:
    """Clients of a service port that wait to be accepted."""

    def __init__(self, admission: Admission, name: ServicePortName, length: int) -> None:
        self.admission = admission
        self.name = name
        self.length = length
        self.accepted = 0

    def take_turn(self) -> bool:
        assert self.length
        self.length -= 1
        self.accepted += 1
        self.admission.admit(self.name)
        return self.length > 0

    def wait(self) -> None:
        assert not self.admission.room(self.name)
        self.admission.wait(self.name, self.take_turn)


def admission(total: int = 0, each: int = 0) -> Admission:
    return Admission(asyncio.get_running_loop(), total, each)


async def test_without_limits_there_is_always_room_and_all_is_counted() -> None:
    unlimited = admission()
    for _ in range(100):
        assert unlimited.room(ONE) > 1_000_000
        unlimited.admit(ONE)
    assert unlimited.open_connections == 100
    unlimited.reconfigure(200, 100)
    assert (unlimited.room(ONE), unlimited.room(OTHER)) == (0, 100)


async def test_the_smaller_limit_counts() -> None:
    limited = admission(total=5, each=3)
    assert limited.room(ONE) == 3
    for _ in range(3):
        limited.admit(ONE)
    assert (limited.room(ONE), limited.room(OTHER)) == (0, 2)


async def test_room_goes_round_and_nobody_jumps_the_queue() -> None:
    limited = admission(total=4)
    for _ in range(4):
        limited.admit(ONE)
    queues = [Queue(limited, ONE, 10), Queue(limited, OTHER, 1), Queue(limited, OTHER, 10)]
    for queue in queues:
        queue.wait()
    for _ in range(4):
        limited.released(ONE)
    assert limited.room(OTHER) == 0  # there are four places, but others came first
    await asyncio.sleep(0)
    assert [queue.accepted for queue in queues] == [2, 1, 1]
    assert limited.open_connections == 4
    assert limited.waiting == 2


async def test_who_waits_for_a_service_port_is_not_in_the_way_of_others() -> None:
    limited = admission(total=4, each=2)
    limited.admit(ONE)
    limited.admit(ONE)
    queue = Queue(limited, ONE, 5)
    queue.wait()
    assert limited.room(OTHER) == 2
    limited.released(ONE)
    await asyncio.sleep(0)
    assert (queue.accepted, limited.waiting, limited.room(OTHER)) == (1, 1, 2)
    assert (limited.times_full, limited.times_service_port_full) == (0, 1)


async def test_a_raised_limit_is_used_by_all_who_wait_and_in_bounded_steps() -> None:
    limited = admission(total=1)
    limited.admit(ONE)
    queues = [Queue(limited, name, 100) for name in (ONE, OTHER)]
    for queue in queues:
        queue.wait()
    limited.reconfigure(0, 0)
    turns = 0
    while limited.waiting:
        await asyncio.sleep(0)
        turns += 1
        assert abs(queues[0].accepted - queues[1].accepted) <= 1
    assert turns > 1
    assert Counter({queue.name: queue.accepted for queue in queues}) == {ONE: 100, OTHER: 100}


async def test_who_has_left_gets_no_turn() -> None:
    limited = admission(total=1, each=1)
    limited.admit(ONE)
    queues = [Queue(limited, ONE, 1), Queue(limited, OTHER, 1)]
    for queue in queues:
        queue.wait()
        limited.leave(queue.name, queue.take_turn)
        limited.leave(queue.name, queue.take_turn)
    limited.released(ONE)
    await asyncio.sleep(0)
    assert [queue.accepted for queue in queues] == [0, 0]
    assert limited.room(ONE) == 1
