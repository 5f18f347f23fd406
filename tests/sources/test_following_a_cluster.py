"""List, watch and heal, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.apiserver import ApiServer, cluster, endpoint_slice, endpoints, event_line, node, service
from tests.sources.following import LIMIT_S, QUICK, endpoints_of, eventually, following, services_of
from userspace_proxy.core.desired import DesiredState
from userspace_proxy.core.objects import EndpointSlice, KubernetesObject
from userspace_proxy.sources.kubernetes import KubernetesSettings
from userspace_proxy.sources.reflector import WatchSettings

pytestmark = pytest.mark.timeout(30)


def versions_asked_for(api: ApiServer) -> set[str]:
    return {each.query.get("resourceVersion", "") for each in api.requests if each.verb == "watch"}


# The happy path


async def test_a_cluster_with_services_and_slices_alone_is_served_once_both_are_listed(api: ApiServer) -> None:
    """Case 29."""
    api.put(service("web"))
    api.put(endpoint_slice("web", "10.1.0.1", "10.1.0.2"))
    refused = api.fail(403, resource="endpointslices")
    async with following(api) as followed:
        await api.until_requested("list", "endpointslices", times=3)
        assert not followed.source.has_synced
        refused.times = 0
        snapshot = await followed.first()
        assert endpoints_of(snapshot, "default/web") == ("10.1.0.1:8080", "10.1.0.2:8080")
        assert followed.source.has_synced
    assert api.count("list", "endpoints") == 0


async def test_an_empty_cluster_is_a_snapshot_too(api: ApiServer) -> None:
    async with following(api) as followed:
        assert not (await followed.first()).service_ports


async def test_changes_follow_one_another(api: ApiServer) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        api.put(endpoint_slice("web", "10.1.0.1"))
        await followed.until_endpoints("default/web", "10.1.0.1:8080")
        api.put(endpoint_slice("web", "10.1.0.2"))
        await followed.until_endpoints("default/web", "10.1.0.2:8080")
        api.delete("endpointslices", "web-1")
        await followed.until_endpoints("default/web")
        api.delete("services", "web")
        await followed.until_services()


async def test_each_change_that_was_triggered_since_the_start_is_told_once(api: ApiServer) -> None:
    def triggered(moment: float, *addresses: str) -> dict[str, Any]:
        each = endpoint_slice("web", *addresses)
        text = datetime.fromtimestamp(moment, UTC).isoformat()
        each["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": text}
        return each

    now = time.time()
    api.put(service("web"))
    api.put(triggered(now - 3600, "10.1.0.1"))
    async with following(api) as followed:
        await followed.until_endpoints("default/web", "10.1.0.1:8080")
        assert followed.source.take_trigger_times() == ()
        api.put(triggered(now + 60, "10.1.0.2"))
        await followed.until_endpoints("default/web", "10.1.0.2:8080")
        assert followed.source.take_trigger_times() == (pytest.approx(now + 60, abs=0.001),)
        assert followed.source.take_trigger_times() == ()


async def test_the_server_leaves_out_what_other_proxies_serve_and_what_is_headless(api: ApiServer) -> None:
    api.put(service("ours"))
    api.put(service("theirs", labels={"service.kubernetes.io/service-proxy-name": "other"}))
    api.put(service("headless", labels={"service.kubernetes.io/headless": ""}))
    async with following(api) as followed:
        assert services_of(await followed.first()) == {"default/ours"}
        api.put(service("ours", labels={"service.kubernetes.io/service-proxy-name": "other"}))
        await followed.until_services()
        api.put(service("theirs"))
        await followed.until_services("default/theirs")
    selectors = {each.query["labelSelector"] for each in api.requests}
    assert selectors == {"!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"}


async def test_long_lists_come_in_pages(api: ApiServer) -> None:
    api.most_per_page = 7
    for each in cluster(services=30, endpoints_per_service=2):
        api.put(each)
    async with following(api) as followed:
        snapshot = await followed.first()
    assert len(snapshot.service_ports) == 30
    assert all(len(port.endpoints) == 2 for port in snapshot.service_ports.values())
    assert api.count("list", "services") == 5
    assert all("resourceVersion" not in each.query for each in api.requests if each.verb == "list")


async def test_only_the_namespaces_asked_for_are_followed(api: ApiServer) -> None:
    for namespace in ("one", "two", "three"):
        api.put(service("web", namespace=namespace))
    async with following(api, KubernetesSettings(namespaces=("one", "two"), watch=QUICK)) as followed:
        assert services_of(await followed.first()) == {"one/web", "two/web"}
        api.delete("services", "web", "two")
        await followed.until_services("one/web")
    assert {each.namespace for each in api.requests} == {"one", "two"}


async def test_endpoints_are_followed_where_slices_are_not_served() -> None:
    async with ApiServer(served=("services", "endpoints", "nodes")) as api:
        api.put(service("web"))
        api.put(endpoints("web", "10.1.0.1"))
        async with following(api) as followed:
            await followed.until_endpoints("default/web", "10.1.0.1:8080")
            api.put(endpoints("web", "10.1.0.2"))
            await followed.until_endpoints("default/web", "10.1.0.2:8080")


async def test_slices_that_are_served_later_are_followed_then(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("userspace_proxy.sources.kubernetes._LOOK_FOR_SLICES_S", 0.05)
    api.fail(404, verb="list", resource="endpointslices", times=3)
    api.put(service("web"))
    api.put(endpoints("web", "10.1.0.1"))
    api.put(endpoint_slice("web", "10.1.0.2"))
    async with following(api) as followed:
        await followed.until_endpoints("default/web", "10.1.0.1:8080")
        await followed.until_endpoints("default/web", "10.1.0.2:8080")


async def test_the_zone_of_this_node_decides_by_hints_and_its_taint_about_health(api: ApiServer) -> None:
    api.put(service("web"))
    near = endpoint_slice("web", "10.1.0.1", "10.1.0.2")
    for each, zone in zip(near["endpoints"], ("a", "b"), strict=True):
        each["hints"] = {"forZones": [{"name": zone}]}
    api.put(near)
    api.put(node("this", "192.0.2.1", labels={"topology.kubernetes.io/zone": "b"}))
    api.put(node("other", "192.0.2.2", labels={"topology.kubernetes.io/zone": "a"}))
    async with following(api, KubernetesSettings(node_name="this", watch=QUICK)) as followed:
        await followed.until_endpoints("default/web", "10.1.0.2:8080")
        assert followed.source.node is not None
        assert followed.source.node.ips == ("192.0.2.1",)
        assert followed.source.node.is_eligible
        labels = {"topology.kubernetes.io/zone": "a"}
        api.put(node("this", "192.0.2.1", labels=labels, taints=("ToBeDeletedByClusterAutoscaler",)))
        await followed.until_endpoints("default/web", "10.1.0.1:8080")
        assert not followed.source.node.is_eligible
        assert not followed.source.node.is_deleted
        api.delete("nodes", "this")
        await eventually(lambda: followed.source.node and followed.source.node.is_deleted)


# Versions


async def test_a_watch_resumes_after_a_disconnect_without_a_list(api: ApiServer) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        await api.until_requested("watch", "services")
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")
        api.cut_watches()
        await api.until_requested("watch", "services", times=2)
        api.put(service("third"))
        await followed.until_services("default/web", "default/second", "default/third")
    assert api.count("list", "services") == 1


async def test_what_happens_while_disconnected_is_not_missed(api: ApiServer) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        away = api.fail(503, verb="watch")
        api.cut_watches()
        await api.until_requested("watch", "services", times=3)
        api.delete("services", "web")
        api.put(service("second"))
        away.times = 0
        await followed.until_services("default/second")
    assert api.count("list", "services") == 1


async def test_bookmarks_move_the_version_to_resume_from(api: ApiServer) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        for number in range(5):
            api.put(node(f"node-{number}", "192.0.2.1"))
        api.bookmark()
        api.end_watches("services")
        latest = await api.until_requested("watch", "services", times=2)
        assert latest.query["resourceVersion"] == str(api.version)


@pytest.mark.parametrize("gone_as", ["status", "event"])
async def test_an_expired_version_causes_one_new_list_and_deletions_are_found(gone_as: str) -> None:
    """Case 68."""
    async with ApiServer(gone_as=gone_as) as api:
        api.put(service("web"))
        api.put(service("old"))
        async with following(api) as followed:
            await followed.first()
            await api.until(lambda: len(api.open_watches()) == 2)
            away = api.fail(500)
            api.cut_watches("services")
            await api.until_requested("watch", "services", times=3)
            api.delete("services", "old")
            api.put(service("new"))
            api.compact()
            away.times = 0
            await followed.until_services("default/web", "default/new")
            await api.until(lambda: bool(api.open_watches("services")))
        lists = [each for each in api.requests if (each.verb, each.resource) == ("list", "services")]
        assert len(lists) == 2
        assert "resourceVersion" not in lists[-1].query
        assert all(version.isdigit() for version in versions_asked_for(api))


async def test_a_server_that_always_says_gone_is_asked_ever_less_often(api: ApiServer) -> None:
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)
        await asyncio.sleep(0)

    api.fail(410, verb="watch", resource="services")
    settings = KubernetesSettings(watch=WatchSettings())
    async with following(api, settings, sleep=sleep, rng=random.Random(1)) as followed:
        await followed.first()
        await api.until_requested("list", "services", times=8)
    assert all(1 <= delay <= 30 for delay in delays)
    assert delays[5] >= 15


async def test_a_list_that_expires_between_its_pages_starts_again(api: ApiServer) -> None:
    api.most_per_page = 2
    for number in range(5):
        api.put(service(f"web-{number}"))
    api.fail(410, verb="list", resource="services", times=1)
    async with following(api) as followed:
        assert len((await followed.first()).service_ports) == 5


async def test_a_version_that_the_server_never_had_is_not_insisted_on(api: ApiServer) -> None:
    api.put(service("web"))
    api.fail(504, verb="watch", resource="services", times=1, message="Too large resource version: 9, current: 3")
    async with following(api) as followed:
        await followed.first()
        await api.until_requested("list", "services", times=2)


async def test_a_list_without_a_version_is_not_watched_from_none(api: ApiServer) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        api.send_raw("services", b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":null}}}\n')
        api.end_watches("services")
        await api.until_requested("watch", "services", times=2)
    assert all(version.isdigit() for version in versions_asked_for(api))


# Faults


async def test_an_error_event_is_not_an_object_and_the_watch_resumes(api: ApiServer) -> None:
    """Case 72."""
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        api.send_error("services", 500)
        await api.until_requested("watch", "services", times=2)
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")
    assert api.count("list", "services") == 1


BROKEN = {
    "half a line": b'{"type":"MODIFIED","object":{"metadata":{"na\n',
    "no JSON": b"<html>\n",
    "not UTF-8": b'{"type":"MODIFIED","object":{"metadata":{"name":"\xff"}}}\n',
    "an unknown type": event_line("SURPRISE", b"{}"),
    "an object without a name": event_line("ADDED", b'{"metadata":{}}'),
    "no object": event_line("ADDED", b"null"),
    "an empty line": b"\n",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_broken_line_is_skipped_by_resuming_before_it(api: ApiServer, broken: bytes) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        api.send_raw("services", broken)
        await api.until_requested("watch", "services", times=2)
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")
    assert api.count("list", "services") == 1


async def test_a_stream_cut_in_the_middle_of_a_line_loses_nothing(api: ApiServer) -> None:
    api.put(service("web"))
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        api.send_raw("services", event_line("DELETED", b'{"metadata":{"name":"web"}}')[:40])
        api.end_watches("services")
        await api.until_requested("watch", "services", times=2)
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")


async def test_lines_that_arrive_in_pieces_are_put_together(api: ApiServer) -> None:
    api.put(service("web"))
    line = event_line("ADDED", b'{"metadata":{"name":"x","resourceVersion":"9"},"spec":{"clusterIP":"10.0.0.9"}}')
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        for piece in (line[:10], line[10:-1], line[-1:] + event_line("BOOKMARK", b'{"metadata":{}}') + line[:5]):
            api.send_raw("services", piece)
        api.send_raw("services", line[5:])
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")
    assert api.count("watch", "services") == 1


async def test_an_object_that_cannot_be_understood_does_not_stop_the_others(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    odd = service("odd")
    odd["spec"]["ports"] = "none"
    api.put(odd)
    api.put(service("web"))
    async with following(api) as followed:
        assert services_of(await followed.first()) == {"default/web"}
        await api.until(lambda: len(api.open_watches()) == 2)
        api.put(odd)
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")
        health = {each.resource: each for each in followed.source.watches()}["services"]
    assert health.skipped_objects == 2
    assert "default/odd cannot be understood" in caplog.text
    assert api.count("watch", "services") == 1


async def test_an_object_that_cannot_be_understood_can_still_be_deleted(api: ApiServer) -> None:
    api.put(service("web"))
    api.put(service("odd"))
    async with following(api) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        odd = service("odd")
        odd["spec"]["ports"] = "none"
        api.put(odd)
        api.delete("services", "odd")
        await followed.until_services("default/web")


async def test_a_server_that_is_frozen_at_the_start_is_asked_again(api: ApiServer) -> None:
    api.put(service("web"))
    api.freeze()
    settings = replace(QUICK, answer_timeout_s=0.2)
    async with following(api, KubernetesSettings(watch=settings)) as followed:
        await api.until_requested("list", "services", times=2)
        api.thaw()
        assert services_of(await followed.first()) == {"default/web"}


async def test_a_silent_connection_is_given_up_after_the_watchs_time_and_some_grace(api: ApiServer) -> None:
    """Case 70."""
    settings = WatchSettings(
        watch_timeout_s=(1.0, 1.0),
        silence_grace_s=0.2,
        answer_timeout_s=0.3,
        backoff_min_s=0.01,
        unreachable_max_s=0.05,
    )
    api.put(service("web"))
    async with following(api, KubernetesSettings(watch=settings)) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        api.freeze()
        async with asyncio.timeout(LIMIT_S):
            await api.until_requested("watch", "services", times=3)
        health = {each.resource: each for each in followed.source.watches()}["services"]
        assert health.failures >= 1
        assert health.heard_at is not None
        assert services_of(followed.snapshot) == {"default/web"}
        api.thaw()
        api.put(service("second"))
        await followed.until_services("default/web", "default/second")
    assert api.count("list", "services") == 1


async def test_the_watch_asks_the_server_to_end_it_after_five_to_nine_minutes(api: ApiServer) -> None:
    settings = KubernetesSettings(watch=WatchSettings())
    async with following(api, settings) as followed:
        await followed.first()
        await api.until_requested("watch", times=2)
    watches = [each.query for each in api.requests if each.verb == "watch"]
    assert all(300 <= int(each["timeoutSeconds"]) <= 540 for each in watches)
    assert all(each["allowWatchBookmarks"] == "true" for each in watches)


async def test_after_a_short_watch_there_is_a_pause(api: ApiServer) -> None:
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)
        await asyncio.sleep(0)

    api.put(service("web"))
    async with following(api, KubernetesSettings(watch=WatchSettings()), sleep=sleep) as followed:
        await followed.first()
        await api.until_requested("watch", "services")
        api.put(service("shop"))
        api.end_watches("services")
        await api.until_requested("watch", "services", times=2)
        await followed.until_services("default/web", "default/shop")
    assert delays == [1.0]


@pytest.mark.parametrize("asked", ["soon", "Wed, 21 Oct 2099 07:28:00 GMT", "-5", "1e9", "²"])
async def test_a_retry_after_that_is_no_number_is_passed_over(api: ApiServer, asked: str) -> None:
    api.put(service("web"))
    api.fail(429, verb="list", resource="services", times=1, headers={"Retry-After": asked})
    async with following(api) as followed:
        await followed.first()
        assert sum(each.handler_errors for each in followed.source.watches()) == 0


async def test_retry_after_is_the_least_to_wait(api: ApiServer) -> None:
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)
        await asyncio.sleep(0)

    api.fail(429, verb="list", resource="services", times=1, headers={"Retry-After": "7"})
    async with following(api, KubernetesSettings(watch=WatchSettings()), sleep=sleep) as followed:
        await followed.first()
    assert 7 <= delays[0] <= 8


async def test_a_handler_that_fails_once_leads_to_a_new_list_and_is_counted(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 27."""

    class FailsOnce(DesiredState):
        remaining = 1

        def upsert(self, each: KubernetesObject) -> bool:
            if isinstance(each, EndpointSlice) and followed.source.has_synced and self.remaining:
                self.remaining -= 1
                raise RuntimeError("only once")
            return super().upsert(each)

    api.put(service("web"))
    async with following(api, desired=FailsOnce()) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        api.put(endpoint_slice("web", "10.1.0.1"))
        await followed.until_endpoints("default/web", "10.1.0.1:8080")
        health = {each.resource: each for each in followed.source.watches()}["endpointslices.discovery.k8s.io"]
    assert health.handler_errors == 1
    assert api.count("list", "endpointslices") == 2
    assert "only once" in caplog.text


async def test_a_service_that_cannot_be_worked_out_never_stops_another(
    api: ApiServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desired = DesiredState()
    build = desired._build
    broken = {"bad"}

    def fails(key: object) -> object:
        if key[1] in broken:  # type: ignore[index]
            raise RuntimeError("cannot be worked out")
        return build(key)  # type: ignore[arg-type]

    monkeypatch.setattr(desired, "_build", fails)
    monkeypatch.setattr("userspace_proxy.sources.kubernetes._RETRY_S", 0.05)
    for name in ("bad", "web"):
        api.put(service(name))
    async with following(api, desired=desired) as followed:
        assert services_of(await followed.first()) == {"default/web"}
        assert followed.source.build_errors >= 1
        broken.clear()
        await followed.until_services("default/web", "default/bad")
    assert "cannot be worked out" in caplog.text


# The server is away


async def test_nothing_is_said_before_the_server_has_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    readings = itertools.count(0, 7)
    api = ApiServer()
    await api.start()
    await api.stop()
    async with following(api, clock=lambda: float(next(readings))) as followed:
        waiting = asyncio.create_task(followed.first())
        await eventually(lambda: sum("cannot be reached" in each for each in caplog.messages) >= 3)
        told = [each for each in caplog.messages if "cannot be reached" in each]
        assert not waiting.done()
        failures = sum(each.failures for each in followed.source.watches())
        assert len(told) <= failures / 3
        assert "nothing is changed before it answers" in told[0]
        api.put(service("web"))
        await api.start()
        assert services_of(await waiting) == {"default/web"}
    await api.stop()


async def test_the_last_state_stays_while_the_server_is_away_and_changes_come_with_it(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.put(service("web"))
    settings = KubernetesSettings(watch=WatchSettings())
    async with following(api, settings) as followed:
        await followed.first()
        await api.until(lambda: len(api.open_watches()) == 2)
        await api.stop()
        await eventually(lambda: sum(each.failures for each in followed.source.watches()) >= 4)
        api.put(service("second"))
        api.delete("services", "web")
        await api.start()
        async with asyncio.timeout(5):
            await followed.until_services("default/second")
        assert api.count("list", "services") == 1
    assert sum("the last state stays in force" in each for each in caplog.messages) == 1
    assert sum("answers again" in each for each in caplog.messages) == 1


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, r"cannot list services: 401 .*credentials of the test are not accepted"),
        (403, r"cannot list services: 403 .*grant the verbs list and watch on services.*system:node-proxier"),
    ],
)
async def test_who_is_not_allowed_is_told_once_what_to_grant(
    api: ApiServer, caplog: pytest.LogCaptureFixture, status: int, advice: str
) -> None:
    api.put(service("web"))
    api.fail(status, resource="services")
    async with following(api) as followed:
        await api.until_requested("list", "services", times=4)
        api.heal()
        await followed.first()
    told = [each for each in caplog.messages if re.search(advice, each)]
    assert len(told) == 1


async def test_requests_keep_to_the_rate_they_are_given(api: ApiServer) -> None:
    api.most_per_page = 1
    for number in range(30):
        api.put(service(f"web-{number}"))
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    async with following(api, qps=100) as followed:
        await followed.first()
    assert loop.time() - started_at >= (31 - 10) / 100
