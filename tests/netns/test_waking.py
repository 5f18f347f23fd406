"""An idled service from its first client to its last: held, asked for, served. With and without another kube-proxy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, Object
from tests.netns.daemon import V4, Daemon, answered, api_server, slice_of, until, web
from tests.netns.other_proxy import OtherProxy, own_rules
from tests.netns.test_hybrid import IDLED, WOKEN, hybrid_proxy, led_here
from tests.netns.topology import Topology
from tests.netns.traffic import ask_again, backend, opened
from tests.support.namespaces import Namespace
from userspace_proxy.core import hybrid
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.redirect.opening import BackendChoice

IDLED_AT = {"idling.alpha.openshift.io/idled-at": "2026-01-31T12:00:00Z"}
LATE_PORT = 8090


def idled_web() -> Object:
    each = web(node_port=0)
    each["metadata"]["annotations"] = IDLED_AT
    return each


def woken_web() -> Object:
    """Return its slice, of a backend that was not there before."""
    each = slice_of("web", V4.pods[0])
    for port in each["ports"]:
        port["port"] = LATE_PORT
    return each


def need_pods(api: ApiServer) -> list[Object]:
    return [each for each in api.posted if each["reason"] == "NeedPods"]


@asynccontextmanager
async def waiting(client: Namespace) -> AsyncIterator[socket.socket]:
    """Yield a connection to the cluster IP by which the client has spoken before anybody answers."""
    loop = asyncio.get_running_loop()
    with opened(client, L4Protocol.TCP, V4.cluster_ip) as sock:
        async with asyncio.timeout(5):
            await loop.sock_connect(sock, (V4.cluster_ip, 80))
            await loop.sock_sendall(sock, b"early")
        yield sock


async def received(sock: socket.socket) -> bytes:
    async with asyncio.timeout(10):
        return await asyncio.get_running_loop().sock_recv(sock, 100)


@pytest.mark.parametrize("mode", ["on", "hybrid"])
async def test_an_idled_service_is_woken_by_its_first_client(
    topology: Topology, variant: BackendChoice, tmp_path: Path, mode: str
) -> None:
    """Case 83: a backend that starts 2 s after the Event."""
    p1, p2 = V4.pods
    client = topology.outside
    other = OtherProxy(variant)

    async def is_led_no_more() -> bool:
        return not any(f"-d {V4.cluster_ip}/32" in line for line in own_rules(variant))

    with ExitStack() as stack:
        async with api_server(idled_web()) as api:
            async with Daemon(api, tmp_path, variant).running(f"--unidling={mode}") as daemon:
                await daemon.logged("default/web:tcp (TCP): 0.0.0.0:")
                before = other.rules()
                async with waiting(client) as first, waiting(client) as second, waiting(client) as third:
                    await api.until(lambda: bool(need_pods(api)))
                    await asyncio.sleep(2)
                    (event,) = need_pods(api)
                    assert event["type"] == "Normal"
                    assert event["message"] == "The service-port web:tcp needs pods."
                    assert event["involvedObject"]["name"] == "web"

                    stack.enter_context(backend(topology.pods[0], p1, LATE_PORT, "late"))
                    api.put(woken_web())

                    for sock in (first, second, third):
                        assert await received(sock) == b"late:early"
                    assert len(need_pods(api)) == 1
                    if mode == "hybrid":
                        assert other.rules() == before
                        await until(is_led_no_more, "the woken service is still led here")
                        other.leads_to(p2)
                        await answered(client, V4.cluster_ip, 80, "p2")
                        before = other.rules()
                    else:
                        await answered(client, V4.cluster_ip, 80, "late")
                    for sock in (first, second, third):
                        assert await ask_again(sock) == "late"
                assert await daemon.stop() == 0
        assert bool(own_rules(variant)) is (mode == "on")
        if mode == "hybrid":
            assert other.rules() == before


@pytest.mark.parametrize("mode", ["on", "hybrid"])
async def test_datagrams_wait_for_pods_too(
    topology: Topology, variant: BackendChoice, tmp_path: Path, mode: str
) -> None:
    client = topology.outside
    OtherProxy(variant)
    async with api_server(idled_web()) as api:
        async with Daemon(api, tmp_path, variant).running(f"--unidling={mode}") as daemon:
            await daemon.logged("default/web:udp (UDP): 0.0.0.0:")  # rules stand, and older flows are forgotten
            loop = asyncio.get_running_loop()
            with opened(client, L4Protocol.UDP, V4.cluster_ip) as sock:
                await loop.sock_connect(sock, (V4.cluster_ip, 80))
                await loop.sock_sendall(sock, b"early")
                await api.until(lambda: bool(need_pods(api)))
                assert need_pods(api)[0]["message"] == "The service-port web:udp needs pods."
                with backend(topology.pods[0], V4.pods[0], LATE_PORT, "late"):
                    api.put(woken_web())
                    assert await received(sock) == b"late:early"


async def test_the_controller_that_takes_the_annotation_away_first_costs_no_client_its_connection(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    """OpenShift's does so as soon as it has scaled, long before there are pods."""
    other = OtherProxy(variant)

    async with api_server(idled_web()) as api:
        async with Daemon(api, tmp_path, variant).running("--unidling=hybrid") as daemon:
            await daemon.logged("default/web:tcp (TCP): 0.0.0.0:")
            async with waiting(topology.outside) as early:
                await api.until(lambda: bool(need_pods(api)))
                api.put(web(node_port=0))
                await asyncio.sleep(2)
                async with waiting(topology.outside) as late:
                    other.leads_to(V4.pods[1])
                    with backend(topology.pods[0], V4.pods[0], LATE_PORT, "late"):
                        api.put(woken_web())
                        for sock in (early, late):
                            assert await received(sock) == b"late:early"
                        await answered(topology.outside, V4.cluster_ip, 80, "p2")
            assert len(need_pods(api)) == 1


async def test_a_connection_that_waited_outlives_the_minute_of_waking(
    topology: Topology, variant: BackendChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_over() -> bool:
        return topology.node.run("ss", "-Hltn") == ""

    monkeypatch.setattr(hybrid, "WAKING_S", 1.0)
    other = OtherProxy(variant)
    async with hybrid_proxy(variant) as proxy:
        proxy.want(IDLED)
        await led_here(variant)
        async with waiting(topology.outside) as sock:
            assert not await is_over()
            other.leads_to(V4.pods[1])
            proxy.want(WOKEN)
            assert await received(sock) == b"p1:early"
            await answered(topology.outside, V4.cluster_ip, 80, "p2")
            await until(is_over, "it is still listened for new ones")
            assert await ask_again(sock) == "p1"
