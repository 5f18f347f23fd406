"""What the objects in a file mean for traffic: conditions, types and labels, changed while it is served."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import RunLocal, ask, free_port, until

StartBackends = Callable[[int], Awaitable[list[int]]]

READY: dict[str, Any] = {"ready": True}
NOT_READY: dict[str, Any] = {"ready": False}
TERMINATING: dict[str, Any] = {"ready": False, "serving": True, "terminating": True}
GONE: dict[str, Any] = {"ready": False, "serving": False, "terminating": True}


def service(port: int, *, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    ports = [{"name": "main", "port": port}]
    metadata = {"name": "web", "namespace": "shop", "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports, **spec}}


def a_slice(backend: int, conditions: dict[str, Any], *, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"web-{backend}",
            "namespace": "shop",
            "labels": {"kubernetes.io/service-name": "web", **(labels or {})},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": conditions}],
        "ports": [{"name": "main", "port": backend}],
    }


class Shop:
    """The file that is served, and the one port at which it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = free_port()

    def write(self, *objects: dict[str, Any]) -> None:
        self.path.write_text("\n---\n".join(map(json.dumps, objects)))

    async def answers(self, count: int = 4) -> Counter[int | None]:
        """Return who answers so many connections: the ports of backends, None for nobody."""
        found: Counter[int | None] = Counter()
        for _ in range(count):
            try:
                answer = await ask(self.port)
            except ConnectionError:
                answer = b""
            found[int(answer) if answer else None] += 1
        return found

    async def until_only(self, *who: int | None) -> None:
        async def is_so() -> bool:
            return set(await self.answers()) == set(who)

        await until(is_so, 3.0)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop.json")


async def test_terminating_endpoints_serve_while_there_are_no_ready_ones(
    local: RunLocal, backends: StartBackends, shop: Shop
) -> None:
    """cases.md 31"""
    (a, b), web = await backends(2), service(shop.port)
    shop.write(web, a_slice(a, READY), a_slice(b, TERMINATING))
    async with local("-f", shop.path):
        assert await shop.answers(20) == {a: 20}
        shop.write(web, a_slice(b, TERMINATING))
        await shop.until_only(b)
        shop.write(web, a_slice(b, GONE))
        await shop.until_only(None)


async def test_an_endpoint_that_is_not_ready_gets_nothing(local: RunLocal, backends: StartBackends, shop: Shop) -> None:
    """cases.md 33"""
    a, b = await backends(2)
    shop.write(service(shop.port), a_slice(a, READY), a_slice(b, NOT_READY))
    async with local("-f", shop.path):
        assert await shop.answers(100) == {a: 100}


async def test_a_service_becomes_an_external_name_and_comes_back(
    local: RunLocal, backends: StartBackends, shop: Shop
) -> None:
    """cases.md 62"""
    (a,) = await backends(1)
    cluster_ip = service(shop.port, clusterIP="10.96.0.1")
    external_name = service(shop.port, type="ExternalName", externalName="example.org", selector={"app": "web"})
    shop.write(cluster_ip, a_slice(a, READY))
    async with local("-f", shop.path):
        assert await shop.answers() == {a: 4}
        shop.write(external_name, a_slice(a, READY))
        await shop.until_only(None)
        shop.write(cluster_ip, a_slice(a, READY))
        await shop.until_only(a)


@pytest.mark.parametrize(
    "foreign",
    [
        {"clusterIP": "None"},
        {"labels": {"service.kubernetes.io/service-proxy-name": "other"}},
    ],
    ids=["headless", "of another proxy"],
)
async def test_services_that_are_not_ours_to_proxy_are_not_and_labels_count_at_once(
    local: RunLocal, backends: StartBackends, shop: Shop, foreign: dict[str, Any]
) -> None:
    """cases.md 64"""
    (a,) = await backends(1)
    shop.write(service(shop.port), a_slice(a, READY))
    async with local("-f", shop.path):
        assert await shop.answers() == {a: 4}
        shop.write(service(shop.port, **foreign), a_slice(a, READY))
        await shop.until_only(None)
        shop.write(service(shop.port, clusterIP=""), a_slice(a, READY))
        await shop.until_only(a)


async def test_a_headless_slice_gives_no_endpoints(local: RunLocal, backends: StartBackends, shop: Shop) -> None:
    """cases.md 64"""
    a, b = await backends(2)
    headless = a_slice(b, READY, labels={"service.kubernetes.io/headless": ""})
    shop.write(service(shop.port), a_slice(a, READY), headless)
    async with local("-f", shop.path):
        assert await shop.answers() == {a: 4}
