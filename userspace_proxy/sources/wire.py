"""List pages and watch events, from bytes to objects. Each object is decoded by itself, so that no step takes long.

An object with a field of a type that no API server sends is skipped, and told; bytes that are no list or event at all
raise StreamBroken.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Generic

import aiohttp
import msgspec

from userspace_proxy.core.errors import ApiRefused, StreamBroken
from userspace_proxy.core.objects import ObjectKey
from userspace_proxy.sources.connection import Status
from userspace_proxy.sources.resources import ObjectT, Resource

_LONGEST_LINE = 1 << 25
_GONE, _REASONS_OF_GONE = 410, ("Expired", "Gone")


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str | None = None
    continue_token: str | None = msgspec.field(default=None, name="continue")


class _Kind(msgspec.Struct, frozen=True):
    kind: str | None = None


class _ListPage(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    kind: str | None = None
    items: tuple[msgspec.Raw, ...] | None = None


class _ItemMeta(msgspec.Struct, frozen=True, rename="camel"):
    name: str | None = None
    namespace: str | None = None
    resource_version: str | None = None


class _Item(msgspec.Struct, frozen=True):
    """What is known of any object, however strange the rest of it."""

    metadata: _ItemMeta


class _EventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    ERROR = "ERROR"


class _Event(msgspec.Struct, frozen=True):
    type: _EventType
    object: msgspec.Raw


_pages = msgspec.json.Decoder(_ListPage)
_items = msgspec.json.Decoder(_Item)
_kinds = msgspec.json.Decoder(_Kind)
_events = msgspec.json.Decoder(_Event)


@cache
def _decoder(kind: type[ObjectT]) -> msgspec.json.Decoder[ObjectT]:
    return msgspec.json.Decoder(kind)


@dataclass(frozen=True, slots=True)
class Unusable:
    """An object that could not be decoded."""

    key: ObjectKey
    reason: str


@dataclass(frozen=True, slots=True)
class Page(Generic[ObjectT]):
    """A part of a list. `resource_version` is that of the whole list; "" `continue_token` marks its last part."""

    resource: Resource[ObjectT]
    resource_version: str
    continue_token: str
    raw_items: tuple[msgspec.Raw, ...]

    def items(self) -> Iterator[ObjectT | Unusable]:
        """Yield the objects of the page, decoding each when it is asked for."""
        for raw in self.raw_items:
            item = _decode(raw, self.resource, "list")
            yield item if isinstance(item, Unusable) else item[0]


@dataclass(frozen=True, slots=True)
class Upserted(Generic[ObjectT]):
    """An object is new or different."""

    resource_version: str
    object: ObjectT


@dataclass(frozen=True, slots=True)
class Deleted:
    """An object is gone, or is no longer one that was asked for."""

    resource_version: str
    key: ObjectKey


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Nothing happened up to this version. `unusable` is an object that had to be left out."""

    resource_version: str
    unusable: Unusable | None = None


Event = Upserted[ObjectT] | Deleted | Bookmark


def read_page(resource: Resource[ObjectT], body: bytes) -> Page[ObjectT]:
    """Return a page of a list. Raises StreamBroken, also when the list does not say its version."""
    try:
        page = _pages.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamBroken("list", str(resource), f"no list: {error}") from error
    _check_kind(page.kind, f"{resource.kind_name}List", "list", resource)
    if not page.metadata.resource_version:
        raise StreamBroken("list", str(resource), "the list has no resource version")
    return Page(resource, page.metadata.resource_version, page.metadata.continue_token or "", page.items or ())


def read_event(resource: Resource[ObjectT], line: bytes) -> Event[ObjectT]:
    """Return what a line of a watch says. Raises StreamBroken, and ApiRefused for an event that is an error."""
    try:
        event = _events.decode(line)
        if event.type is _EventType.ERROR:
            raise _error(resource, msgspec.json.decode(event.object, type=Status))
        if event.type is _EventType.BOOKMARK:
            return Bookmark(_items.decode(event.object).metadata.resource_version or "")
        _check_kind(_kinds.decode(event.object).kind, resource.kind_name, "watch", resource)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamBroken("watch", str(resource), f"no event: {error}") from error
    decoded = _decode(event.object, resource, "watch")
    is_deleted = event.type is _EventType.DELETED
    if not isinstance(decoded, Unusable):
        item, version = decoded
        return Deleted(version, item.key) if is_deleted else Upserted(version, item)
    version = _items.decode(event.object).metadata.resource_version or ""
    return Deleted(version, decoded.key) if is_deleted else Bookmark(version, decoded)


def _check_kind(kind: str | None, wanted: str, verb: str, resource: Resource[ObjectT]) -> None:
    """Raise StreamBroken for another kind than the one asked for: taken as ours, it would wipe out what is known."""
    if kind is not None and kind != wanted:
        raise StreamBroken(verb, str(resource), f"a {kind} came, not a {wanted}")


def _decode(raw: msgspec.Raw, resource: Resource[ObjectT], verb: str) -> tuple[ObjectT, str] | Unusable:
    try:
        item = _decoder(resource.kind).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unusable(_key(raw, resource, verb), str(error))
    if not item.metadata.name:
        raise StreamBroken(verb, str(resource), "an object without a name")
    return item, item.metadata.resource_version or ""


def _key(raw: msgspec.Raw, resource: Resource[ObjectT], verb: str) -> ObjectKey:
    try:
        metadata = _items.decode(raw).metadata
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamBroken(verb, str(resource), f"no object: {error}") from error
    if not metadata.name:
        raise StreamBroken(verb, str(resource), "an object without a name")
    return ObjectKey(metadata.namespace or "default", metadata.name)


def _error(resource: Resource[ObjectT], status: Status) -> ApiRefused:
    code = _GONE if status.reason in _REASONS_OF_GONE else status.code or 500
    return ApiRefused("watch", str(resource), code, status.message or status.reason or "no reason given")


async def lines(response: aiohttp.ClientResponse, resource: Resource[ObjectT]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a watch as they come. What is left when the stream ends is no line and is dropped."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        *complete, tail = chunk.split(b"\n")
        for piece in complete:
            yield bytes(rest) + piece
            rest.clear()
        rest += tail
        if len(rest) > _LONGEST_LINE:
            raise StreamBroken("watch", str(resource), f"a line of more than {_LONGEST_LINE >> 20} MiB")
