"""How the daemon starts, restarts, does without an API server, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.netns.daemon import (
    HEALTH,
    NODE_NAME,
    V4,
    Daemon,
    answered,
    api_server,
    child,
    get,
    refused,
    rules,
    slice_of,
    started,
    until,
    web,
)
from tests.netns.topology import Topology
from tests.netns.traffic import NoAnswer, ask
from tests.support.namespaces import Namespace
from userspace_proxy.core.model import L4Protocol
from userspace_proxy.redirect.opening import BackendChoice

CONFIG = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
SYNCED = "default/web:udp (UDP): "
OBJECTS = (web(), slice_of("web", *V4.pods))


class Load:
    """Asks again and again, and notes the longest time between two answers."""

    def __init__(self) -> None:
        self.answers = 0
        self.longest_outage_s = 0.0
        self._last_answer_at = time.monotonic()

    async def run(self, client: Namespace, *, per_second: float = 50.0) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._ask(client))
                await asyncio.sleep(1 / per_second)

    async def until_answered(self, times: int) -> None:
        """Return when so many more were answered."""
        enough = self.answers + times

        async def are_enough() -> bool:
            return self.answers >= enough

        await until(are_enough, "no answers")

    async def _ask(self, client: Namespace) -> None:
        with contextlib.suppress(NoAnswer):
            await ask(client, L4Protocol.TCP, V4.cluster_ip, 80, patience_s=0.5)
            now = time.monotonic()
            self.longest_outage_s = max(self.longest_outage_s, now - self._last_answer_at)
            self._last_answer_at = now
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
            await first.logged(SYNCED)
            before = rules(variant)
            async with load(pod) as asking:
                await asking.until_answered(20)
                await first.stop(signal.SIGKILL)
                assert rules(variant) == before
                async with daemon.running():
                    await asking.until_answered(20)
    print(f"outage: {asking.longest_outage_s:.2f} s")
    assert asking.longest_outage_s <= 2.0


async def test_nothing_is_touched_before_the_lists_are_in(topology: Topology, tmp_path: Path) -> None:
    """Case 56: not even with rules of a former process, and with one of the two lists."""
    async with api_server(*OBJECTS) as api:
        daemon = Daemon(api, tmp_path, "nft")
        async with daemon.running() as first:
            await first.logged(SYNCED)
            await first.stop()
        before = rules("nft")
        assert before
        lists = api.count("list", "endpointslices")
        api.fail(503, verb="list", resource="endpointslices")
        async with daemon.running() as second:
            await second.logged("services: listed")
            await api.until(lambda: api.count("list", "endpointslices") > lists + 1)
            assert rules("nft") == before
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
            await daemon.logged(SYNCED)
            await until(lambda: _answers(f"{HEALTH}/healthz", 200), "the node is not known")
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
            await daemon.logged(SYNCED)
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
    fields = [f"clientConnection: {{kubeconfig: {kubeconfig}}}", *lines]
    path.write_text(CONFIG + "".join(f"{each}\n" for each in fields))
    return [f"--config={path}", f"--hostname-override={NODE_NAME}", f"--iptables-backend={daemon.variant}"]


async def test_a_written_configuration_file_ends_the_process(topology: Topology, tmp_path: Path) -> None:
    async with api_server() as api:
        daemon = Daemon(api, tmp_path, "nft")
        async with started(config_file(daemon)) as running:
            await running.logged("nodes: listed 1")
            config_file(daemon, "udpIdleTimeout: 2s")
            assert await running.ended() == 1
            await running.logged("content of the proxy server's configuration file was updated")


async def test_data_processes_log_as_the_changed_file_says_also_when_all_were_replaced(
    topology: Topology, tmp_path: Path
) -> None:
    async with api_server(*OBJECTS) as api:
        daemon = Daemon(api, tmp_path, "nft")
        async with started([*config_file(daemon), "--config-reload"]) as running:
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            config_file(daemon, "logging: {verbosity: 4}")
            await running.logged("the configuration has changed: logging")
            for role in ("control", "data"):
                former, lines = child(running, role), len(running.log)
                os.kill(former, signal.SIGKILL)
                await running.logged(SYNCED if role == "control" else "listeners again", after=lines)
            lines = len(running.log)
            await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            await running.logged("is connected to", after=lines)


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
