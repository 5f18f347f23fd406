"""The node's proxy with a kernel in memory: it goes on whatever fails, and says what it cannot do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.support.announcing import Announcing
from userspace_proxy import node_proxy
from userspace_proxy.core import hybrid
from userspace_proxy.core.config import DEFAULTS, Config, OwnSettings, with_field
from userspace_proxy.core.config_addresses import NodeAddresses
from userspace_proxy.core.counters import LiveCounters
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.health import ProxyHealth
from userspace_proxy.core.model import Endpoint, IPFamily, ServicePort, ServicePortName, Snapshot
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.metrics import Metrics
from userspace_proxy.node.addresses import LocalAddress
from userspace_proxy.node_proxy import NodeProxy, data_plane_settings
from userspace_proxy.redirect.keeper import RuleKeeper
from userspace_proxy.redirect.redirector import Redirector

NODE = NodeAddresses(IPFamily.IPV4, {IPFamily.IPV4: "127.0.0.1", IPFamily.IPV6: "::1"})
WEB = ServicePort(ServicePortName("shop", "web"), 80, (Endpoint("127.0.0.1", 1),), cluster_ips=("10.96.0.1",))


class Rig:
    """A proxy and what can be seen of it."""

    def __init__(self, config: Config) -> None:
        self.backend = Announcing()
        self.health = ProxyHealth(30.0)
        self.metrics = Metrics("0")
        keeper = RuleKeeper([Redirector(self.backend)], leftovers=None)
        self.proxy = NodeProxy(config, NODE, keeper, self.health, self.metrics)

    def sample(self, name: str) -> float:
        lines = "".join(self.metrics.pieces(LiveCounters())).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


@asynccontextmanager
async def running(config: Config | None = None) -> AsyncIterator[Rig]:
    rig = Rig(config or Config())
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rig.proxy.run())
        yield rig
        task.cancel()


async def test_a_first_sync_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Exception] = [OSError("no netlink today"), ValueError("a fault of ours")]

    async def addresses() -> tuple[LocalAddress, ...]:
        if answers:
            raise answers.pop(0)
        return (LocalAddress("127.0.0.1", 8, "lo"),)

    monkeypatch.setattr(node_proxy, "local_addresses", addresses)
    monkeypatch.setattr(node_proxy, "_RETRY_S", 0.01)
    async with running() as rig:
        rig.proxy.want(Snapshot.of(WEB))
        async with asyncio.timeout(5):
            await rig.backend.written.wait()
    assert [record.message for record in caplog.records].count("a sync has failed; trying again") == 2
    assert rig.sample("userspace_proxy_sync_errors_total") == 2
    assert any("10.96.0.1/32" in line for line in rig.backend.tables["nat"]["KUBE-PORTALS-CONTAINER"])


async def test_nothing_is_written_before_something_is_wanted() -> None:
    async with running() as rig:
        await asyncio.sleep(0)
        assert not rig.backend.written.is_set()
        assert rig.health.is_healthy(now=time.monotonic())


async def test_a_change_that_comes_during_a_sync_waits_since_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses() -> tuple[LocalAddress, ...]:
        if not rig.backend.written.is_set():  # the first sync is under way
            rig.proxy.want(Snapshot.of(replace(WEB, port=81)))
        return (LocalAddress("127.0.0.1", 8, "lo"),)

    monkeypatch.setattr(node_proxy, "local_addresses", addresses)
    async with running() as rig:
        rig.proxy.want(Snapshot.of(WEB), [time.time() - 3])
        async with asyncio.timeout(5):
            await rig.backend.written.wait()
            while not rig.sample("kubeproxy_sync_proxy_rules_duration_seconds_count"):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
        now = time.monotonic()
        assert rig.health.is_healthy(now=now)
        if rig.sample("kubeproxy_sync_proxy_rules_duration_seconds_count") == 1:
            assert not rig.health.is_healthy(now=now + 61)
    assert rig.sample("kubeproxy_network_programming_duration_seconds_count") == 1
    assert rig.sample("kubeproxy_network_programming_duration_seconds_sum") >= 3


@pytest.mark.parametrize(("unidling", "is_on"), [("off", False), ("on", True), ("hybrid", True)])
def test_the_data_path_holds_clients_as_the_configuration_says(unidling: str, is_on: bool) -> None:
    document = DEFAULTS
    for name, value in {
        "unidling": unidling,
        "unidlingHoldTimeout": Duration(7),
        "unidlingMaxConnections": 3,
    }.items():
        document = with_field(document, f"userspaceProxy.{name}", value)
    settings = data_plane_settings(Config(document=document))
    assert (settings.unidling, settings.hold_timeout_s, settings.max_held) == (is_on, 7.0, 3)


def test_the_data_path_gets_each_limit_of_the_configuration() -> None:
    own = OwnSettings(
        dial_ladder=(Duration(0.5), Duration(3)),
        half_close_timeout=Duration(60),
        listen_backlog=100,
        max_connections=1000,
        max_connections_per_service_port=50,
        max_udp_sessions=7,
        tcp_idle_timeout=Duration(90),
        tcp_user_timeout=Duration(30),
    )
    settings = data_plane_settings(Config(document=with_field(DEFAULTS, "userspaceProxy", own)))
    assert settings == DataPlaneSettings(
        max_sessions=7,
        dial_ladder_s=(0.5, 3),
        half_close_timeout_s=60,
        tcp_idle_timeout_s=90,
        tcp_user_timeout_s=30,
        max_connections=1000,
        max_connections_per_service_port=50,
        listen_backlog=100,
        cross_family=False,
    )


async def test_in_hybrid_mode_rules_are_for_what_is_idled_and_what_wakes_is_served_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def logged(text: str) -> str:
        async with asyncio.timeout(5):
            while not (found := [message for message in caplog.messages if text in message]):  # noqa: ASYNC110
                await asyncio.sleep(0)
        return found[0]

    def led() -> str:
        return "".join(rig.backend.tables["nat"]["KUBE-PORTALS-CONTAINER"])

    monkeypatch.setattr(hybrid, "WAKING_S", 0.3)
    caplog.set_level("INFO")
    document = with_field(DEFAULTS, "userspaceProxy.unidling", "hybrid")
    web = replace(WEB, node_port=30080)
    other = replace(WEB, name=ServicePortName("shop", "other"), cluster_ips=("10.96.0.2",))
    async with running(Config(document=with_field(document, "iptables.minSyncPeriod", Duration(0)))) as rig:
        rig.proxy.want(Snapshot.of(replace(web, endpoints=(), wakes_on_connect=True), other))
        assert ":30080" not in await logged("shop/web (TCP): ")  # no port is held
        assert "10.96.0.1/32" in led()
        assert "10.96.0.2/32" not in led()

        rig.proxy.want(Snapshot.of(web, other))
        await logged("-> 127.0.0.1:1")
        assert led() == ""
        await logged("shop/web (TCP): no longer served")
    assert not any("shop/other" in message for message in caplog.messages)
