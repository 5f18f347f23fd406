"""The daemon's processes: either may die at any time, and what the other one has is not lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import apiserver
from tests.netns.daemon import (
    HEALTH,
    METRICS,
    V4,
    Daemon,
    answered,
    api_server,
    child,
    children,
    get,
    refused,
    rules,
    sample,
    slice_of,
    status,
    until,
    web,
)
from tests.netns.topology import Topology
from tests.netns.traffic import NoAnswer, ask_again, ask_by, opened
from tests.support.namespaces import Namespace
from tests.support.processes import Running
from userspace_proxy.core.model import L4Protocol

OBJECTS = (web(), slice_of("web", *V4.pods))
SYNCED = "default/web:udp (UDP): "


async def replaced(daemon: Running, role: str, former: int) -> int:
    """Wait for the process that takes the place of a former one."""

    async def is_there() -> bool:
        return child(daemon, role) not in (0, former)

    await until(is_there, f"no other {role} process")
    return child(daemon, role)


@asynccontextmanager
async def open_connection(client: Namespace, address: str, port: int) -> AsyncIterator[socket.socket]:
    with opened(client, L4Protocol.TCP, address) as sock:
        await ask_by(sock, address, port)
        yield sock


def redirected() -> list[str]:
    """Return to which port each rule leads, for rules that lead to one."""
    return sorted(line for line in rules("nft") if re.search(r"--to-ports|--to-destination", line))


async def test_connections_and_listeners_survive_the_control_process(topology: Topology, tmp_path: Path) -> None:
    pod = topology.pods[0]
    gone = apiserver.service("gone", cluster_ip="10.96.0.11")
    async with api_server(*OBJECTS, gone, apiserver.endpoint_slice("gone", *V4.pods)) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged(SYNCED)
            await daemon.logged("default/gone (TCP): ")
            control, data, before = child(daemon, "control"), child(daemon, "data"), redirected()
            async with open_connection(pod, V4.cluster_ip, 80) as connection:
                lines = len(daemon.log)
                os.kill(control, signal.SIGKILL)
                assert await ask_again(connection)
                api.delete("services", "gone")
                await daemon.logged("the control process was killed by SIGKILL", after=lines)
                await replaced(daemon, "control", control)
                await daemon.logged(SYNCED, after=lines)
                await daemon.logged("default/gone (TCP): no longer served", after=lines)
                assert await ask_again(connection)
            assert child(daemon, "data") == data
            assert redirected() == [line for line in before if "default/gone" not in line]
            await answered(pod, V4.cluster_ip, 80, "p1", "p2")
            await refused(pod, "10.96.0.11", 80)
            api.put(slice_of("web", V4.pods[1]))
            await daemon.logged("-> 10.244.1.12:8080\n", after=lines)
            assert await sample('userspace_proxy_process_restarts_total{process="control"}') == 1
            assert await sample("userspace_proxy_connections_total") >= 2
            assert await daemon.stop() == 0


async def test_listeners_and_totals_survive_the_data_process(topology: Topology, tmp_path: Path) -> None:
    pod = topology.pods[0]
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged(SYNCED)
            control, before = child(daemon, "control"), redirected()
            for protocol in L4Protocol:
                await answered(pod, V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
            counted = await sample("userspace_proxy_connections_total")
            async with open_connection(pod, V4.cluster_ip, 80) as connection:
                data = child(daemon, "data")
                os.kill(data, signal.SIGKILL)
                with opened(pod, L4Protocol.TCP, V4.cluster_ip) as waiting:
                    assert await ask_by(waiting, V4.cluster_ip, 80, patience_s=8)  # it was not refused
                with pytest.raises(NoAnswer):
                    await ask_again(connection)
            await daemon.logged("the data process was killed by SIGKILL")
            for protocol in L4Protocol:
                await answered(pod, V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
                await answered(topology.outside, V4.node, 30080, "p1", "p2", protocol=protocol)
            assert child(daemon, "control") == control
            assert redirected() == before
            assert await sample("userspace_proxy_connections_total") > counted >= 1
            assert await sample('userspace_proxy_process_restarts_total{process="data"}') == 1
            for process in ("control", "data", "supervisor"):
                name = f'userspace_proxy_process_resident_memory_bytes{{process="{process}"}}'
                assert 5 << 20 < await sample(name) < 500 << 20
            assert (await get(f"{HEALTH}/healthz"))[0] == 200
            assert await daemon.stop() == 0


async def test_what_changes_while_there_is_no_data_process_is_served_by_the_next(
    topology: Topology, tmp_path: Path
) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged(SYNCED)
            data, lines = child(daemon, "data"), len(daemon.log)
            os.kill(data, signal.SIGKILL)
            api.put(web("late", cluster_ip="10.96.0.11", node_port=0))
            api.put(slice_of("late", V4.pods[1]))
            api.delete("services", "web")
            await daemon.logged("default/late:udp (UDP): 0.0.0.0", after=lines)
            await answered(topology.pods[0], "10.96.0.11", 80, "p2")
            await refused(topology.pods[0], V4.cluster_ip, 80)


async def test_the_data_process_and_its_workers_have_no_privileges(topology: Topology, tmp_path: Path) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running("--workers=2") as daemon:
            await daemon.logged(SYNCED)
            data = child(daemon, "data")
            workers = children(data)
            assert len(workers) == 2
            for found in map(status, [data, *workers]):
                assert {found[f"Cap{each}"] for each in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
                assert found["NoNewPrivs"] == "1"


async def test_no_process_minds_a_hang_up(topology: Topology, tmp_path: Path) -> None:
    """As when the terminal is closed, or all processes of this name are told that a log was rotated."""
    pod = topology.pods[0]
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running("--workers=2") as daemon:
            await daemon.logged(SYNCED)
            control, data = child(daemon, "control"), child(daemon, "data")
            workers = children(data)
            async with open_connection(pod, V4.cluster_ip, 80) as connection:
                for pid in (*workers, data, control, daemon.process.pid):
                    os.kill(pid, signal.SIGHUP)
                await daemon.logged("SIGHUP is ignored")
                assert await ask_again(connection)
            await answered(pod, V4.cluster_ip, 80, "p1", "p2")
            assert (child(daemon, "control"), child(daemon, "data")) == (control, data)
            assert children(data) == workers
            assert not [line for line in daemon.log if "ERROR" in line]


async def test_all_processes_end_with_the_supervisor(topology: Topology, tmp_path: Path) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged(SYNCED)
            processes = [child(daemon, "control"), child(daemon, "data")]
            await daemon.stop(signal.SIGKILL)

            async def are_gone() -> bool:
                return not any(_is_alive(pid) for pid in processes)

            await until(are_gone, "children are left")


@pytest.mark.parametrize("stuck", ["control", "data"])
async def test_a_process_that_is_stuck_holds_up_neither_traffic_of_the_other_nor_the_end(
    topology: Topology, tmp_path: Path, stuck: str
) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running() as daemon:
            await daemon.logged(SYNCED)
            os.kill(child(daemon, stuck), signal.SIGSTOP)
            if stuck == "control":
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
            else:
                await daemon.logged("the data process is stuck for 5 s")
                name = "userspace_proxy_data_process_is_stuck"
                assert await sample(name) == 1
                os.kill(child(daemon, stuck), signal.SIGCONT)
                await daemon.logged("the data process goes on")
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2")
                os.kill(child(daemon, stuck), signal.SIGSTOP)
            async with asyncio.timeout(4):  # 2 s are promised
                assert await daemon.stop() == 0


async def test_more_listeners_than_fit_into_a_message_survive_both_processes(
    topology: Topology, tmp_path: Path
) -> None:
    number = 600
    objects = [apiserver.service(f"s{n}", cluster_ip=f"10.96.{1 + n // 200}.{1 + n % 200}") for n in range(number)]
    objects += [apiserver.endpoint_slice(f"s{n}", *V4.pods) for n in range(number)]
    async with api_server(*objects) as api:
        async with Daemon(api, tmp_path, "none").running() as daemon:
            served = f"s{number - 1} (TCP): 0.0.0.0:"
            first = await daemon.logged(served)
            for role in ("data", "control"):
                former, lines = child(daemon, role), len(daemon.log)
                os.kill(former, signal.SIGKILL)
                await replaced(daemon, role, former)
                if role == "control":
                    again = await daemon.logged(served, after=lines)
                    assert again.partition(served)[2] == first.partition(served)[2]
                else:
                    await daemon.logged(f"{number} listeners again")
            port = int(first.partition(served)[2].split(",")[0].split()[0])
            await answered(topology.outside, V4.node, port, "p1", "p2")
            assert await sample("userspace_proxy_service_ports") == number


async def test_systemd_hears_of_one_process_only_whatever_dies(topology: Topology, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(path))
        told.settimeout(10)
        async with api_server() as api:
            async with Daemon(api, tmp_path, "nft").running(environ={"NOTIFY_SOCKET": str(path)}) as daemon:
                assert await asyncio.to_thread(told.recv, 100) == b"READY=1"
                former = child(daemon, "control")
                os.kill(former, signal.SIGKILL)
                await replaced(daemon, "control", former)
                await until(_has_metrics, "no metrics server")
                await daemon.stop()
                assert await asyncio.to_thread(told.recv, 100) == b"STOPPING=1"


async def _has_metrics() -> bool:
    return (await get(f"{METRICS}/healthz"))[0] == 200


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return not status(pid)["State"].startswith("Z")
    return False


async def test_workers_end_with_their_data_process_and_the_next_one_has_others(
    topology: Topology, tmp_path: Path
) -> None:
    async with api_server(*OBJECTS) as api:
        async with Daemon(api, tmp_path, "nft").running("--workers=2") as daemon:
            await daemon.logged(SYNCED)
            data = child(daemon, "data")
            workers = children(data)
            assert len(workers) == 2
            os.kill(data, signal.SIGKILL)

            async def are_gone() -> bool:
                return not any(_is_alive(pid) for pid in workers)

            await until(are_gone, "workers are left")
            for protocol in L4Protocol:
                await answered(topology.pods[0], V4.cluster_ip, 80, "p1", "p2", protocol=protocol)
            assert await daemon.stop() == 0
