"""Which services are idled, over HTTP: the annotations of services and of Endpoints, in any order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from tests.apiserver import ApiServer, endpoint_slice, endpoints, service
from tests.sources.following import QUICK, Following, endpoints_of, following
from userspace_proxy.core.idling import IDLED_AT_ANNOTATION, UNIDLE_TARGETS_ANNOTATION, IdledService, ScaleTarget
from userspace_proxy.core.model import ServicePortName, Snapshot
from userspace_proxy.sources.kubernetes import KubernetesSettings

pytestmark = pytest.mark.timeout(30)

WEB = ServicePortName("default", "web")
UNIDLING = KubernetesSettings(watch=QUICK, unidling=True)
IDLED = {IDLED_AT_ANNOTATION: "2026-01-31T12:00:00Z"}
TARGETS = {UNIDLE_TARGETS_ANNOTATION: '[{"kind":"Deployment","group":"apps","name":"web","replicas":2}]'}


def is_idled(snapshot: Snapshot) -> bool:
    return WEB in snapshot.service_ports and snapshot.service_ports[WEB].is_idled


async def until_idled(followed: Following, wanted: bool = True) -> None:
    """Return when the service is idled, or is not, which may be so already."""
    if is_idled(followed.snapshot) is not wanted:
        await followed.until(lambda snapshot: is_idled(snapshot) is wanted)


def mark_the_service(api: ApiServer) -> None:
    api.put(service("web", annotations=IDLED))


def mark_the_endpoints(api: ApiServer) -> None:
    api.put(endpoints("web", annotations=IDLED))


@pytest.mark.parametrize("mark", [mark_the_service, mark_the_endpoints])
async def test_a_mark_and_the_end_of_the_endpoints_may_come_in_any_order(
    api: ApiServer, mark: Callable[[ApiServer], None]
) -> None:
    def empty(api: ApiServer) -> None:
        api.put(endpoint_slice("web"))

    for first, second in ((mark, empty), (empty, mark)):
        api.put(service("web"))
        api.put(endpoints("web", "10.1.0.1"))
        api.put(endpoint_slice("web", "10.1.0.1"))
        async with following(api, UNIDLING) as followed:
            await followed.until_endpoints("default/web", "10.1.0.1:8080")
            first(api)
            second(api)
            await until_idled(followed)
            api.put(endpoint_slice("web", "10.1.0.2"))
            await until_idled(followed, False)
            assert endpoints_of(followed.snapshot, "default/web") == ("10.1.0.2:8080",)


async def test_an_idled_service_waits_for_endpoints_also_without_its_mark_but_not_forever(api: ApiServer) -> None:
    api.put(service("web"))
    api.put(endpoint_slice("web"))
    mark_the_endpoints(api)
    async with following(api, UNIDLING, linger_s=lambda: 0.3) as followed:
        await until_idled(followed)
        removed_at = time.monotonic()
        api.put(endpoints("web"))
        await until_idled(followed, False)
        assert time.monotonic() - removed_at >= 0.3


async def test_the_first_snapshot_knows_what_endpoints_are_marked_with(api: ApiServer) -> None:
    api.put(service("web"))
    api.put(endpoints("web", annotations=IDLED))
    async with following(api, UNIDLING) as followed:
        assert is_idled(await followed.first())


async def test_of_endpoints_beside_slices_only_metadata_is_asked_for(api: ApiServer) -> None:
    async with following(api, UNIDLING) as followed:
        await followed.first()
        await api.until_requested("watch", "endpoints")
    asked = [each for each in api.requests if each.resource == "endpoints"]
    assert {each.verb for each in asked} == {"list", "watch"}
    assert all(each.wants_metadata for each in asked)


async def test_nothing_more_is_asked_for_while_unidling_is_off(api: ApiServer) -> None:
    api.put(service("web", annotations=IDLED))
    async with following(api) as followed:
        assert not is_idled(await followed.first())
        await api.until_requested("watch", "endpointslices")
    assert api.count("list", "endpoints") == 0


async def test_a_refusal_of_endpoints_is_told_once_and_services_count_all_the_same(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0.001)

    caplog.set_level(logging.WARNING)
    api.put(service("web", annotations=IDLED))
    refused = api.fail(403, resource="endpoints")
    async with following(api, UNIDLING, sleep=at_once) as followed:
        assert is_idled(await followed.first())
        await api.until_requested("list", "endpoints", times=3)
        assert caplog.text.count("annotations of Endpoints do not count") == 1
        refused.times = 0
        await api.until_requested("watch", "endpoints")
        assert followed.source.has_synced


async def test_where_there_are_no_slices_the_endpoints_themselves_say_it() -> None:
    async with ApiServer(served=("services", "endpoints")) as api:
        api.put(service("web"))
        api.put(endpoints("web", annotations=IDLED))
        async with following(api, UNIDLING) as followed:
            assert is_idled(await followed.first())
            assert not any(each.wants_metadata for each in api.requests)
            api.put(endpoints("web", "10.1.0.1", annotations=IDLED))
            await followed.until_endpoints("default/web", "10.1.0.1:8080")


async def test_an_idled_service_is_described_until_it_is_awake(api: ApiServer) -> None:
    api.put(service("web"))
    api.put(endpoints("web", annotations={**IDLED, **TARGETS}))
    async with following(api, UNIDLING) as followed:
        assert followed.source.idled(WEB) is None
        await followed.first()
        assert followed.source.idled(WEB) == IdledService("uid-web", "2", (ScaleTarget("Deployment", "web", 2),))
        assert followed.source.idled(ServicePortName("default", "other")) is None
        api.put(endpoint_slice("web", "10.1.0.2"))
        await until_idled(followed, False)
        assert followed.source.idled(WEB) is None
