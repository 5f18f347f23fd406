"""How the daemon starts, restarts, does without an API server, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.netns.daemon import (
    HEALTH,
    METRICS,
    NODE_NAME,
    V4,
    Daemon,
    answered,
    api_server,
    get,
    refused,
    rules,
    sample,
    slice_of,
    started,
    this_node,
    until,
    web,
)
from tests.netns.topology import Topology
from tests.netns.traffic import NoAnswer, ask
from tests.support.namespaces import Namespace
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.redirect.opening import BackendChoice

CONFIG = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OBJECTS = (web(), slice_of("web", *V4.pods))


class Load:
    """Asks again and again, and notes how long nobody answered."""

    def __init__(self) -> None:
        self.answers = 0
        self.longest_outage_s = 0.0

    async def run(self, client: Namespace, *, per_second: float = 50.0) -> None:
        last = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._ask(client))
                now = time.monotonic()
                last = max(last, self._last_answer or now)
                await asyncio.sleep(1 / per_second)

    _last_answer = 0.0

    async def _ask(self, client: Namespace) -> None:
        with contextlib.suppress(NoAnswer):
            await ask(client, L4Protocol.TCP, V4.cluster_ip, 80, patience_s=0.5)
            now = time.monotonic()
            if self._last_answer:
                self.longest_outage_s = max(self.longest_outage_s, now - self._last_answer)
            self._last_answer = now
            self.answers += 1


@asynccontextmanager
async def load(client: Namespace) -> AsyncIterator[Load]:
    """Ask for the length of the context."""
    asking = Load()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(asking.run(client))
        yield asking
        running.cancel()


async def test_a_killed_daemon_is_replaced_with_a_short_outage(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    """Case 56."""
    pod = topology.pods[0]
    async with api_server(*OBJECTS) as api:
        daemon = Daemon(api, tmp_path, variant)
        async with daemon.running() as first:
            await answered(pod, V4.cluster_ip, 80, "p1", "p2")
            before = rules(variant)
            async with load(pod) as asking:
                await until(lambda: _is(asking.answers > 20), "no answers")
                await first.stop(signal.SIGKILL)
                assert rules(variant) == before
                answers = asking.answers
                async with daemon.running():
                    await until(lambda: _is(asking.answers > answers + 20), "no answers after the restart")
    print(f"outage: {asking.longest_outage_s:.2f} s")
    assert asking.longest_outage_s <= 2.0


async def _is(condition: bool) -> bool:
    return condition


async def test_nothing_is_touched_before_the_lists_are_in(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    """Case 56: not even with rules of a former process, and with one of the two lists."""
    async with api_server(*OBJECTS) as api:
        daemon = Daemon(api, tmp_path, variant)
        async with daemon.running() as first:
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            await first.stop()
        before = rules(variant)
        assert before
        api.fail(503, verb="list", resource="endpointslices")
        async with daemon.running():
            await until(lambda: _is(api.count("list", "endpointslices") > 2), "no retry")
            assert rules(variant) == before
            assert (await get(f"{HEALTH}/livez"))[0] == 200
            api.heal()
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")


async def test_an_api_server_that_is_away_at_the_start_is_waited_for(topology: Topology, tmp_path: Path) -> None:
    async with api_server(*OBJECTS, runs=False) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged("cannot be reached")
            assert (await get(f"{HEALTH}/livez"))[0] == 200
            assert (await get(f"{HEALTH}/healthz"))[0] == 503
            assert not rules("nft")
            await api.start()
            assert await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2") < 6
            await answered(topology.outside, V4.node, 30080, "p1", "p2")
            await until(lambda: _answers(f"{HEALTH}/healthz", 200), "healthz")


async def _answers(url: str, status: int) -> bool:
    return (await get(url))[0] == status


async def test_without_the_api_server_the_state_stays_and_changes_follow_its_return(
    topology: Topology, tmp_path: Path
) -> None:
    pod = topology.pods[0]
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await answered(pod, V4.cluster_ip, 80, "p1", "p2")
            await api.stop()
            await daemon.logged("cannot be reached")
            await answered(pod, V4.cluster_ip, 80, "p1", "p2")
            assert (await get(f"{HEALTH}/healthz"))[0] == 200
            api.put(web("late", cluster_ip="10.96.0.11", node_port=0))
            api.put(slice_of("late", V4.pods[1]))
            api.delete("services", "web")
            await api.start()
            assert await answered(pod, "10.96.0.11", 80, "p2") < 5
            await refused(pod, V4.cluster_ip, 80)


async def test_rules_stay_at_the_end_and_a_clean_up_leaves_none(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, variant).running() as daemon:
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            assert await daemon.stop() == 0
    assert len(rules(variant)) > 8
    async with started(["--cleanup"]) as cleaning:
        assert await cleaning.ended() == 0
    assert rules("nft") == rules("legacy") == []


async def test_init_only_needs_no_api_server(topology: Topology) -> None:
    async with started(["--init-only", "--conntrack-tcp-timeout-established=77s"]) as daemon:
        assert await daemon.ended() == 0
    assert topology.node.run("sysctl", "-n", "net.netfilter.nf_conntrack_tcp_timeout_established").strip() == "77"


def config_file(daemon: Daemon, *lines: str) -> list[str]:
    """Write a configuration file, and return the arguments for it."""
    kubeconfig = next(each for each in daemon.arguments() if each.startswith("--kubeconfig=")).partition("=")[2]
    path = daemon.folder / "config.conf"
    path.write_text(
        CONFIG + f"clientConnection: {{kubeconfig: {kubeconfig}}}\n" + "".join(f"{each}\n" for each in lines)
    )
    return [f"--config={path}", f"--hostname-override={NODE_NAME}", f"--iptables-backend={daemon.variant}"]


async def test_a_written_configuration_file_ends_the_process(topology: Topology, tmp_path: Path) -> None:
    async with api_server() as api:
        daemon = Daemon(api, tmp_path, "nft")
        async with started(config_file(daemon)) as running:
            await running.logged("nodes: listed 1")
            config_file(daemon, "udpIdleTimeout: 2s")
            assert await running.ended() == 1
            await running.logged("content of the proxy server's configuration file was updated")


async def test_a_changed_configuration_file_is_taken_up_where_that_is_wanted(
    topology: Topology, tmp_path: Path
) -> None:
    async with api_server(*OBJECTS) as api:
        daemon = Daemon(api, tmp_path, "nft")
        async with started([*config_file(daemon), "--config-reload"]) as running:
            await answered(topology.outside, V4.second, 30080, "p1", "p2")
            config_file(daemon, "nodePortAddresses: [primary]", "oomScoreAdj: 0")
            assert "nodePortAddresses" in await running.logged("the configuration has changed")
            assert "oomScoreAdj" in await running.logged("these changes need a restart")
            await refused(topology.outside, V4.second, 30080)
            await answered(topology.outside, V4.node, 30080, "p1", "p2")


async def test_ports_of_servers_that_are_taken_are_tried_again(topology: Topology, tmp_path: Path) -> None:
    """Case 79."""
    strangers = [socket.create_server(("0.0.0.0", port)) for port in (10249, 10256)]
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged("10249")
            await daemon.logged("10256")
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            for stranger in strangers:
                stranger.close()
            for url in (f"{METRICS}/healthz", f"{HEALTH}/healthz"):
                await until(lambda url=url: _answers(url, 200), url)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("port", "reason"), [(10249, "FailedToStartMetricServer"), (10256, "FailedToStartProxierHealthcheck")]
)
async def test_with_hard_fail_a_taken_port_ends_the_process_with_an_event(
    topology: Topology, tmp_path: Path, port: int, reason: str
) -> None:
    """Case 79."""
    with socket.create_server(("0.0.0.0", port)):
        async with api_server(*OBJECTS) as api:
            async with Daemon(api, tmp_path, "nft").running("--bind-address-hard-fail") as daemon:
                assert await daemon.ended() == 1
                await daemon.logged(str(port))
            told = {each["reason"]: each for each in api.posted}
            assert told[reason]["type"] == "Warning"
            assert told[reason]["regarding"]["name"] == NODE_NAME


async def test_a_node_that_goes_away_gets_no_more_traffic_but_its_proxy_is_alive(
    topology: Topology, tmp_path: Path
) -> None:
    """Case 81."""
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running():
            for away in (
                lambda: api.put(this_node(taints=("ToBeDeletedByClusterAutoscaler",))),
                lambda: api.delete("nodes", NODE_NAME),
            ):
                api.put(this_node())
                await until(lambda: _answers(f"{HEALTH}/healthz", 200), "eligible")
                away()
                await until(lambda: _answers(f"{HEALTH}/healthz", 503), "not eligible")
                assert '"nodeEligible": false' in (await get(f"{HEALTH}/healthz"))[1].replace('":f', '": f')
                status, text = await get(f"{HEALTH}/livez")
                assert status == 200
                assert "nodeEligible" not in text
            assert await sample('kubeproxy_proxy_livez_total{code="200"}') == 2


def restricted(*capabilities: str) -> tuple[str, ...]:
    """Return what runs a program with these capabilities and no others."""
    granted = ",".join(["-all", *(f"+{each}" for each in capabilities)])
    return ("setpriv", f"--bounding-set={granted}", f"--inh-caps={granted}", "--no-new-privs", "--")


async def test_the_capabilities_of_the_manifest_are_enough(
    topology: Topology, variant: BackendChoice, tmp_path: Path
) -> None:
    low = web("low", cluster_ip="10.96.0.11", node_port=0, externalIPs=[V4.second])
    granted = restricted("net_admin", "net_raw", "net_bind_service")
    async with api_server(*OBJECTS, low, slice_of("low", *V4.pods)) as api:
        async with Daemon(api, tmp_path, variant).running(prefix=granted) as daemon:
            for protocol in L4Protocol:
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
            await answered(topology.outside, V4.node, 30080, "p1", "p2")
            await answered(topology.outside, V4.second, 80, "p1", "p2")
            assert not [
                line for line in daemon.log if "lacks" in line or ("denied" in line and "cannot be set" not in line)
            ]


@pytest.mark.parametrize(
    ("variant", "capabilities", "missing"),
    [
        ("nft", ["net_admin"], "CAP_NET_BIND_SERVICE"),
        ("nft", ["net_bind_service"], "CAP_NET_ADMIN"),
        ("legacy", ["net_admin", "net_bind_service"], "CAP_NET_RAW"),
    ],
)
async def test_missing_capabilities_are_named(
    topology: Topology, tmp_path: Path, variant: str, capabilities: list[str], missing: str
) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, variant).running(prefix=restricted(*capabilities)) as daemon:
            assert missing in await daemon.logged("this process lacks")
            assert "WARNING" in await daemon.logged("this process lacks")
            if capabilities == ["net_admin"]:
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            else:
                await daemon.logged("trying again")
                assert (await get(f"{HEALTH}/livez"))[0] == 200


async def test_systemd_is_told(topology: Topology, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(path))
        told.settimeout(10)
        async with api_server() as api:
            async with Daemon(api, tmp_path, "nft").running(environ={"NOTIFY_SOCKET": str(path)}) as daemon:
                assert await asyncio.to_thread(told.recv, 100) == b"READY=1"
                await daemon.stop()
                assert await asyncio.to_thread(told.recv, 100) == b"STOPPING=1"


def test_the_tests_run_as_root() -> None:
    assert os.geteuid() == 0
