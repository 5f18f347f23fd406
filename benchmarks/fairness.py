"""Whether all get their share: 16 bulk streams among themselves, and small requests beside a bulk stream.

    python benchmarks/fairness.py [--rounds 5] [--seconds 2] [--targets proxy,haproxy,haproxy-splice,nginx]

Prints, as medians over interleaved rounds, what the slowest of 16 streams got of the mean, and the p99 of small
requests (1,000/s, over 16 connections) without and with one bulk stream beside them. `direct` shows what the harness
itself does. Exit code 1 when this proxy's slowest stream gets less than 80 % or a bulk stream makes p99 more than three
times as long. As root the requests' processes go first on the harness's CPUs, so that they wait for the target alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from userspace_proxy.bench.addresses import Address
from userspace_proxy.bench.processes import on_cpus, split_cpus
from userspace_proxy.bench.scenario import Direct, HAProxy, Nginx, ThisProxy
from userspace_proxy.bench.scenario import Target as TargetSpec
from userspace_proxy.bench.targets.base import Target
from userspace_proxy.bench.targets.make import make_target

LEAST_SHARE, MOST_DELAY = 0.8, 3.0
STREAMS, CONNECTIONS, INTERVAL_S = 16, 16, 0.001
POUR, ECHO = b"p", b"e"
MESSAGE = bytes(64)
MIB = 1 << 20
TARGETS: dict[str, TargetSpec] = {
    "proxy": ThisProxy(name="proxy"),
    "haproxy": HAProxy(name="haproxy"),
    "haproxy-splice": HAProxy(name="haproxy-splice", splice=True),
    "nginx": Nginx(name="nginx"),
    "direct": Direct(name="direct"),
}
processes = get_context("spawn")


# The harness: each function is a process of its own


def serve(pipe: Connection) -> None:
    """Pour bytes, or echo, on each connection, as its first byte says, in a process each. The peers end them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    pipe.send(listener.getsockname())
    while True:
        sock, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            with contextlib.suppress(OSError):
                treat(sock)
            os._exit(0)
        sock.close()


def treat(sock: socket.socket) -> None:
    block = bytes(MIB)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.recv(1) == POUR:
        while True:
            sock.sendall(block)
    go_first()
    while data := sock.recv(4096):
        sock.sendall(data)


def drink(pipe: Connection, address: Address, streams: int, seconds: float) -> None:
    """Tell when bytes flow, then send what each stream has got in the seconds after that."""
    selector, got = selectors.DefaultSelector(), [0] * streams
    socks = [connect(address, POUR) for _ in range(streams)]
    for number, sock in enumerate(socks):
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, number)
    buffer = bytearray(MIB)

    def drink_until(end: float) -> None:
        while time.monotonic() < end:
            for key, _ in selector.select(0.1):
                got[key.data] += socks[key.data].recv_into(buffer, MIB, socket.MSG_TRUNC)  # discarded, not copied

    drink_until(time.monotonic() + seconds / 4)
    pipe.send(None)
    got[:] = [0] * streams
    drink_until(time.monotonic() + seconds)
    pipe.send(got)


def ask(pipe: Connection, address: Address, seconds: float) -> None:
    """Send the p99 in seconds of requests that are due at fixed times, on one connection after the other.

    Latency counts from when a request was due, so one that waits for the answer before it has that in its own.
    """
    go_first()
    socks = [connect(address, ECHO) for _ in range(CONNECTIONS)]
    asked: list[deque[float]] = [deque() for _ in socks]  # when those were due that are not answered
    selector = selectors.SelectSelector()  # whose time-outs are finer than epoll's milliseconds
    for number, sock in enumerate(socks):
        selector.register(sock, selectors.EVENT_READ, number)
    latencies: list[float] = []
    to_come = deque(time.perf_counter() + number * INTERVAL_S for number in range(int(seconds / INTERVAL_S)))
    number = 0
    while to_come or any(asked):
        while to_come and to_come[0] <= time.perf_counter():
            asked[number].append(to_come.popleft())
            if len(asked[number]) == 1:
                socks[number].sendall(MESSAGE)
            number = (number + 1) % CONNECTIONS
        for key, _ in selector.select(max(0.0, to_come[0] - time.perf_counter()) if to_come else None):
            socks[key.data].recv(4096)
            latencies.append(time.perf_counter() - asked[key.data].popleft())
            if asked[key.data]:
                socks[key.data].sendall(MESSAGE)
    pipe.send(statistics.quantiles(latencies, n=100)[98])


def go_first() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def favour(pid: int) -> None:
    """Give the session of a process more time than others get, as Linux shares its CPUs out among sessions first."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-20")


def connect(address: Address, first: bytes) -> socket.socket:
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(first)
    return sock


# The measurement


@contextlib.contextmanager
def process(work: object, *arguments: object) -> Iterator[Connection]:
    """Run a function in a process of its own until the context is left, and return what it can be heard through."""
    ours, theirs = processes.Pipe()
    child = processes.Process(target=work, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.kill()
        child.join()


def share_of_slowest(address: Address, seconds: float) -> float:
    with process(drink, address, STREAMS, seconds) as drinker:
        drinker.recv()
        got = drinker.recv()
        return min(got) / statistics.fmean(got)


def p99(address: Address, seconds: float) -> float:
    with process(ask, address, seconds) as asker:
        return asker.recv()


def p99_beside_bulk(address: Address, seconds: float) -> tuple[float, float]:
    """Return the p99 in seconds, and what the stream beside it got, in Gbit/s."""
    with process(drink, address, 1, seconds) as drinker:
        drinker.recv()
        found = p99(address, seconds / 2)
        return found, drinker.recv()[0] * 8e-9 / seconds


async def measure(target: Target, backend: Address, seconds: float) -> dict[str, float]:
    await target.start([backend], None, tcp=True, udp=False)
    for pid in target.pids():
        favour(pid)
    try:
        (address,) = target.addresses([backend], udp=False)
        alone = p99(address, seconds / 2)
        beside, gbit_s = p99_beside_bulk(address, seconds)
        found = {"share": share_of_slowest(address, seconds), "alone": alone, "beside": beside, "gbit_s": gbit_s}
    finally:
        await target.stop()
    return {**found, "delay": beside / alone}


async def main(names: list[str], rounds: int, seconds: float) -> int:
    harness_cpus, target_cpus = split_cpus(pin=True)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    favour(os.getpid())
    with tempfile.TemporaryDirectory() as directory, on_cpus(harness_cpus), process(serve) as server:
        backend = server.recv()
        for _ in range(rounds):
            for name in names:
                target = make_target(TARGETS[name], directory=Path(directory), cpus=target_cpus, allow_remote=False)
                rows[name].append(await measure(target, backend, seconds))
    medians = {name: {key: statistics.median(row[key] for row in of) for key in of[0]} for name, of in rows.items()}
    print("| target | slowest of 16 ÷ mean | p99 alone | beside bulk | ÷ alone | bulk meanwhile |")
    print("|---|---|---|---|---|---|")
    for name, found in medians.items():
        print(f"| {name} | {found['share']:.2f} | {found['alone'] * 1e6:.0f} µs | {found['beside'] * 1e6:.0f} µs "
              f"| {found['delay']:.1f} | {found['gbit_s']:.1f} Gbit/s |")  # fmt: skip
    ours = medians.get("proxy")
    return int(ours is not None and (ours["share"] < LEAST_SHARE or ours["delay"] > MOST_DELAY))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--targets", default="proxy,haproxy,haproxy-splice,nginx,direct")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.targets.split(","), options.rounds, options.seconds)))
