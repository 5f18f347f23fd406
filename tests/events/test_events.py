"""Events, against the API server of the tests and against faults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.apiserver import ApiServer
from userspace_proxy.core.errors import ApiRefused, ApiUnreachable
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.events import (
    READ_ONLY_SYS,
    STARTING,
    ApiEvents,
    EventRecorder,
    EventSink,
    ObjectReference,
    Occurrence,
    node_reference,
    server_failed,
    service_health_failed,
)
from userspace_proxy.sources.kubeconfig import Access

NODE = node_reference("node-1")
PATIENCE_S = 10.0


class FakeSink:
    """Takes events, after the failures that a test orders."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.events: list[Mapping[str, object]] = []
        self.tries = 0

    async def create(self, namespace: str, event: Mapping[str, object]) -> None:
        self.tries += 1
        if self.failures:
            raise self.failures.pop(0)
        self.events.append(event)


class HangingSink:
    """Never answers."""

    async def create(self, namespace: str, event: Mapping[str, object]) -> None:
        await asyncio.get_running_loop().create_future()


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


@asynccontextmanager
async def recorder(sink: EventSink, **options: Any) -> AsyncIterator[EventRecorder]:
    """Return a recorder that sends to the sink while the context is open, and waits for nothing between tries."""
    events = EventRecorder(sink, "host-1", sleep=no_wait, **options)
    sending = asyncio.create_task(events.run())
    try:
        yield events
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def test_the_cluster_is_told_that_the_proxy_starts() -> None:
    async with ApiServer() as api, ApiConnection(Access(api.url)) as connection:
        async with recorder(ApiEvents(connection), wall_clock=lambda: 1_700_000_000.5) as events:
            events.record(NODE, STARTING)
            assert await events.flush(PATIENCE_S)
        (event,) = api.posted
        (request,) = api.requests
    assert (request.verb, request.resource, request.group, request.namespace) == (
        "create",
        "events",
        "events.k8s.io",
        "default",
    )
    name = event["metadata"].pop("name")
    assert name.startswith("node-1.")
    del event["metadata"]["namespace"]
    assert event == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {},
        "eventTime": "2023-11-14T22:13:20.500000Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-host-1",
        "action": "StartKubeProxy",
        "reason": "Starting",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1"},
        "note": "",
        "type": "Normal",
    }


@pytest.mark.parametrize(
    ("occurrence", "reason", "action", "note"),
    [
        (READ_ONLY_SYS, "readOnlySysFS", "StartKubeProxy", "docker issue #24000"),
        (
            server_failed("FailedToStartMetricServer", "address already in use"),
            "FailedToStartMetricServer",
            "StartKubeProxy",
            "address already in use",
        ),
        (
            service_health_failed("node-1", "shop/web", 30_001, "address already in use"),
            "FailedToStartServiceHealthcheck",
            "Listen",
            'node node-1 failed to start healthcheck "shop/web" on port 30001: address already in use',
        ),
    ],
)
async def test_warnings_are_those_of_kube_proxy(occurrence: Occurrence, reason: str, action: str, note: str) -> None:
    sink = FakeSink()
    async with recorder(sink) as events:
        events.record(NODE, occurrence)
        await events.flush(PATIENCE_S)
    (event,) = sink.events
    assert (event["type"], event["reason"], event["action"]) == ("Warning", reason, action)
    assert note in str(event["note"])


async def test_an_event_about_an_object_in_a_namespace_goes_there() -> None:
    async with ApiServer() as api, ApiConnection(Access(api.url)) as connection:
        async with recorder(ApiEvents(connection)) as events:
            events.record(ObjectReference("Service", "web", "shop", uid="1-2"), Occurrence("NeedPods", "NeedPods"))
            assert await events.flush(PATIENCE_S)
        assert api.requests[0].namespace == "shop"


async def test_events_of_the_same_moment_have_names_of_their_own() -> None:
    sink = FakeSink()
    async with recorder(sink, wall_clock=lambda: 1.0) as events:
        events.record(NODE, STARTING)
        events.record(NODE, STARTING)
        await events.flush(PATIENCE_S)
    names = [event["metadata"]["name"] for event in sink.events]  # type: ignore[index]
    assert len(set(names)) == 2


async def test_a_server_that_is_away_is_tried_again() -> None:
    sink = FakeSink(ApiUnreachable("s", "refused"), ApiRefused("create", "events", 503, "busy"))
    async with recorder(sink) as events:
        events.record(NODE, STARTING)
        assert await events.flush(PATIENCE_S)
    assert (len(sink.events), events.dropped) == (1, 0)


async def test_a_server_that_stays_away_costs_one_event_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    sink = FakeSink(*(ApiUnreachable("s", "refused") for _ in range(6)))
    async with recorder(sink) as events:
        events.record(NODE, STARTING)
        events.record(NODE, READ_ONLY_SYS)
        assert await events.flush(PATIENCE_S)
    assert [event["reason"] for event in sink.events] == ["readOnlySysFS"]
    assert events.dropped == 1
    (record,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert "Starting is not recorded" in record.getMessage()


async def test_an_event_that_is_not_permitted_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    sink = FakeSink(ApiRefused("create", "events.events.k8s.io", 403, "forbidden"))
    async with recorder(sink) as events:
        events.record(NODE, STARTING)
        assert await events.flush(PATIENCE_S)
    assert (sink.tries, events.dropped) == (1, 1)
    assert "cannot create events.events.k8s.io: 403 forbidden" in caplog.text


async def test_an_event_that_arrived_although_its_answer_did_not_is_no_failure() -> None:
    sink = FakeSink(ApiUnreachable("s", "reset"), ApiRefused("create", "events", 409, "exists"))
    async with recorder(sink) as events:
        events.record(NODE, STARTING)
        assert await events.flush(PATIENCE_S)
    assert events.dropped == 0


async def test_a_fault_of_ours_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = FakeSink(ValueError("what"))
    async with recorder(sink) as events:
        events.record(NODE, STARTING)
        events.record(NODE, STARTING)
        assert await events.flush(PATIENCE_S)
    assert (len(sink.events), events.dropped) == (1, 1)
    assert "a fault of ours" in caplog.text


async def test_events_that_come_too_fast_are_dropped_and_block_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with recorder(HangingSink(), capacity=3) as events:
        for _ in range(10):
            events.record(NODE, STARTING)
        assert events.dropped == 7
        assert not await events.flush(0.01)
    assert len(caplog.records) == 1


async def test_a_long_note_is_cut_as_the_api_would_refuse_it() -> None:
    sink = FakeSink()
    async with recorder(sink) as events:
        events.record(NODE, server_failed("X", "a" * 5000))
        await events.flush(PATIENCE_S)
    assert len(str(sink.events[0]["note"])) == 1024


async def test_with_nothing_to_send_there_is_nothing_to_wait_for() -> None:
    assert await EventRecorder(FakeSink(), "host-1").flush(0.0)
