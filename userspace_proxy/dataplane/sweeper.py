"""Coarse timers for many things at once: deadlines that need not be met to the millisecond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Sweeper(Generic[Item]):
    """Looks at each of its items every `interval_s` seconds, and lets go of those for which `is_done` is true.

    Costs nothing while it has no items. `is_done` gets the loop's time in seconds, and may add or discard items.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, is_done: Callable[[Item, float], bool]
    ) -> None:
        self._loop = loop
        self.interval_s = interval_s
        self._is_done = is_done
        self._items: dict[Item, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        """Look at this item from the next sweep on."""
        self._items[item] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self.interval_s, self._sweep)

    def discard(self, item: Item) -> None:
        """Forget the item, whether it is known or not."""
        self._items.pop(item, None)

    def clear(self) -> list[Item]:
        """Forget all items and return them."""
        items = list(self._items)
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return items

    def _sweep(self) -> None:
        self._timer = None
        now = self._loop.time()
        for item in list(self._items):
            if item in self._items and self._is_done(item, now):
                self._items.pop(item, None)
        if self._items and self._timer is None:
            self._timer = self._loop.call_later(self.interval_s, self._sweep)
