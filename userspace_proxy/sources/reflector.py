"""List, watch, heal: keeps a store equal to one collection of the API server, for as long as it runs.

A list is read in pages, then changes are watched from its version on. Whatever goes wrong, the store keeps what it has,
and the watch resumes where it stopped; only where the server no longer knows that version is everything listed again,
and then what is not in the list is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol

from userspace_proxy.core.errors import ApiRefused, ProxyError, StreamBroken
from userspace_proxy.core.objects import KubernetesObject, Node, ObjectKey
from userspace_proxy.garbage import keep_out_of_collections
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.pace import Backoff, Clock, Pace, Sleep
from userspace_proxy.sources.resources import ObjectT, Resource
from userspace_proxy.sources.wire import (
    Bookmark,
    Deleted,
    Event,
    Page,
    Unusable,
    Upserted,
    lines,
    read_event,
    read_page,
)

_SHORT_WATCH_S = 1.0
_PAGE_BYTES = 1 << 20
_FIRST_PAGE, _SMALLEST_PAGE, _LARGEST_PAGE = 250, 20, 500

_log = logging.getLogger(__name__)


class Store(Protocol):
    """Where objects go."""

    def upsert(self, each: KubernetesObject | Node) -> None: ...

    def delete(self, kind: type[KubernetesObject | Node], namespace: str, name: str) -> None: ...


class Observer(Protocol):
    """Is told how it goes. `resource` is in words for people."""

    def listed(self, resource: str, count: int) -> None:
        """A list is complete, and the store is equal to it."""

    def heard(self, resource: str) -> None:
        """The watch works: something came over it."""

    def failed(self, resource: str, failure: Exception) -> None:
        """Something went wrong and will be tried again."""

    def skipped(self, resource: str, unusable: Unusable) -> None:
        """An object could not be understood."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How lists and watches behave; times in seconds.

    The server is asked to end a watch after a random time within `watch_timeout_s`; when nothing came for that time and
    `silence_grace_s` more, the connection counts as dead. `answer_timeout_s` is the same for everything else.
    """

    watch_timeout_s: tuple[float, float] = (300.0, 540.0)
    silence_grace_s: float = 30.0
    answer_timeout_s: float = 30.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 30.0
    unreachable_max_s: float = 3.0

    def backoff(self, rng: random.Random) -> Backoff:
        return Backoff(self.backoff_min_s, self.backoff_max_s, self.unreachable_max_s, rng)


class Reflector(Generic[ObjectT]):
    """Keeps `store` equal to `resource`. Several reflectors may share a store when their objects differ."""

    def __init__(
        self,
        connection: ApiConnection,
        resource: Resource[ObjectT],
        store: Store,
        observer: Observer,
        settings: WatchSettings,
        *,
        pace: Pace,
        rng: random.Random,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self._connection = connection
        self._resource: Resource[ObjectT] = resource
        self._store = store
        self._observer = observer
        self._settings = settings
        self._backoff = settings.backoff(rng)
        self._pace = pace
        self._rng = rng
        self._sleep = sleep
        self._clock = clock
        self._name = str(resource)
        self._known: set[ObjectKey] = set()
        self._version = ""
        self._page_size = _FIRST_PAGE
        self._has_listed = asyncio.Event()

    @property
    def is_listed(self) -> bool:
        """Whether the first list is complete."""
        return self._has_listed.is_set()

    async def until_listed(self) -> None:
        """Return when the first list is complete."""
        await self._has_listed.wait()

    async def run(self) -> NoReturn:
        """Follow the collection until cancelled.

        Raises ApiRefused where it is optional and the server lacks it, or dispensable and the server refuses it.
        """
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except Exception as failure:
                if self._is_not_served(failure):
                    raise
                await self._recover(failure)

    def _is_not_served(self, failure: Exception) -> bool:
        if self.is_listed or not isinstance(failure, ApiRefused):
            return False
        return self._resource.is_dispensable or (self._resource.is_optional and failure.status == 404)

    async def _recover(self, failure: Exception) -> None:
        """Tell of a failure and wait. Where the version cannot be resumed from, or the store failed, list anew."""
        if not isinstance(failure, ProxyError) or (isinstance(failure, ApiRefused) and _is_version_refused(failure)):
            self._version = ""
        self._observer.failed(self._name, failure)
        await self._sleep(self._backoff.delay_s(failure))

    async def _list(self) -> None:
        listed: set[ObjectKey] = set()
        version = ""
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                version = page.resource_version
                await self._take_in(page, listed)
        for key in self._known - listed:
            self._delete(key)
            await self._pace.breathe()
        self._version = version
        self._has_listed.set()
        self._observer.listed(self._name, len(listed))

    async def _take_in(self, page: Page[ObjectT], listed: set[ObjectKey]) -> None:
        self._pace.start()
        for item in page.items():
            if isinstance(item, Unusable):
                listed.add(item.key)
                self._observer.skipped(self._name, item)
            else:
                listed.add(item.key)
                self._upsert(item)
            await self._pace.breathe()
        keep_out_of_collections()

    async def _pages(self) -> AsyncGenerator[Page[ObjectT], None]:
        """Yield a list in pages of about a mebibyte. No version is asked for, so the list is the latest there is."""
        continue_token = ""
        while True:
            query = {**self._resource.selectors, "limit": str(self._page_size)}
            if continue_token:
                query["continue"] = continue_token
            silence_s = self._settings.answer_timeout_s
            async with self._connection.request(
                "list", self._name, self._resource.path, query, silence_s=silence_s, accept=self._resource.accept
            ) as response:
                body = await response.read()
            page = read_page(self._resource, body)
            fitting = self._page_size * _PAGE_BYTES // max(len(body), 1)
            self._page_size = max(_SMALLEST_PAGE, min(_LARGEST_PAGE, fitting))
            yield page
            continue_token = page.continue_token
            if not continue_token:
                return

    async def _watch(self) -> None:
        """Follow changes until the server ends the watch. One that ends at once without a word is a failure.

        After any other short one there is a pause: a server that ends watches after each event is not to be hurried.
        """
        started_at = self._clock()
        is_silent = True
        async with aclosing(self._events()) as events:
            async for event in events:
                self._apply(event)
                is_silent = False
                self._backoff.reset()
                self._observer.heard(self._name)
                await self._pace.breathe()
        if self._clock() - started_at < _SHORT_WATCH_S:
            if is_silent:
                raise StreamBroken("watch", self._name, "the watch ended at once")
            await self._sleep(self._settings.backoff_min_s)

    async def _events(self) -> AsyncGenerator[Event[ObjectT], None]:
        timeout_s = self._rng.uniform(*self._settings.watch_timeout_s)
        query = {
            **self._resource.selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        silence_s = timeout_s + self._settings.silence_grace_s
        async with self._connection.request(
            "watch", self._name, self._resource.path, query, silence_s=silence_s, accept=self._resource.accept
        ) as response:
            self._observer.heard(self._name)
            async with aclosing(lines(response, self._resource)) as received:
                async for line in received:
                    yield read_event(self._resource, line)

    def _apply(self, event: Event[ObjectT]) -> None:
        if isinstance(event, Upserted):
            self._upsert(event.object)
        elif isinstance(event, Deleted):
            self._delete(event.key)
        elif isinstance(event, Bookmark) and event.unusable is not None:
            self._observer.skipped(self._name, event.unusable)
        if event.resource_version:
            self._version = event.resource_version

    def _upsert(self, item: ObjectT) -> None:
        self._known.add(item.key)
        self._store.upsert(item)

    def _delete(self, key: ObjectKey) -> None:
        self._store.delete(self._resource.kind, *key)
        self._known.discard(key)


def _is_version_refused(failure: ApiRefused) -> bool:
    """Whether the server cannot resume from our version: too old, or newer than its own after a restored backup."""
    return failure.status in (400, 410) or "too large resource version" in failure.reason.lower()
