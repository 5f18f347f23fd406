from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.errors import ApiRefused, StreamBroken
from userspace_proxy.core.objects import ObjectKey
from userspace_proxy.sources.resources import services
from userspace_proxy.sources.wire import Bookmark, Deleted, Upserted, lines, read_event, read_page

SERVICES = services()


class FakeResponse:
    """A response whose body comes in these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    @property
    def content(self) -> FakeResponse:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def read_lines(pieces: list[bytes]) -> list[bytes]:
    response = cast(aiohttp.ClientResponse, FakeResponse(pieces))
    return [line async for line in lines(response, cast(Any, SERVICES))]


@given(st.lists(st.binary(max_size=20).map(lambda each: each.replace(b"\n", b"")), max_size=8), st.data())
async def test_lines_are_the_same_however_they_are_cut(expected: list[bytes], data: st.DataObject) -> None:
    body = b"".join(line + b"\n" for line in expected) + b"a part of a line"
    pieces = []
    while body:
        size = data.draw(st.integers(1, len(body)))
        pieces.append(body[:size])
        body = body[size:]
    assert await read_lines(pieces) == expected


async def test_a_line_without_end_is_given_up() -> None:
    with pytest.raises(StreamBroken, match="a line of more than 32 MiB"):
        await read_lines([b"x" * (1 << 20)] * 33)


def test_events_are_read() -> None:
    web = b'{"metadata":{"name":"web","namespace":"shop","resourceVersion":"7"}}'
    upserted = read_event(SERVICES, b'{"type":"MODIFIED","object":' + web + b"}")
    assert isinstance(upserted, Upserted)
    assert (upserted.resource_version, upserted.object.key) == ("7", ObjectKey("shop", "web"))
    assert read_event(SERVICES, b'{"object":' + web + b',"type":"DELETED"}') == Deleted("7", ObjectKey("shop", "web"))
    assert read_event(SERVICES, b'{"type":"BOOKMARK","object":' + web + b"}") == Bookmark("7")


def test_an_error_event_is_an_error() -> None:
    event = b'{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}'
    with pytest.raises(ApiRefused, match="cannot watch services: 410 too old"):
        read_event(SERVICES, event)


@pytest.mark.parametrize("reason", ["Expired", "Gone"])
def test_an_error_event_without_code_is_known_by_its_reason(reason: str) -> None:
    with pytest.raises(ApiRefused) as caught:
        read_event(SERVICES, b'{"type":"ERROR","object":{"kind":"Status","reason":"' + reason.encode() + b'"}}')
    assert caught.value.status == 410


def test_objects_of_another_kind_are_not_taken_for_ours() -> None:
    metadata = b'"metadata":{"name":"web","resourceVersion":"7"}'
    with pytest.raises(StreamBroken, match="a Pod came, not a Service"):
        read_event(SERVICES, b'{"type":"MODIFIED","object":{"kind":"Pod",' + metadata + b"}}")
    with pytest.raises(StreamBroken, match="a PodList came, not a ServiceList"):
        read_page(SERVICES, b'{"kind":"PodList",' + metadata + b',"items":[]}')


@pytest.mark.parametrize("version", [b"null", b'""'])
def test_a_list_without_a_version_is_refused(version: bytes) -> None:
    with pytest.raises(StreamBroken, match="no resource version"):
        read_page(SERVICES, b'{"metadata":{"resourceVersion":' + version + b'},"items":[]}')


def test_a_list_of_null_is_empty() -> None:
    page = read_page(SERVICES, b'{"metadata":{"resourceVersion":"7"},"items":null}')
    assert list(page.items()) == []
    assert page.continue_token == ""


@given(st.binary(max_size=50))
def test_no_bytes_raise_anything_unexpected(data: bytes) -> None:
    for read in (read_page, read_event):
        with pytest.raises(StreamBroken):
            read(SERVICES, data)
