"""Sends an exposition of any size a little at a time, so that the data path never waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web

from userspace_proxy.metrics import CONTENT_TYPE

_WORK_S = 0.0005
_MOST_AT_ONCE = 2
_LIMIT_S = 30.0


class Scrape:
    """Answers requests with what `scrape` returns.

    It works for half a millisecond at a time, for two requests at once and for 30 s at most: a client that reads too
    slowly is cut off, and a third one is told to come again.
    """

    def __init__(self, scrape: Callable[[], Awaitable[Iterator[str]]], *, limit_s: float = _LIMIT_S) -> None:
        self._scrape = scrape
        self._limit_s = limit_s
        self._under_way = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self._under_way >= _MOST_AT_ONCE:
            return web.Response(status=503, text="others are being served\n", headers={"Retry-After": "1"})
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        self._under_way += 1
        try:
            async with asyncio.timeout(self._limit_s):
                await response.prepare(request)
                if request.method != "HEAD":
                    await self._send(response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._under_way -= 1
        return response

    async def _send(self, response: web.StreamResponse) -> None:
        ready: list[str] = []
        rested_at = time.perf_counter()
        for piece in await self._scrape():
            ready.append(piece)
            if time.perf_counter() - rested_at >= _WORK_S:
                await response.write("".join(ready).encode())
                ready.clear()
                await asyncio.sleep(0)
                rested_at = time.perf_counter()
        await response.write("".join(ready).encode())
