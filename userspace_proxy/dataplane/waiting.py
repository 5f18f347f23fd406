"""The waiting room: clients of idled service ports are held here until there are endpoints, and then go on.

What a TCP client sends stays in the kernel meanwhile, and a FIN behind it too. One that resets the connection, or ends
it without a byte, has left. An endpoint may appear before it listens, or before those of a client's address family:
just after a wake-up, clients that cannot reach any endpoint come back, and try again in a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import chain
from typing import Protocol

from userspace_proxy.core.counters import WakeTimes, WakingCounters
from userspace_proxy.core.model import L4Protocol, ServicePort, ServicePortName
from userspace_proxy.core.waiting import WaitingQueue
from userspace_proxy.dataplane.poller import ERROR, HANGUP, Poller
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.sockets import has_left

_MAX_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.02
_RETRY_S = 0.25
_DESCRIPTORS_PER_CONNECTION = 2

_log = logging.getLogger(__name__)


class Guest(Protocol):
    """A client that waits at a service port, since `since_s` in seconds of the loop's time."""

    @property
    def name(self) -> ServicePortName: ...

    @property
    def since_s(self) -> float: ...

    def wait(self) -> None:
        """Wait from now on, until one of the others is called."""

    def go_on(self) -> None:
        """Try the endpoints that there are now."""

    def cancel(self) -> None:
        """Send the client away."""

    def has_left(self) -> bool:
        """Tell whether the client is known not to wait any more."""


class Client(Protocol):
    """Whoever owns the descriptor of an accepted client."""

    def go_on(self) -> None:
        """Look for an endpoint again. The descriptor is not watched."""

    def cancel(self) -> None:
        """Close the descriptor, which is not watched."""


class HeldConnection:
    """The place of an accepted client in the waiting room. Watches its descriptor while it is there."""

    __slots__ = ("_client", "_family", "_fd", "_room", "name", "since_s")

    def __init__(self, room: WaitingRoom, name: ServicePortName, fd: int, family: int, client: Client) -> None:
        self.name = name
        self.since_s = room.loop.time()
        self._room = room
        self._fd = fd
        self._family = family
        self._client = client

    def wait(self) -> None:
        """Watch the descriptor, until `go_on` or `cancel`."""
        self._room.poller.watch(self._fd, self)

    def on_ready(self, events: int) -> None:
        """The client has sent something, which stays where it is, or has left."""
        if events & (ERROR | HANGUP) or self.has_left():
            self._room.leave(self)
        else:
            self._room.poller.pause_reading(self._fd)

    def has_left(self) -> bool:
        """Tell whether the client has reset the connection, or has ended it without a byte."""
        return has_left(self._fd, self._family)

    def go_on(self) -> None:
        """Leave the room for the endpoints."""
        self._room.poller.unwatch(self._fd)
        self._client.go_on()

    def cancel(self) -> None:
        """Leave the room for good."""
        self._room.poller.unwatch(self._fd)
        self._client.cancel()


class WaitingRoom:
    """All clients that wait, by service port.

    `needs_pods` is told of each wake-up when it begins; `complain` is for what people should know about a service port.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        poller: Poller,
        settings: DataPlaneSettings,
        *,
        needs_pods: Callable[[ServicePortName], None],
        complain: Callable[[ServicePortName, str], None],
    ) -> None:
        self.loop = loop
        self.poller = poller
        self.settings = settings
        self._needs_pods = needs_pods
        self._complain = complain
        self._queues: dict[ServicePortName, WaitingQueue[Guest]] = {}
        self._retrying: set[ServicePortName] = set()
        self._look_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._wake_ups = self._expired = self._displaced = 0
        self._wake_times = WakeTimes()

    def counters(self) -> WakingCounters:
        """Return a reading of the counters."""
        held = dict.fromkeys(L4Protocol, 0)
        for name, queue in self._queues.items():
            held[name.protocol] += len(queue)
        return WakingCounters(
            held_connections=held[L4Protocol.TCP],
            held_udp_clients=held[L4Protocol.UDP],
            wake_ups=self._wake_ups,
            expired=self._expired,
            displaced=self._displaced,
            wake_times=self._wake_times,
        )

    def waited_at(self) -> list[ServicePortName]:
        """Return the service ports that are asleep, and at which somebody waits."""
        return [name for name, queue in self._queues.items() if len(queue) and not queue.is_awake]

    def hold(self, guest: Guest) -> bool:
        """Hold a client of an idled service port until there are endpoints; ask for pods if nobody has.

        Return False where none is held, and the guest is to go.
        """
        if self._is_closed or not self.settings.unidling:
            return False
        name = guest.name
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = WaitingQueue()
        begins = queue.begin(now=self.loop.time(), hold_timeout_s=self.settings.hold_timeout_s)
        self._admit(queue, guest)
        if begins:
            self._wake_ups += 1
            _log.debug("%s (%s): a client waits, and pods are asked for", name, name.protocol)
            self._needs_pods(name)
        return True

    def hold_for_retry(self, guest: Guest) -> bool:
        """Hold a client who can reach no endpoint for a moment, if one may be about to listen, or to appear.

        Return False where they had their time, and the guest is to go.
        """
        queue = self._queues.get(guest.name)
        now, hold_timeout_s = self.loop.time(), self.settings.hold_timeout_s
        if self._is_closed or queue is None or not queue.may_retry(guest, now=now, hold_timeout_s=hold_timeout_s):
            return False
        self._admit(queue, guest)
        self._retrying.add(guest.name)
        if self._retry_timer is None:
            self._retry_timer = self.loop.call_later(_RETRY_S, self._retry)
        return True

    def update(self, service_port: ServicePort) -> None:
        """Let those go on who wait at a service port that is not idled any more."""
        queue = self._queues.get(service_port.name)
        if queue is None or service_port.is_idled:
            return
        name, count = service_port.name, len(queue)
        if service_port.endpoints or service_port.external_endpoints:  # the annotation may have gone when they came
            took_s = queue.wake(now=self.loop.time(), hold_timeout_s=self.settings.hold_timeout_s)
            if took_s is not None:
                self._wake_times = self._wake_times.with_another(took_s)
                _log.info("%s (%s): awake after %.1f s; clients that waited: %d", name, name.protocol, took_s, count)
        else:
            del self._queues[name]
        _let_go_on(queue)

    def leave(self, guest: Guest) -> None:
        """Forget a client that does not wait any more."""
        queue = self._queues.get(guest.name)
        if queue is not None:
            queue.leave(guest)
        guest.cancel()

    def forget(self, name: ServicePortName) -> None:
        """Send those away who wait at a service port that is no more."""
        queue = self._queues.pop(name, None)
        if queue is not None:
            for guest in queue.release():
                guest.cancel()

    def free_descriptors(self) -> None:
        """Send those away who have waited longest: as many as hold what one connection needs."""
        held = (queue.guests for name, queue in self._queues.items() if name.protocol is L4Protocol.TCP)
        oldest = sorted(chain.from_iterable(held), key=lambda guest: guest.since_s)
        for guest in oldest[:_DESCRIPTORS_PER_CONNECTION]:
            self._displaced += 1
            self.leave(guest)

    def close(self) -> None:
        """Send everybody away, and hold nobody any more."""
        self._is_closed = True
        for name in list(self._queues):
            self.forget(name)
        for timer in (self._look_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()

    def _admit(self, queue: WaitingQueue[Guest], guest: Guest) -> None:
        guest.wait()
        displaced = queue.admit(guest, max_held=self.settings.max_held)
        for each in displaced:
            each.cancel()
        if displaced:
            self._displaced += len(displaced)
            self._complain(guest.name, f"more than {self.settings.max_held} clients wait; the oldest was sent away")
        if self._look_timer is None:
            self._plan_look()

    def _plan_look(self) -> None:
        interval_s = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, self.settings.hold_timeout_s / 10))
        self._look_timer = self.loop.call_later(interval_s, self._look)

    def _look(self) -> None:
        """Send those away whose time is up, and forget those who have left: not each poller tells of all of them."""
        now, hold_timeout_s = self.loop.time(), self.settings.hold_timeout_s
        for name, queue in list(self._queues.items()):
            expired = queue.expire(now=now, hold_timeout_s=hold_timeout_s)
            for guest in expired:
                guest.cancel()
            if expired:
                self._expired += len(expired)
                self._complain(name, f"sent away after {hold_timeout_s:g} s, as no endpoint came: {len(expired)}")
            for guest in queue.guests:
                if guest.has_left():
                    self.leave(guest)
            if not queue and not queue.is_recent(now=now, hold_timeout_s=hold_timeout_s):
                del self._queues[name]
        self._look_timer = None
        if self._queues:
            self._plan_look()

    def _retry(self) -> None:
        self._retry_timer = None
        names, self._retrying = self._retrying, set()
        for name in names & self._queues.keys():
            _let_go_on(self._queues[name])


def _let_go_on(queue: WaitingQueue[Guest]) -> None:
    for guest in queue.release():
        guest.go_on()
