"""Namespaces for all layers. In CI a skipped test is a failure: no layer may be missing there."""

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
    """Skip the test where no namespace can be made."""
    if reason := _why_not():
        pytest.skip(reason)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped") and exitstatus == 0:
        reporter.write_line("tests were skipped, which CI does not permit", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
