"""Out of descriptors: the proxy waits, says so once, burns nothing, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.traffic.conftest import VARIANTS, Stage, Variant
from tests.traffic.peers import eventually, hold


class LimitedProxy:
    """A proxy in a process that may have few descriptors."""

    def __init__(self, variant: Variant, limit: int, protocol: str, *ports: int, log: Any) -> None:
        arguments = [str(variant), str(limit), protocol, *map(str, ports)]
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.traffic.limited_proxy", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def counters(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def cpu_s(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def log_lines(self) -> list[str]:
        self.log.seek(0)
        return self.log.read().splitlines()  # type: ignore[no-any-return]

    def finish(self) -> None:
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait(5) == 0


@contextmanager
def limited_proxy(variant: Variant, limit: int, protocol: str, *ports: int) -> Iterator[LimitedProxy]:
    with tempfile.TemporaryFile("w+") as log:
        proxy = LimitedProxy(variant, limit, protocol, *ports, log=log)
        try:
            yield proxy
            proxy.finish()
        finally:
            if proxy.process.poll() is None:
                proxy.process.kill()
                proxy.process.communicate()


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[-1]], ids=str)
@pytest.mark.parametrize("limit", [128, 129])  # one of them runs out when it accepts, the other when it dials
def test_it_waits_for_descriptors_quietly_and_goes_on_when_there_are_some(
    stage: Stage, variant: Variant, limit: int
) -> None:
    """cases.md 12"""
    watched_s = 5.0 if (variant, limit) == (VARIANTS[0], 128) else 0.5
    backends = [stage.serving_backend(hold) for _ in range(2)]
    with limited_proxy(variant, limit, "TCP", *(backend.endpoint.port for backend in backends)) as proxy:
        clients = [stage.connect(proxy.address) for _ in range(200)]
        assert eventually(lambda: proxy.counters()["accept_errors"] > 0)
        began, cpu_before = time.monotonic(), proxy.cpu_s()
        assert clients[-1].hears_nothing(during=watched_s)
        assert proxy.cpu_s() - cpu_before < 0.2 * (time.monotonic() - began)
        assert proxy.process.poll() is None
        assert len(proxy.log_lines()) <= 10
        for client in clients[:150]:
            client.close()
        freed_at = time.monotonic()
        newcomer = stage.connect(proxy.address)
        newcomer.send(b"hello")
        assert eventually(lambda: sum(backend.connections for backend in backends) == 201, within=2.0)
        assert time.monotonic() - freed_at < 2.0
        assert {backend.connections for backend in backends} == {100, 101}  # shortage moves no turn
        assert all(counted["dial_failures"] == 0 for counted in proxy.counters()["endpoints"].values())


def test_datagrams_are_dropped_while_there_are_none_and_pass_again(stage: Stage, variant: Variant) -> None:
    backends = [stage.answering_datagrams(bytes) for _ in range(2)]
    with limited_proxy(variant, 64, "UDP", *(backend.endpoint.port for backend in backends)) as proxy:
        clients = [stage.datagrams(to=proxy.address) for _ in range(100)]
        for client in clients:
            client.send(b"?")
        assert eventually(lambda: proxy.counters()["accept_errors"] > 0)
        assert len(proxy.log_lines()) <= 10
        assert eventually(
            lambda: not any(counted["open_sessions"] for counted in proxy.counters()["endpoints"].values())
        )
        for client in clients[-5:]:
            client.send(b"again")
            assert client.receive() == b"again"
        sessions = [counted["sessions"] for counted in proxy.counters()["endpoints"].values()]
        assert abs(sessions[0] - sessions[1]) <= 5
