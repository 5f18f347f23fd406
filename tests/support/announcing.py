"""A kernel in memory that tells when it is written to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from userspace_proxy.redirect.backend import FakeBackend
from userspace_proxy.redirect.tables import TableChange


class Announcing(FakeBackend):
    """Sets `written` with each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def write(self, changes: Sequence[TableChange]) -> None:
        await super().write(changes)
        self.written.set()
