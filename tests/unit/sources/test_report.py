from __future__ import annotations

import logging

import pytest

from userspace_proxy.core.errors import ApiRefused, ApiUnreachable, CredentialsFailed, StreamBroken
from userspace_proxy.sources.report import Report

AWAY = ApiUnreachable("https://api", "connection refused")


class Clocked:
    """A report, a clock to turn, and what was logged since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.now = 1000.0
        self.report = Report("https://api", "context 'x' of config", clock=lambda: self.now, on_listed=lambda: None)

    def told(self) -> list[str]:
        messages = [*self._caplog.messages]
        self._caplog.clear()
        return messages

    def fail(self, failure: Exception, *, resource: str = "services", times: int = 1, each_s: float = 0) -> list[str]:
        for _ in range(times):
            self.report.failed(resource, failure)
            self.now += each_s
        return self.told()


@pytest.fixture
def clocked(caplog: pytest.LogCaptureFixture) -> Clocked:
    return Clocked(caplog)


def test_a_server_that_is_away_is_told_each_half_minute_for_all_watches_together(clocked: Clocked) -> None:
    told = clocked.fail(AWAY, times=30, each_s=2)
    told += clocked.fail(AWAY, resource="nodes", times=3)
    assert told == [
        "the API server https://api cannot be reached: connection refused; nothing is changed before it answers; "
        "trying again"
    ] * 3  # fmt: skip
    clocked.report.heard("nodes")
    assert clocked.told() == ["the API server https://api answers again after 60 s"]


def test_a_connection_that_comes_and_goes_is_not_told_each_time(clocked: Clocked) -> None:
    clocked.report.listed("services", 3)
    clocked.told()
    told: list[str] = []
    for _ in range(30):
        told += clocked.fail(AWAY)
        clocked.report.heard("services")
        told += clocked.told()
        clocked.now += 2
    assert sum("the last state stays in force" in each for each in told) == 2
    assert sum("answers again" in each for each in told) == 2
    assert len(told) == 4


def test_what_a_person_must_do_is_told_once_and_so_is_that_it_was_done(
    clocked: Clocked, caplog: pytest.LogCaptureFixture
) -> None:
    clocked.report.failed("services", ApiRefused("list", "services", 403, 'User "x" cannot list'))
    assert caplog.records[-1].levelno == logging.ERROR
    clocked.fail(ApiRefused("list", "services", 403, 'User "x" cannot list'), times=99, each_s=3)
    assert clocked.told() == []
    clocked.report.listed("services", 3)
    assert clocked.told() == ["services: listed 3", "services: followed again after 297 s"]


def test_another_reason_is_told_at_once(clocked: Clocked) -> None:
    assert len(clocked.fail(ApiRefused("list", "services", 403, "no"))) == 1
    assert len(clocked.fail(CredentialsFailed("the plugin failed"))) == 1
    assert len(clocked.fail(StreamBroken("watch", "services", "no event"), times=5)) == 1


def test_health_counts_and_knows_when_something_was_heard(clocked: Clocked) -> None:
    clocked.report.listed("services", 3)
    clocked.now += 5
    clocked.report.heard("services")
    clocked.fail(AWAY)
    clocked.fail(RuntimeError("a handler"))
    (health,) = clocked.report.watches()
    assert (health.lists, health.failures, health.handler_errors, health.heard_at) == (1, 1, 1, 1005.0)
