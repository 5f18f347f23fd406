from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.apiserver import ApiServer


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server
