"""Fixtures of all layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support import namespaces
from tests.support.namespaces import Namespace

_why_not = cache(namespaces.why_not)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """A network namespace, which the test is in."""
    require_namespaces()
    made = Namespace.made()
    try:
        with made.entered():
            yield made
    finally:
        made.delete()


def require_namespaces() -> None:
    """Skip the test where no namespace can be made; in CI that is a failure."""
    if reason := _why_not():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
