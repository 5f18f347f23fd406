"""Asking for pods, against the API server of the tests: the Event, scaling, and what happens while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.apiserver import ApiServer, workload
from tests.sources.following import eventually
from userspace_proxy.core.idling import IdledService, ScaleTarget
from userspace_proxy.core.model import L4Protocol, ServicePortName
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.pace import Backoff
from userspace_proxy.sources.waking import Waker, WakeSettings

pytestmark = pytest.mark.timeout(30)

WEB = ServicePortName("shop", "web", "http")
TARGET = ScaleTarget("Deployment", "web", 3)
NOON = 1_700_000_000.9


class Waking:
    """A waker that runs, with the service ports that are idled, the time, and how its requests have ended."""

    def __init__(self, connection: ApiConnection, settings: WakeSettings) -> None:
        self.idled = {WEB: IdledService("uid-web", "7", (TARGET,))}
        self.settings = settings
        self.now = 0.0
        self.results: list[tuple[str, str]] = []
        self.waker = Waker(
            connection,
            "node-1",
            lambda name: self.idled.get(name),
            lambda: self.settings,
            on_result=lambda request, result: self.results.append((request, result)),
            new_backoff=lambda: Backoff(0.01, 0.05, 0.05, random.Random(1)),
            sleep=self._pass,
            clock=lambda: self.now,
            wall_clock=lambda: NOON,
        )

    async def _pass(self, seconds: float) -> None:
        """Let time pass as for the waker, and a hundredth of it as for the test."""
        self.now += seconds
        await asyncio.sleep(seconds / 100)

    async def until(self, *results: tuple[str, str]) -> None:
        """Return when requests have ended like this, in whichever order."""
        await eventually(lambda: len(self.results) >= len(results))
        assert sorted(self.results) == sorted(results)


@contextlib.asynccontextmanager
async def waking(api: ApiServer, settings: WakeSettings | None = None) -> AsyncIterator[Waking]:
    async with ApiConnection(Access(api.url), qps=0) as connection:
        waking = Waking(connection, settings or WakeSettings())
        running = asyncio.create_task(waking.waker.run())
        try:
            yield waking
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def replicas(api: ApiServer, plural: str = "deployments", name: str = "web") -> int:
    stored = api._collection(plural).objects["shop", name]
    size: int = json.loads(stored.data)["spec"]["replicas"]
    return size


# The Event


async def test_a_wake_up_is_one_event_as_openshift_has_it(api: ApiServer) -> None:
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"))
    (event,) = api.posted
    assert event["metadata"].pop("name").startswith("web.")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "shop"},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Service",
            "name": "web",
            "namespace": "shop",
            "uid": "uid-web",
            "resourceVersion": "7",
        },
        "reason": "NeedPods",
        "message": "The service-port web:http needs pods.",
        "source": {"component": "kube-proxy", "host": "node-1"},
        "firstTimestamp": "2023-11-14T22:13:20Z",
        "lastTimestamp": "2023-11-14T22:13:20Z",
        "count": 1,
        "type": "Normal",
    }
    (request,) = api.requests
    assert (request.verb, request.group, request.resource, request.namespace) == ("create", "", "events", "shop")


async def test_the_message_of_a_port_without_a_name_is_openshifts(api: ApiServer) -> None:
    name = ServicePortName("shop", "dns", "", L4Protocol.UDP)
    async with waking(api) as awaiting:
        awaiting.idled[name] = IdledService()
        awaiting.waker.needs_pods(name)
        await awaiting.until(("event", "done"))
    assert api.posted[0]["message"] == "The service-port dns: needs pods."
    assert "uid" not in api.posted[0]["involvedObject"]


async def test_another_wake_up_is_another_event(api: ApiServer) -> None:
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"), ("event", "done"))
    assert len({each["metadata"]["name"] for each in api.posted}) == 2


async def test_an_event_whose_answer_was_lost_is_not_sent_twice(api: ApiServer) -> None:
    api.fail(503, verb="create", times=1)
    async with waking(api) as awaiting:
        api.fail(409, verb="create", times=1)
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"))
    assert api.count("create") == 2


async def test_a_service_that_is_awake_by_now_needs_no_event(api: ApiServer) -> None:
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(ServicePortName("shop", "gone"))
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"))
    assert len(api.posted) == 1


async def test_while_the_server_is_away_it_is_tried_again_with_the_same_event(api: ApiServer) -> None:
    api.fail(500, verb="create", times=3)
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"))
    assert (api.count("create"), len(api.posted)) == (4, 1)
    assert api.posted[0]["lastTimestamp"] == "2023-11-14T22:13:20Z"


async def test_a_server_that_was_stopped_gets_the_event_when_it_is_back(api: ApiServer) -> None:
    await api.stop()
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await eventually(lambda: awaiting.now > 0.1)
        await api.start()
        await awaiting.until(("event", "done"))
    assert len(api.posted) == 1


async def test_it_is_not_tried_again_once_endpoints_have_come(api: ApiServer) -> None:
    api.fail(500, verb="create")
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await api.until_requested("create", times=2)
        awaiting.idled.clear()
        await awaiting.until(("event", "unneeded"))


async def test_it_is_not_tried_again_once_nobody_is_held_any_more(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.fail(500, verb="create")
    async with waking(api, WakeSettings(hold_timeout_s=0.5)) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "failed"))
        assert awaiting.now == pytest.approx(0.5)
    assert "shop/web:http: pods were not asked for in time: cannot create events: 500" in caplog.text


async def test_one_wake_up_does_not_wait_for_another(api: ApiServer) -> None:
    other = ServicePortName("shop", "other")
    api.fail(500, verb="create", times=1)
    async with waking(api) as awaiting:
        awaiting.idled[other] = IdledService()
        awaiting.waker.needs_pods(WEB)
        await api.until_requested("create")
        awaiting.waker.needs_pods(other)
        await awaiting.until(("event", "done"), ("event", "done"))
    assert len(api.posted) == 2


async def test_what_is_forbidden_is_told_once_with_the_right_that_lacks(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.fail(403, verb="create")
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "failed"), ("event", "failed"))
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert record.getMessage() == (
        "shop/web:http: pods cannot be asked for: cannot create events: 403 ordered by the test; "
        'grant the verb create on events (API group ""), see docs/waking.md'
    )


# Scaling


@pytest.mark.parametrize(
    ("kind", "plural", "group"),
    [
        ("Deployment", "deployments", "apps"),
        ("StatefulSet", "statefulsets", "apps"),
        ("ReplicaSet", "replicasets", "apps"),
        ("ReplicationController", "replicationcontrollers", ""),
        ("DeploymentConfig", "deploymentconfigs", "apps.openshift.io"),
    ],
)
async def test_a_workload_is_scaled_from_zero_to_its_former_size(
    api: ApiServer, kind: str, plural: str, group: str
) -> None:
    api.put(workload(kind, "web", 0, namespace="shop"))
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        awaiting.idled[WEB] = IdledService(targets=(ScaleTarget(kind, "web", 3),))
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"), ("scaling", "done"))
    assert replicas(api, plural) == 3
    assert {(each.verb, each.group) for each in api.requests if each.resource == f"{plural}/scale"} == {
        ("get", group),
        ("update", group),
    }


async def test_a_workload_that_has_replicas_is_left_alone(api: ApiServer) -> None:
    api.put(workload("Deployment", "web", 1, namespace="shop"))
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"), ("scaling", "unneeded"))
    assert replicas(api) == 1
    assert api.count("update") == 0


async def test_nothing_is_scaled_unless_it_is_wanted(api: ApiServer) -> None:
    api.put(workload("Deployment", "web", 0, namespace="shop"))
    async with waking(api) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"))
        awaiting.settings = WakeSettings(scales=True)
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"), ("event", "done"), ("scaling", "done"))
    assert replicas(api) == 3


async def test_a_service_that_names_no_workload_is_told(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        awaiting.idled[WEB] = IdledService()
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"))
    assert "shop/web:http: nothing is scaled, as no annotation names a workload" in caplog.text


async def test_a_size_that_somebody_else_gave_meanwhile_stays(api: ApiServer) -> None:
    api.put(workload("Deployment", "web", 0, namespace="shop"))
    conflict = api.fail(409, verb="update")
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await api.until_requested("update")
        api.put(workload("Deployment", "web", 1, namespace="shop"))
        conflict.times = 0
        await awaiting.until(("event", "done"), ("scaling", "unneeded"))
    assert replicas(api) == 1


async def test_a_stale_size_is_refused_by_the_server(api: ApiServer) -> None:
    api.put(workload("Deployment", "web", 0, namespace="shop"))
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        scale = await awaiting.waker._scale("get", "shop", TARGET)
        api.put(workload("Deployment", "web", 1, namespace="shop"))
        scale["spec"]["replicas"] = 3
        with pytest.raises(Exception, match="cannot update deployments/scale shop/web: 409"):
            await awaiting.waker._scale("update", "shop", TARGET, scale)
    assert replicas(api) == 1


@pytest.mark.parametrize("verb", ["get", "update"])
async def test_a_right_that_lacks_for_scaling_is_named(
    api: ApiServer, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(workload("Deployment", "web", 0, namespace="shop"))
    api.fail(403, verb=verb, resource="deployments/scale")
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"), ("scaling", "failed"))
    assert f"cannot {verb} deployments/scale shop/web: 403" in caplog.text
    assert 'grant the verbs get and update on deployments/scale (API group "apps")' in caplog.text


async def test_a_workload_that_is_not_there_is_named(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    async with waking(api, WakeSettings(scales=True)) as awaiting:
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "done"), ("scaling", "failed"))
    assert 'shop/web:http: pods cannot be asked for: cannot get deployments/scale shop/web: 404 deployments "web"' in (
        caplog.text
    )


@pytest.mark.parametrize("answer", [b"what", b"[]", b"{}", b'{"spec":null}'])
async def test_an_answer_that_is_no_scale_is_tried_again_while_somebody_waits(answer: bytes) -> None:
    async def answer_with(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(answer), answer))
        writer.close()

    async with await asyncio.start_server(answer_with, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with ApiConnection(Access(f"http://127.0.0.1:{port}"), qps=0) as connection:
            awaiting = Waking(connection, WakeSettings(hold_timeout_s=0.1, scales=True))
            running = asyncio.create_task(awaiting.waker.run())
            awaiting.waker.needs_pods(WEB)
            await eventually(lambda: ("scaling", "failed") in awaiting.results)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_a_fault_of_ours_ends_nothing(
    api: ApiServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: Any) -> None:
        raise ValueError("what")

    async with waking(api) as awaiting:
        with monkeypatch.context() as patched:
            patched.setattr(awaiting.waker._events, "create", fail)
            awaiting.waker.needs_pods(WEB)
            await awaiting.until(("event", "failed"))
        awaiting.waker.needs_pods(WEB)
        await awaiting.until(("event", "failed"), ("event", "done"))
    assert "a fault of ours" in caplog.text
