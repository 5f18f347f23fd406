"""What crosses from one process to another arrives as it was."""

from __future__ import annotations

import asyncio
import socket

from userspace_proxy.core.counters import WakeTimes, WakingCounters
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.model import Endpoint, L4Protocol, ListenAddress, Scope, ServicePort, ServicePortName
from userspace_proxy.dataplane.channel import Channel
from userspace_proxy.dataplane.handover import (
    FromWorker,
    HostCounts,
    Lead,
    ListenForDatagrams,
    Report,
    Start,
    Take,
    ToWorker,
    UpdateDatagrams,
)
from userspace_proxy.dataplane.settings import DataPlaneSettings

WEB = ServicePortName("default", "web", "http")
DNS = ServicePortName("kube-system", "dns", "", L4Protocol.UDP)
SIX = Endpoint("fd00::1", 53)


async def arrived(kind: object, *messages: object) -> list[object]:
    """Send messages through a channel and return what comes out."""
    received: list[object] = []
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    ends: list[str] = []
    receiver: Channel[object] = Channel(
        loop, there, kind, on_message=lambda message, _: received.append(message), on_end=ends.append
    )
    sender: Channel[object] = Channel(loop, here, kind, on_message=lambda message, _: None, on_end=ends.append)
    for message in messages:
        sender.send(message)
    async with asyncio.timeout(5.0):
        while len(received) < len(messages) and not ends:  # noqa: ASYNC110 - the loop has to turn
            await asyncio.sleep(0)
    sender.close()
    receiver.close()
    assert ends == []
    return received


async def test_settings_of_the_daemon_reach_a_worker() -> None:
    """Their durations are a class of their own, which the configuration file has."""
    ladder = (Duration(0.25), Duration(1))
    settings = DataPlaneSettings(udp_idle_timeout_s=Duration(0.25), dial_ladder_s=ladder, max_sessions=7, workers=2)
    (received,) = await arrived(ToWorker, Start(settings, 20))
    assert isinstance(received, Start)
    assert received.settings == settings


async def test_a_udp_service_port_keeps_all_that_decides_about_datagrams() -> None:
    whole = ServicePort(DNS, 53, (SIX,), external_endpoints=(), session_affinity_s=10.0, wakes_on_connect=True)
    listen = ListenForDatagrams(DNS, ListenAddress("::", 53, Scope.EXTERNAL, is_held=True))
    update, received = await arrived(ToWorker, UpdateDatagrams.of(whole), listen)
    assert isinstance(update, UpdateDatagrams)
    assert update.service_port() == whole
    assert received == listen


async def test_clients_and_reports_arrive_as_they_were() -> None:
    take = Take([Lead(1, WEB, SIX)], [(1, 3, "fd00::2"), (1, 0, "10.0.0.1")])
    assert await arrived(ToWorker, take) == [take]
    waking = WakingCounters(held_udp_clients=1, wake_times=WakeTimes().with_another(2.0))
    report = Report(9, [(1, 1, 1, -1, 0, 2**40, 5)], [(DNS, SIX, 1, 1, 0, 3, 4)], HostCounts(waking=waking), True, 1)
    assert await arrived(FromWorker, report) == [report]


def test_what_an_ended_process_had_counted_stays_and_what_it_held_does_not() -> None:
    ended = HostCounts(1, 2, 3, 4, 5, 6, 7, WakingCounters(held_connections=8, wake_ups=9), open_sessions=10)
    total = HostCounts(1, 1, 1, 1, 1, 1, 1).plus(ended)
    assert total == HostCounts(2, 3, 4, 5, 6, 7, 8, WakingCounters(wake_ups=9), open_sessions=0)
