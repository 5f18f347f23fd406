"""Who waits at a service port that is idled, and the wake-up that they have begun. Decides; holds nothing itself.

A wake-up lasts until the service port has endpoints, at most the hold time-out. The next client begins another one.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Guest(Protocol):
    """Somebody who waits, and has done so since `since_s`, in monotonic seconds."""

    @property
    def since_s(self) -> float: ...


GuestT = TypeVar("GuestT", bound=Guest)


class WaitingQueue(Generic[GuestT]):
    """The guests of one service port. Times are monotonic seconds; limits may differ from call to call."""

    def __init__(self) -> None:
        self._guests: dict[GuestT, None] = {}
        self._began_at: float | None = None
        self.is_awake = False

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def guests(self) -> list[GuestT]:
        """The guests in order of arrival, in a list of the caller's own."""
        return sorted(self._guests, key=lambda guest: guest.since_s)

    def admit(self, guest: GuestT, *, max_held: int) -> list[GuestT]:
        """Add a guest and return those that have to go for it: the oldest ones, which it may be itself."""
        self._guests[guest] = None
        displaced = self.guests[: max(0, len(self._guests) - max_held)]
        for each in displaced:
            del self._guests[each]
        return displaced

    def leave(self, guest: GuestT) -> None:
        """Forget a guest. One that is not there is ignored."""
        self._guests.pop(guest, None)

    def release(self) -> list[GuestT]:
        """Remove and return all guests, in order of arrival."""
        guests = self.guests
        self._guests.clear()
        return guests

    def expire(self, *, now: float, hold_timeout_s: float) -> list[GuestT]:
        """Remove and return those that have waited for `hold_timeout_s`, in order of arrival."""
        expired = [guest for guest in self.guests if guest.since_s + hold_timeout_s <= now]
        for guest in expired:
            del self._guests[guest]
        return expired

    def begin(self, *, now: float, hold_timeout_s: float) -> bool:
        """Begin a wake-up, unless one is under way. Return whether that was so."""
        if not self.is_awake and self.is_recent(now=now, hold_timeout_s=hold_timeout_s):
            return False
        self._began_at, self.is_awake = now, False
        return True

    def wake(self, *, now: float, hold_timeout_s: float) -> float | None:
        """End the wake-up, as there are endpoints. Return how many seconds it took; None if none was under way."""
        if self.is_awake or self._began_at is None or not self.is_recent(now=now, hold_timeout_s=hold_timeout_s):
            return None
        self.is_awake = True
        return now - self._began_at

    def is_recent(self, *, now: float, hold_timeout_s: float) -> bool:
        """Tell whether the last wake-up began less than `hold_timeout_s` ago, however it has ended."""
        return self._began_at is not None and now < self._began_at + hold_timeout_s

    def may_retry(self, guest: GuestT, *, now: float, hold_timeout_s: float) -> bool:
        """Tell whether a guest whose endpoints cannot be reached is to try again: just after a wake-up, in its time."""
        is_just_awake = self.is_awake and self.is_recent(now=now, hold_timeout_s=hold_timeout_s)
        return is_just_awake and now < guest.since_s + hold_timeout_s
